"""Process that trains one rank of a job and executes commands, a line of JSON each.

Started by :mod:`.rank_processes` as ``python -m penstock.lab.characterize.worker``. Replies are lines of
JSON on the original standard output; output of libraries goes to standard error. The process ends when
its input does, and with the process that started it.
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
from penstock.lab.characterize import checkpoint_methods, parallel
from penstock.lab.characterize.child_cleanup import exit_with_parent
from penstock.lab.characterize.training import RankTraining


class RankWorker:
    """One rank. Each method that is named in ``COMMANDS`` executes one command."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Meet the other ranks, and build the network."""
        self._folder = Path(job["folder"])
        device = torch.device(job["device"])
        if device.type == "cuda":
            device = torch.device("cuda", job["rank"] % torch.cuda.device_count())
            torch.cuda.set_device(device)
        if job["threads"]:
            torch.set_num_threads(job["threads"])
        parallel.join(job["parallel"], job["rank"], job["world"], job["rendezvous"], device)
        self._training = RankTraining(
            job["network"], scale=job["scale"], parallel=job["parallel"], device=device
        )
        self._session: penstock.Session | None = None
        self._saved: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        """Describe the training."""
        return {
            "parameters": self._training.parameters,
            "state_bytes": self._training.state_bytes if self._training.saves else 0,
            "data": self._training.data,
            "threads": torch.get_num_threads(),
        }

    def train(self, steps: int, until: str | None = None) -> dict[str, Any]:
        """Make ``steps`` steps, and then more until a file of that name is there, if one is named."""
        took = [self._training.step() for _ in range(steps)]
        while until is not None and not os.path.exists(until):
            took.append(self._training.step())
        return {"steps_s": took, "loss": self._training.loss}

    def tune(self) -> dict[str, Any]:
        """Start the next stage."""
        self._training.tune()
        return {"data": self._training.data}

    def save(self, way: str, steps: int, step_s: float) -> dict[str, Any]:
        """Save in one way; see :func:`.checkpoint_methods.save`."""
        self._saved[way] = self._training.fingerprint()
        return checkpoint_methods.save(
            self._training, way, self._folder / way, steps=steps, step_s=step_s
        )

    def restore(self, way: str) -> dict[str, Any]:
        """Restore; see :func:`.checkpoint_methods.restore`."""
        folder, wanted = self._folder / way, self._saved[way]
        return checkpoint_methods.restore(self._training, way, folder, wanted=wanted)

    def suspend(self) -> dict[str, Any]:
        """Suspend between two steps, right after a checkpoint: only bytes that it lacks are written."""
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
        """Resume, and close the session."""
        assert self._session is not None
        session, self._session = self._session, None
        start = time.perf_counter()
        penstock.resume(session)
        seconds = time.perf_counter() - start
        session.close()
        return {"resume_s": seconds}


COMMANDS: Final = ("facts", "train", "tune", "save", "restore", "suspend", "resume")


def serve(worker: RankWorker, answer: Callable[[dict[str, Any]], None]) -> None:
    """Execute commands until the input ends."""
    answer({})
    for line in sys.stdin:
        arguments = json.loads(line)
        command = arguments.pop("do")
        assert command in COMMANDS, command
        answer(getattr(worker, command)(**arguments))


def main() -> int:
    """Run the process; its one argument is JSON."""
    job = json.loads(sys.argv[1])
    exit_with_parent(job["parent"])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        serve(RankWorker(job), answer)
    except penstock.PenstockError as error:
        answer({"error": str(error), "kind": type(error).__name__})
        return 1
    parallel.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
