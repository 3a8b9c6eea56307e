"""Processes of jobs as seen from outside: begun, found again, measured, ended.

A process that this one has begun is waited for, and its exit code known. One that an earlier manager has
begun is somebody else's child: it is known by its number and the moment of its start, together, and held
by a descriptor (``pidfd``), so that no signal reaches another that has got the number since.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from penstock.core.errors import JobError
from penstock.swap.channel import start_ticks

_SHELLS: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names of variables that every shell hands on; others it may leave out."""
_OWN: Final = ("RssAnon", "RssShmem")
"""What a process does not share with a file: it cannot be dropped by the kernel."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, and no other that gets its number later."""

    pid: int
    start_ticks: int

    def lives(self) -> bool:
        """Whether it is there and has not ended."""
        return self.pid > 0 and start_ticks(self.pid) == self.start_ticks


class Process:
    """A job's process. For one thread.

    Attributes:
        identity: It.
        code: Its exit code; None: it lives, or nobody knows.
    """

    def __init__(self, identity: Identity, child: subprocess.Popen[bytes] | None = None) -> None:
        """Hold on to one that lives; see ``begin`` and ``find``."""
        self.identity = identity
        self.code: int | None = None
        self._child = child
        self._fd = -1
        with suppress(OSError, AttributeError):  # an old kernel, or it has ended already
            self._fd = os.pidfd_open(identity.pid)

    @classmethod
    def begin(
        cls,
        command: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        log: str,
        inherit: int,
    ) -> Self:
        """Begin one, in a session of its own: what ends the manager's does not end it.

        Args:
            command: Program and arguments.
            cwd: Its directory.
            env: Its whole environment.
            log: Where its output goes, to the end of what is there.
            inherit: A descriptor that it gets.

        Raises:
            JobError: It cannot be begun.
        """
        try:
            with open(log, "ab", buffering=0) as file:
                child = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(inherit,),
                )
        except (OSError, ValueError) as error:
            raise JobError(f"cannot be begun: {error}") from error
        return cls(Identity(child.pid, start_ticks(child.pid) or 0), child)

    @classmethod
    def find(cls, identity: Identity) -> Self | None:
        """One that an earlier manager has begun; None: it has ended."""
        if not identity.lives():
            return None
        found = cls(identity)
        if identity.lives():  # still, now that it is held
            return found
        found.close()
        return None

    def has_ended(self) -> bool:
        """Whether it has; sets ``code`` where that can be known.

        What a child has left in its group is ended then: nobody would count what that holds. Where
        SIGCHLD is ignored the kernel does not keep a child for its parent: its code is not known.
        """
        if self._child is None:
            return not self.identity.lives()
        if self.code is None:
            try:
                over = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            if over is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, signal.SIGKILL)
                self.code = self._child.wait()
        return self.code is not None

    def send(self, number: int) -> None:
        """Send a signal to the process; nothing if it has ended."""
        with suppress(ProcessLookupError, OSError):
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
            elif self.identity.lives():
                os.kill(self.identity.pid, number)

    def kill_all(self) -> None:
        """End it at once, and all that it has begun in its group."""
        with suppress(ProcessLookupError, PermissionError):
            if self.identity.lives():
                os.killpg(self.identity.pid, signal.SIGKILL)

    def held_bytes(self) -> int:
        """DRAM that it and its children hold, but for what is in files."""
        return held_bytes(self.identity.pid) if self.identity.lives() else 0

    def io_bytes(self) -> int:
        """What it has read from and written to devices, in all."""
        with suppress(OSError, ValueError):
            text = Path(f"/proc/{self.identity.pid}/io").read_text(encoding="ascii")
            values = dict(line.split(": ") for line in text.splitlines())
            return int(values["read_bytes"]) + int(values["write_bytes"])
        return 0

    def close(self) -> None:
        """Let go of it; it goes on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._child is not None and self._child.returncode is None:
            self._child.returncode = -1  # else Python warns that it lives still


def end_holders(path: str) -> None:
    """End at once all other processes that can write to a file: who inherited it, and nobody else."""
    with suppress(OSError):
        file = os.stat(path)
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != os.getpid() and _can_write(name, file):
                _end_if(int(name), lambda pid: _can_write(str(pid), file))


def _end_if(pid: int, still: Callable[[int], bool]) -> None:
    """End a process, and no other that has got its number since."""
    with suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            if still(pid):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def _can_write(pid: str, file: os.stat_result) -> bool:
    with suppress(OSError, ValueError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), file):
                    info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii")
                    flags = info.partition("flags:")[2].split()
                    if int(flags[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                        return True
    return False


def held_bytes(pid: int) -> int:
    """DRAM of a process and its descendants, but for what is in files; 0: there is none."""
    own = _fields(f"/proc/{pid}/status", _OWN)
    return own + sum(_shared_out(child) for child in _children(pid))


def _shared_out(pid: int) -> int:
    """Of a child: what it shares with its parent counts by its part."""
    own = _fields(f"/proc/{pid}/smaps_rollup", ("Pss_Anon", "Pss_Shmem"))
    return own + sum(_shared_out(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii")
            found += map(int, text.split())
    return found


def _fields(path: str, names: Sequence[str]) -> int:
    total = 0
    with suppress(OSError, ValueError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in names:
                total += int(value.split()[0]) * 1024
    return total


def past_a_shell(env: Mapping[str, str]) -> list[str]:
    """What goes before a command that a shell begins, so that it has the variables that those drop."""
    odd = [f"{name}={value}" for name, value in env.items() if not _SHELLS.fullmatch(name)]
    return ["/usr/bin/env", "--", *odd] if odd else []


def describe_end(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "ended; its exit code is not known: its manager was gone, or ignores SIGCHLD"
    if code == 0:
        return "done"
    if code > 0:
        return f"failed with exit code {code}"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else code
    cause = ", perhaps for want of memory (see dmesg)" if code == -signal.SIGKILL else ""
    return f"killed by {name}{cause}"
