"""Processes of a job, seen by the parent: started, given commands, measured, and ended.

Leaving a :class:`RankProcesses` kills its processes and waits for them, whatever happens.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from penstock.core import errors
from penstock.core.errors import PenstockError, WorkerError

_REPLY_TIMEOUT_S: Final = 3600.0
"""Time limit for a reply, longer than any command takes."""
_GRACE_S: Final = 5.0
"""Time for the other ranks to fail by themselves after one has died."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class RankProcess:
    """A process that reads commands and writes replies, each a line of JSON."""

    def __init__(self, what: str, command: Sequence[str], folder: Path) -> None:
        """Start it.

        Args:
            what: Name in errors.
            command: Modules and arguments for this Python.
            folder: Directory for an unnamed file with its standard error.
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
        """Process id."""
        return self._process.pid

    def send(self, command: dict[str, Any]) -> None:
        """Write a command. The death of the process shows when its reply is read."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def receive(self) -> bool:
        """Read what has come; return True once it is a line. Raises WorkerError if the process died."""
        assert self._process.stdout is not None
        read = os.read(self._process.stdout.fileno(), 1 << 16)
        self._rest += read
        if not read and b"\n" not in self._rest:
            raise self.death()
        return b"\n" in self._rest

    def answer(self) -> dict[str, Any]:
        """Parse the line. Raises the error that it reports."""
        line, _, self._rest = self._rest.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            kind = getattr(errors, str(reply.get("kind")), PenstockError)
            plain = kind in (errors.ConfigError, errors.CheckpointError, errors.SuspendError)
            raise (kind if plain else PenstockError)(f"{self.what}: {reply['error']}")
        return reply

    def fileno(self) -> int:
        """File descriptor of the replies, for a selector."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def death(self) -> WorkerError:
        """Return an error that says how the process ended, with the last line of its standard error."""
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
            f"{self.what} (process {self.pid}) {how}{last}; the other processes were ended and all"
            " checkpoints removed; if memory ran out, choose a smaller scale or fewer jobs at a time"
        )

    def resident_bytes(self) -> int:
        """Resident memory of the process, as the system counts it."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            return 0

    def kill(self) -> None:
        """Kill it and close its files. Idempotent."""
        self._process.kill()
        self._process.wait()
        for each in (self._process.stdin, self._process.stdout, self._errors):
            assert each is not None
            with suppress(OSError):
                each.close()


class RankProcesses:
    """The processes of one job, which all get the same commands and all reply."""

    def __init__(self, children: Sequence[RankProcess]) -> None:
        """Take over these processes. Use it in a ``with`` block."""
        self._children = list(children)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command to all."""
        for each in self._children:
            each.send({"do": command, **arguments})

    def receive(self) -> list[dict[str, Any]]:
        """Return all replies, by rank. Raises WorkerError if one died, or the error that one reports."""
        return _replies(self._children)

    def ask(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to all and return the replies."""
        self.send(command, **arguments)
        return self.receive()

    def resident_bytes(self) -> int:
        """Resident memory of all processes together."""
        return sum(each.resident_bytes() for each in self._children)

    def kill(self) -> None:
        """Kill the processes. Idempotent."""
        for each in self._children:
            each.kill()


def wait_for_any(jobs: Iterable[RankProcesses], seconds: float) -> bool:
    """Wait until a process of these jobs replies or dies; return False if none does in that time."""
    children = [child for job in jobs for child in job._children]
    return bool(select.select(children, (), (), seconds)[0])


def spawn(network: str, what: str, folder: Path, **facts: Any) -> RankProcesses:
    """Start the ranks of a job, which send a first reply when they are ready.

    Args:
        network: Name of one of the nine networks.
        what: Name of the job in errors.
        folder: An existing directory for this job alone.
        facts: ``scale``, ``parallel``, ``world``, ``device``, ``threads``.
    """
    children: list[RankProcess] = []
    try:
        for rank in range(facts["world"]):
            own = folder / f"rank-{rank}"
            own.mkdir()
            job = facts | {
                "network": network,
                "rank": rank,
                "folder": str(own),
                "rendezvous": str(folder / "rendezvous"),
                "parent": os.getpid(),
            }
            command = ("-m", "penstock.lab.characterize.worker", json.dumps(job))
            name = what if facts["world"] == 1 else f"{what}, rank {rank}"
            children.append(RankProcess(name, command, folder))
    except BaseException:
        RankProcesses(children).kill()
        raise
    return RankProcesses(children)


def _replies(children: Sequence[RankProcess]) -> list[dict[str, Any]]:
    """Wait for a reply of each; if several fail, raise the error of the one that died or failed first."""
    found: dict[int, dict[str, Any]] = {}
    failed: list[PenstockError] = []
    with selectors.DefaultSelector() as waiting:
        for rank, child in enumerate(children):
            waiting.register(child, selectors.EVENT_READ, rank)
        deadline = time.monotonic() + _REPLY_TIMEOUT_S
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                child = children[key.data]
                try:
                    if not child.receive():
                        continue
                    found[key.data] = child.answer()
                except PenstockError as error:
                    failed.append(error)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                waiting.unregister(child)
            if failed and all(isinstance(each, WorkerError) for each in failed):
                break  # the others wait for the dead one and would never reply
    if failed:
        raise failed[0]
    if len(found) < len(children):
        missing = next(each for rank, each in enumerate(children) if rank not in found)
        raise WorkerError(f"{missing.what} (process {missing.pid}) has not answered for an hour")
    return [found[rank] for rank in range(len(children))]
