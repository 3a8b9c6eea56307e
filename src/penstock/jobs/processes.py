"""Processes of jobs: starting, finding, measuring and ending them.

A child of this process is waited for, and its exit code is known. A process that an earlier manager has
started is not a child: it is identified by its number and start time together, and held by a descriptor
(``pidfd``), so that no signal reaches another process with the same number.
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
from penstock.core.memory import own_bytes
from penstock.swap.channel import start_ticks

_SHELLS: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names of variables that every shell passes on; it may drop others."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a process, which a later process with its number does not have."""

    pid: int
    start_ticks: int

    def lives(self) -> bool:
        """Return whether the process exists and has not ended."""
        return self.pid > 0 and start_ticks(self.pid) == self.start_ticks


class JobProcess:
    """A job's process. For one thread.

    Attributes:
        identity: Identity of the process.
        code: Exit code; None while it lives, or if it is not known.
    """

    def __init__(self, identity: Identity, child: subprocess.Popen[bytes] | None = None) -> None:
        """Open a living process; see ``begin`` and ``find``."""
        self.identity = identity
        self.code: int | None = None
        self._child = child
        self._fd = -1
        with suppress(OSError, AttributeError):  # an old kernel, or it has already ended
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
        """Start a process in its own session, so that the end of the manager's does not end it.

        Args:
            command: Program and arguments.
            cwd: Working directory.
            env: Whole environment.
            log: File to which its output is appended.
            inherit: Descriptor that it inherits.

        Raises:
            JobError: It cannot be started.
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
            raise JobError(f"cannot be started: {error}") from error
        return cls(Identity(child.pid, start_ticks(child.pid) or 0), child)

    @classmethod
    def find(cls, identity: Identity) -> Self | None:
        """Open a process that an earlier manager has started; None if it has ended."""
        if not identity.lives():
            return None
        found = cls(identity)
        if identity.lives():  # still, now that the descriptor is open
            return found
        found.close()
        return None

    def has_ended(self) -> bool:
        """Return whether the process has ended; set ``code`` if that is known.

        The remaining processes of an ended child's group are killed, because their memory would not be
        counted. If SIGCHLD is ignored, the kernel does not keep the exit code.
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
        """Send a signal to the process, unless it has ended."""
        with suppress(ProcessLookupError, OSError):
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
            elif self.identity.lives():
                os.kill(self.identity.pid, number)

    def ignores(self, number: int) -> bool:
        """Return whether the process ignores a signal now."""
        with suppress(OSError, ValueError):
            text = Path(f"/proc/{self.identity.pid}/status").read_text(encoding="ascii")
            mask = text.partition("SigIgn:")[2].split(maxsplit=1)
            return bool(int(mask[0], 16) >> (number - 1) & 1)
        return False

    def kill_all(self) -> None:
        """Kill the process and all others of its group."""
        with suppress(ProcessLookupError, PermissionError):
            if self.identity.lives():
                os.killpg(self.identity.pid, signal.SIGKILL)

    def held_bytes(self) -> int:
        """Return the DRAM that it and its children hold, without file-backed memory."""
        return held_bytes(self.identity.pid) if self.identity.lives() else 0

    def io_bytes(self) -> int:
        """Return the total bytes that it has read from and written to devices."""
        with suppress(OSError, ValueError):
            text = Path(f"/proc/{self.identity.pid}/io").read_text(encoding="ascii")
            values = dict(line.split(": ") for line in text.splitlines())
            return int(values["read_bytes"]) + int(values["write_bytes"])
        return 0

    def close(self) -> None:
        """Close the descriptor; the process continues."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._child is not None and self._child.returncode is None:
            self._child.returncode = -1  # otherwise Python warns that it still runs


def end_holders(path: str) -> None:
    """Kill all other processes that can write to a file, which are those that inherited it."""
    with suppress(OSError):
        file = os.stat(path)
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != os.getpid() and _can_write(name, file):
                _end_if(int(name), lambda pid: _can_write(str(pid), file))


def _end_if(pid: int, still: Callable[[int], bool]) -> None:
    """Kill a process, unless another has its number by now."""
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
    """Return the DRAM of a process and its descendants, without file-backed memory; 0 if it has ended."""
    own = 0
    with suppress(OSError, ValueError):
        own = own_bytes(Path(f"/proc/{pid}/status").read_bytes())
    return own + sum(_shared_out(child) for child in _children(pid))


def _shared_out(pid: int) -> int:
    """Return the DRAM of a child and its descendants; shared memory counts proportionally."""
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


def shell_prefix(env: Mapping[str, str]) -> list[str]:
    """Return a prefix for a command in a shell, which sets the variables that shells may drop."""
    odd = [f"{name}={value}" for name, value in env.items() if not _SHELLS.fullmatch(name)]
    return ["/usr/bin/env", "--", *odd] if odd else []


def describe_end(code: int | None) -> str:
    """Describe how a process ended."""
    if code is None:
        return "ended; its exit code is not known, because no manager was running, or it ignores SIGCHLD"
    if code == 0:
        return "done"
    if code > 0:
        return f"failed with exit code {code}"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else code
    cause = ", perhaps out of memory (see dmesg)" if code == -signal.SIGKILL else ""
    return f"killed by {name}{cause}"
