"""The parent's side of jobs: processes that are started, asked, looked at from outside, and ended.

Whatever happens, leaving a :class:`Team` ends its processes: they are killed, and their parts waited for.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from penstock.core import errors
from penstock.core.errors import PenstockError, WorkerError

_PATIENCE_S: Final = 3600.0
"""Longer than any command takes."""
_GRACE_S: Final = 5.0
"""What others of a team get to fail by themselves once one has died."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Child:
    """One process that answers lines of JSON with lines of JSON."""

    def __init__(self, what: str, command: Sequence[str], folder: Path) -> None:
        """Start it.

        Args:
            what: What to call it in errors.
            command: Modules and arguments, for this Python.
            folder: Where its standard error goes, to a file without a name.
        """
        self.what = what
        self._errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by kill)
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        self._rest = b""

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def tell(self, what: dict[str, Any]) -> None:
        """Give it a command. That it has died is noticed when its answer is read."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def is_answer(self) -> bool:
        """Read what there is; whether it is a whole line. Raises WorkerError if it has died."""
        assert self._process.stdout is not None
        read = os.read(self._process.stdout.fileno(), 1 << 16)
        self._rest += read
        if not read and b"\n" not in self._rest:
            raise self.death()
        return b"\n" in self._rest

    def answer(self) -> dict[str, Any]:
        """The line. Raises what it says went wrong."""
        line, _, self._rest = self._rest.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            kind = getattr(errors, str(told.get("kind")), PenstockError)
            plain = kind in (errors.ConfigError, errors.CheckpointError, errors.SuspendError)
            raise (kind if plain else PenstockError)(f"{self.what}: {told['error']}")
        return told

    def fileno(self) -> int:
        """Of its answers."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def death(self) -> WorkerError:
        """How it ended, with its last words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        code = self._process.returncode
        how = (
            f"was killed by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
        )
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return WorkerError(
            f"{self.what} (process {self.pid}) {how}{last}; nothing of this run is left: the others were"
            " ended, checkpoints removed; if memory ran out, take a smaller scale or fewer neighbours"
        )

    def resident_bytes(self) -> int:
        """Its resident memory, as seen from outside."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            return 0

    def kill(self) -> None:
        """End it now. Idempotent."""
        self._process.kill()
        self._process.wait()
        for each in (self._process.stdin, self._process.stdout, self._errors):
            assert each is not None
            with suppress(OSError):
                each.close()


class Team:
    """The processes of one job: all get the same command, and all answer."""

    def __init__(self, children: Sequence[Child]) -> None:
        """Look after these. Use it in a ``with`` block."""
        self._children = list(children)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.kill()

    def begin(self, what: str, **told: Any) -> None:
        """Give all of them a command."""
        for each in self._children:
            each.tell({"do": what, **told})

    def end(self) -> list[dict[str, Any]]:
        """All answers, by rank. Raises WorkerError if one has died, or what one says went wrong."""
        return _answers(self._children)

    def ask(self, what: str, **told: Any) -> list[dict[str, Any]]:
        """``begin`` and ``end``."""
        self.begin(what, **told)
        return self.end()

    def resident_bytes(self) -> int:
        """Of all its processes."""
        return sum(each.resident_bytes() for each in self._children)

    def kill(self) -> None:
        """End its processes now. Idempotent."""
        for each in self._children:
            each.kill()


def hire(network: str, what: str, folder: Path, **facts: Any) -> Team:
    """Start the ranks of a job; they are there when their first answer is, which ``end`` waits for.

    Args:
        network: Of the nine.
        what: What to call it in errors.
        folder: Theirs alone; exists.
        facts: ``scale``, ``parallel``, ``world``, ``device``, ``threads``.
    """
    children: list[Child] = []
    try:
        for rank in range(facts["world"]):
            own = folder / f"rank-{rank}"
            own.mkdir()
            told = facts | {
                "network": network,
                "rank": rank,
                "folder": str(own),
                "rendezvous": str(folder / "rendezvous"),
                "parent": os.getpid(),
            }
            command = ("-m", "penstock.lab.characterize.worker", json.dumps(told))
            name = what if facts["world"] == 1 else f"{what}, rank {rank}"
            children.append(Child(name, command, folder))
    except BaseException:
        Team(children).kill()
        raise
    return Team(children)


def _answers(children: Sequence[Child]) -> list[dict[str, Any]]:
    """One of each. If several fail, the one that was killed, or failed first, is told of."""
    found: dict[int, dict[str, Any]] = {}
    failed: list[PenstockError] = []
    with selectors.DefaultSelector() as waiting:
        for rank, child in enumerate(children):
            waiting.register(child, selectors.EVENT_READ, rank)
        deadline = time.monotonic() + _PATIENCE_S
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                child = children[key.data]
                try:
                    if not child.is_answer():
                        continue
                    found[key.data] = child.answer()
                except PenstockError as error:
                    failed.append(error)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                waiting.unregister(child)
            if failed and all(isinstance(each, WorkerError) for each in failed):
                break  # the others wait for it in vain
    if failed:
        raise failed[0]
    if len(found) < len(children):
        missing = next(each for rank, each in enumerate(children) if rank not in found)
        raise WorkerError(f"{missing.what} (process {missing.pid}) has not answered for an hour")
    return [found[rank] for rank in range(len(children))]
