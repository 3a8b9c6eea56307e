"""Processes that do one part of the work each, so that one that hangs or dies takes no other with it.

A process appends what it finds to a file, a JSON document a line, as soon as it has found it. So what was
found before it hung or died is not lost.
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
"""For a process that was told to stop, before it is killed."""
_BURIAL_S: Final = 10.0
"""For one that was killed: a driver that hangs may keep it for ever."""
_LOOK_S: Final = 0.1
_TAIL: Final = 12


class Interrupts:
    """Ctrl-C and SIGTERM while it is entered: noted, not raised, so that no process is lost sight of.

    Attributes:
        asked: Whether there was one.
    """

    asked: ClassVar[bool] = False

    def __enter__(self) -> None:
        """Note them from now on; what this process ignores stays ignored."""
        Interrupts.asked = False
        numbers = (signal.SIGINT, signal.SIGTERM)
        noted = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in noted}

    def __exit__(self, *_: object) -> None:
        """As before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        Interrupts.asked = False

    @staticmethod
    def _note(*_: object) -> None:
        Interrupts.asked = True


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, and what it left.

    Attributes:
        records: What it found, in order.
        code: Its exit code, negative for a signal; None: it could not even be killed.
        seconds: How long it ran.
        stopped: Whether it ran past its limit.
        interrupted: Whether this process was told to stop (Ctrl-C) meanwhile.
        said: The last lines of its output.
    """

    records: list[dict[str, Any]]
    code: int | None
    seconds: float
    stopped: bool = False
    interrupted: bool = False
    said: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether it came to its end and said that all is well."""
        return self.code == 0 and not self.stopped and not self.interrupted

    @property
    def how(self) -> str:
        """In words."""
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
) -> Ended:
    """Run Python in a process group of its own; returns when it is over, or soon after ``limit_s``.

    It is stopped if :class:`Interrupts` are asked for, and not begun if they were.

    Args:
        command: What follows the interpreter.
        records: The file that the command is told to append to; may exist.
        limit_s: Seconds.
        environment: Variables over those of this process.
        directory: Where it runs; the current one by default.
    """
    if Interrupts.asked:
        return Ended([], None, 0.0, interrupted=True)
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
        while child.poll() is None and not Interrupts.asked and time.monotonic() < start + limit_s:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_S)
        interrupted = Interrupts.asked
        stopped = child.poll() is None and not interrupted
        _end(child)
        seconds = time.monotonic() - start
        output.seek(0)
        said = output.read().decode("utf-8", "replace").splitlines()
    tail = [line for line in said if line.strip()][-_TAIL:]
    return Ended(read(records), child.returncode, seconds, stopped, interrupted, tail)


def child_environment() -> dict[str, str]:
    """Variables for every process: this package is found, nothing is buffered, bits are reproducible."""
    source = str(Path(penstock.__file__).resolve().parents[1])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(map(os.path.abspath, paths))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    }


def append(records: Path, record: Mapping[str, Any]) -> None:
    """Add a record; it is in the file when this returns."""
    with records.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(records: Path) -> list[dict[str, Any]]:
    """All records that are whole."""
    found = []
    with suppress(FileNotFoundError):
        for line in records.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # the process died while it wrote it
                found.append(json.loads(line))
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    """Have nothing of its group left, if that can be done."""
    for number, patience_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, _BURIAL_S)):
        if child.poll() is None or number is signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
