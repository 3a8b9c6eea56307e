"""Processes for the parts of the work, so that a hang or crash affects only one part.

A process appends each result to a file, as a line of JSON, as soon as it is known, so that a later hang
or crash does not lose it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import penstock

_GRACE_S: Final = 5.0
"""Time for a process to stop before it is killed."""
_BURIAL_S: Final = 10.0
"""Time limit for a killed process to disappear, which a hanging driver may prevent."""
_LOOK_S: Final = 0.1
_TAIL: Final = 12


class NotedInterrupts:
    """Records Ctrl-C and SIGTERM inside the block without raising, so that children can be ended.

    Attributes:
        asked: There was an interrupt.
    """

    asked: ClassVar[bool] = False

    def __enter__(self) -> None:
        """Begin to record; ignored signals stay ignored."""
        NotedInterrupts.asked = False
        numbers = (signal.SIGINT, signal.SIGTERM)
        noted = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in noted}

    def __exit__(self, *_: object) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        NotedInterrupts.asked = False

    @staticmethod
    def _note(*_: object) -> None:
        NotedInterrupts.asked = True


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Result of a process.

    Attributes:
        records: Its records, in order.
        code: Exit code, negative for a signal; None if it could not be killed.
        seconds: Duration.
        stopped: It exceeded its limit.
        interrupted: This process was interrupted (Ctrl-C) meanwhile.
        said: Last lines of its output.
    """

    records: list[dict[str, Any]]
    code: int | None
    seconds: float
    stopped: bool = False
    interrupted: bool = False
    said: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """True if it ended by itself with success."""
        return self.code == 0 and not self.stopped and not self.interrupted

    @property
    def how(self) -> str:
        """Description of how it ended."""
        if self.interrupted:
            return "interrupted"
        if self.code is None:
            return f"could not be stopped after {self.seconds:.0f} s"
        if self.stopped:
            return f"stopped after {self.seconds:.0f} s"
        if self.code < 0:
            with suppress(ValueError):
                return f"died of {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"


def run(
    command: Sequence[str],
    *,
    records: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> ProcessResult:
    """Run Python in its own process group; return when it has ended, or soon after ``limit_s``.

    An interrupt (see :class:`NotedInterrupts`) stops it, or prevents its start.

    Args:
        command: Arguments of the interpreter.
        records: File to which the command appends; it may exist.
        limit_s: Time limit in seconds.
        environment: Environment variables that override those of this process.
        directory: Working directory; by default the current one.
    """
    if NotedInterrupts.asked:
        return ProcessResult([], None, 0.0, interrupted=True)
    environ = os.environ | child_environment() | dict(environment or {})
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=directory,
            start_new_session=True,
        )
        while (
            child.poll() is None
            and not NotedInterrupts.asked
            and time.monotonic() < start + limit_s
        ):
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_S)
        interrupted = NotedInterrupts.asked
        stopped = child.poll() is None and not interrupted
        _end(child)
        seconds = time.monotonic() - start
        output.seek(0)
        said = output.read().decode("utf-8", "replace").splitlines()
    tail = [line for line in said if line.strip()][-_TAIL:]
    return ProcessResult(read(records), child.returncode, seconds, stopped, interrupted, tail)


def child_environment() -> dict[str, str]:
    """Return variables for every process: path of this package, no buffering, reproducible bits."""
    source = str(Path(penstock.__file__).resolve().parents[1])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(map(os.path.abspath, paths))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    }


def append(records: Path, record: Mapping[str, Any]) -> None:
    """Append a record; it is in the file when this returns."""
    with records.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(records: Path) -> list[dict[str, Any]]:
    """Return all complete records."""
    found = []
    with suppress(FileNotFoundError):
        for line in records.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # the process died during the write
                found.append(json.loads(line))
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    """End all processes of the group, if possible."""
    for number, patience_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, _BURIAL_S)):
        if child.poll() is None or number is signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
