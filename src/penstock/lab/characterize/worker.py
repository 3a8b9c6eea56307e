"""A process that trains one rank of a job, and does what it is told, a line of JSON at a time.

Started by :mod:`.teams` as ``python -m penstock.lab.characterize.worker``. Answers are lines of JSON on
what was standard output; what libraries print goes to standard error. It ends when its input does, and
with the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import penstock
from penstock import checkpoint
from penstock.lab.characterize import parallel, saving
from penstock.lab.characterize.orphans import end_with_parent
from penstock.lab.characterize.training import Training


class Worker:
    """One rank. Every method that is named in ``COMMANDS`` answers one command."""

    def __init__(self, told: dict[str, Any]) -> None:
        """Meet the other ranks, and build what is trained."""
        self._folder = Path(told["folder"])
        device = torch.device(told["device"])
        if device.type == "cuda":
            device = torch.device("cuda", told["rank"] % torch.cuda.device_count())
            torch.cuda.set_device(device)
        if told["threads"]:
            torch.set_num_threads(told["threads"])
        parallel.join(told["parallel"], told["rank"], told["world"], told["rendezvous"], device)
        self._training = Training(
            told["network"], scale=told["scale"], parallel=told["parallel"], device=device
        )
        self._session: penstock.Session | None = None
        self._saved: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        """What is trained."""
        return {
            "parameters": self._training.parameters,
            "state_bytes": self._training.state_bytes if self._training.saves else 0,
            "data": self._training.data,
            "threads": torch.get_num_threads(),
        }

    def train(self, steps: int) -> dict[str, Any]:
        """So many steps."""
        took = [self._training.step() for _ in range(steps)]
        return {"steps_s": took, "loss": self._training.loss}

    def tune(self) -> dict[str, Any]:
        """The next stage begins."""
        self._training.tune()
        return {"data": self._training.data}

    def save(self, way: str, steps: int, step_s: float) -> dict[str, Any]:
        """See :func:`.saving.save`."""
        self._saved[way] = self._training.fingerprint()
        return saving.save(self._training, way, self._folder / way, steps=steps, step_s=step_s)

    def restore(self, way: str) -> dict[str, Any]:
        """See :func:`.saving.restore`."""
        folder, wanted = self._folder / way, self._saved[way]
        return saving.restore(self._training, way, folder, wanted=wanted)

    def suspend(self) -> dict[str, Any]:
        """Between two steps, right after a checkpoint was made: only what it has not is written."""
        training = self._training
        path, state = self._folder / "suspended", training.state()
        checkpoint.save(path, state)
        self._session = penstock.offload(
            training.module, training.optimizer, flash=str(self._folder), policy="keep"
        )
        self._session.__enter__()
        start = time.perf_counter()
        suspended = penstock.suspend(self._session, checkpoint=path, state=state)
        return {
            "suspend_s": time.perf_counter() - start,
            "moved_bytes": suspended.nbytes,
            "written_bytes": suspended.written_bytes,
        }

    def resume(self) -> dict[str, Any]:
        """Back, and the session is left."""
        assert self._session is not None
        session, self._session = self._session, None
        start = time.perf_counter()
        penstock.resume(session)
        seconds = time.perf_counter() - start
        session.close()
        return {"resume_s": seconds}


COMMANDS: Final = ("facts", "train", "tune", "save", "restore", "suspend", "resume")


def serve(worker: Worker, answer: Callable[[dict[str, Any]], None]) -> None:
    """Until there are no more commands."""
    answer({})
    for line in sys.stdin:
        told = json.loads(line)
        what = told.pop("do")
        assert what in COMMANDS, what
        answer(getattr(worker, what)(**told))


def main() -> int:
    """The process; its one argument is JSON."""
    told = json.loads(sys.argv[1])
    end_with_parent(told["parent"])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        serve(Worker(told), answer)
    except penstock.PenstockError as error:
        answer({"error": str(error), "kind": type(error).__name__})
        return 1
    parallel.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
