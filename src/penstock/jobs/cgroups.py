"""Control groups of Linux, as far as memory goes: a limit that the kernel keeps.

[Note: what the kernel counts]
    Memory of a group is what its processes hold and share with nobody outside, the kernel's own for them
    (page tables, sockets), and the page cache of files that they were the first to read or write. That
    cache is taken back before the limit is said to be reached; so what a group *holds* here is all but
    the cache. Swap is closed to a group, unless it is opened: what is over the limit would go there
    without anybody being told. Pages of hugetlbfs are in no group of this kind.

Both versions are known: v1, where the memory controller is mounted by itself, and v2
(``Documentation/admin-guide/cgroup-v1/memory.rst`` and ``cgroup-v2.rst`` of the kernel).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.core.errors import JobError
from penstock.core.units import MIB, format_bytes

NO_LIMIT: Final = 1 << 62
_ROOM_BYTES: Final = 4 * MIB
"""No limit is set closer than this to what is held: v2 would kill for it."""
_ENTER: Final = 'echo $$ > "$0" || exit 125; exec "$@"'
"""A process enters by itself, before it is what it is to be: so nothing of it can stay outside."""
ADVICE: Final = (
    "begin the manager in a group of its own that is this user's, as by `systemd-run --user --scope -p"
    " Delegate=yes penstock jobs run ...` (root: without --user)"
)
_NAMES: Final[Mapping[int, Mapping[str, str]]] = {
    1: {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes"},
    2: {"limit": "memory.max", "usage": "memory.current"},
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands."""

    path: str
    """Its group's directory."""
    version: int
    """1 or 2."""


def place_of(cgroup: str, mountinfo: str) -> Place:
    """The memory group of a process.

    Args:
        cgroup: What its ``/proc/PID/cgroup`` says.
        mountinfo: What its ``/proc/PID/mountinfo`` says.

    Raises:
        JobError: There is no memory controller, or its files are not to be seen; says which.
    """
    lines = [line.split(":", 2) for line in cgroup.splitlines() if line.count(":") >= 2]
    old = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    version = 2 if old is None else 1
    path = old if old is not None else next((path for n, _, path in lines if n == "0"), None)
    if path is None:
        raise JobError("this kernel has no control groups")
    for root, mount, kind, options in _mounts(mountinfo):
        if kind != ("cgroup" if version == 1 else "cgroup2"):
            continue
        if version == 1 and "memory" not in options.split(","):
            continue
        inner = os.path.relpath(path, root)
        if inner.startswith(".."):
            continue
        directory = os.path.normpath(os.path.join(mount, inner))
        if version == 2 and "memory" not in _words(directory, "cgroup.controllers"):
            raise JobError(f"the memory controller is not available in {directory!r}: {ADVICE}")
        return Place(directory, version)
    raise JobError("the memory controller is mounted nowhere that this process can see")


def own_place() -> Place:
    """The memory group of this process. Raises JobError, as ``place_of``."""
    try:
        here = Path("/proc/self")
        return place_of(
            (here / "cgroup").read_text(encoding="utf-8"),
            (here / "mountinfo").read_text(encoding="utf-8"),
        )
    except OSError as error:
        raise JobError(f"control groups cannot be looked at: {error}") from error


def _mounts(mountinfo: str) -> list[tuple[str, str, str, str]]:
    """Of each mount: its root within its file system, where it is, type, options."""
    found = []
    for line in mountinfo.splitlines():
        words, _, after = line.partition(" - ")
        first, last = words.split(), after.split()
        if len(first) >= 5 and len(last) >= 3:
            root, mount = (each.replace("\\040", " ") for each in first[3:5])
            found.append((root, mount, last[0], last[2]))
    return found


class Group:
    """A group with a limit. For one thread.

    Attributes:
        path: Its directory.
        limit_bytes: As it was set last; in fact it may be a page less.
    """

    def __init__(self, path: str, version: int) -> None:
        """One that is there; see ``make``."""
        self.path = path
        self.limit_bytes = NO_LIMIT
        self._version = version
        self._names = _NAMES[version]

    @classmethod
    def at(cls, path: str) -> Group:
        """One that is there, of whichever version."""
        old = os.path.exists(os.path.join(path, _NAMES[1]["limit"]))
        return cls(path, 1 if old else 2)

    @classmethod
    def make(cls, parent: str, name: str, version: int, *, limited: bool = True) -> Group:
        """Make one, without a limit yet; one that is there already is taken as it is.

        Args:
            parent: The group that it is made in.
            name: Of its directory.
            version: 1 or 2.
            limited: Whether it is to have a limit.

        Raises:
            JobError: It is not permitted, or it can have no limit.
        """
        path = os.path.join(parent, name)
        try:
            with suppress(FileExistsError):
                os.mkdir(path, 0o755)
        except OSError as error:
            raise JobError(
                f"no group may be made in {parent!r} ({error.strerror}): {ADVICE}"
            ) from error
        group = cls(path, version)
        if limited and not os.path.exists(group._file("limit")):
            group.remove()
            raise JobError(f"a group in {parent!r} would have no limit of memory")
        return group

    def _file(self, what: str) -> str:
        return os.path.join(self.path, self._names.get(what, what))

    def _number(self, what: str) -> int | None:
        with suppress(OSError, ValueError):
            text = Path(self._file(what)).read_text(encoding="ascii").strip()
            return NO_LIMIT if text == "max" else int(text)
        return None

    def _fields(self, what: str) -> dict[str, int]:
        fields: dict[str, int] = {}
        with suppress(OSError):
            for line in Path(self._file(what)).read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                with suppress(ValueError):
                    fields[name] = int(value)
        return fields

    # -- what is in it --------------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """What is held by it, and for it. See [Note: what the kernel counts]."""
        prefix = "total_" if self._version == 1 else ""
        stat = self._fields("memory.stat")
        cache = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
        return max((self._number("usage") or 0) - cache, 0)

    def kills(self) -> int:
        """How many of its processes the kernel has ended because a limit was reached."""
        where = "memory.oom_control" if self._version == 1 else "memory.events"
        return self._fields(where).get("oom_kill", 0)

    def processes(self) -> list[int]:
        """Numbers of those in it, not in groups below it."""
        return [int(word) for word in _words(self.path, "cgroup.procs")]

    # -- what is done with it -------------------------------------------------------------------------

    def limit(self, nbytes: int, *, swap: bool = False) -> bool:
        """Let it hold so much, or what it holds already if that is more.

        Args:
            nbytes: Of memory.
            swap: Whether more may go to swap; else none may.

        Returns:
            Whether it is ``nbytes``.

        Raises:
            JobError: The kernel does not take it.
        """
        wanted = nbytes
        if nbytes < NO_LIMIT:
            nbytes = max(nbytes, self.held_bytes() + _ROOM_BYTES)
        try:
            if self._version == 1:
                self._limit_old(nbytes, swap=swap)
            else:
                self._write("memory.swap.max", "max" if swap else "0", may_lack=True)
                self._write("limit", "max" if nbytes >= NO_LIMIT else str(nbytes))
        except OSError as error:
            if error.errno == errno.EBUSY:  # it holds more by now
                return False
            raise JobError(
                f"{self.path!r} takes no limit of {format_bytes(nbytes)}: {error.strerror}"
            ) from error
        self.limit_bytes = nbytes
        return nbytes == wanted

    def _limit_old(self, nbytes: int, *, swap: bool) -> None:
        """Memory and swap together are limited too, and never below memory."""
        text = "-1" if nbytes >= NO_LIMIT else str(nbytes)
        both = "-1" if swap else text
        if (self._number("memory.memsw.limit_in_bytes") or 0) < nbytes or swap:
            self._write("memory.memsw.limit_in_bytes", both, may_lack=True)
            self._write("limit", text)
        else:
            self._write("limit", text)
            self._write("memory.memsw.limit_in_bytes", both, may_lack=True)

    def _write(self, what: str, text: str, *, may_lack: bool = False) -> None:
        try:
            fd = os.open(self._file(what), os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if may_lack:
                return
            raise
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def can_bar_swap(self) -> bool:
        """Whether swap can be closed to it."""
        name = "memory.memsw.limit_in_bytes" if self._version == 1 else "memory.swap.max"
        return os.path.exists(self._file(name))

    def end_as_one(self) -> None:
        """If the limit is reached, end all of its processes, where the kernel can do that."""
        with suppress(OSError):
            self._write("memory.oom.group", "1")

    def limit_groups_below(self, *, may_have: bool = True) -> None:
        """Let groups below have limits, or no more. Raises OSError; EBUSY: there are processes in it."""
        if self._version == 2:
            self._write("cgroup.subtree_control", "+memory" if may_have else "-memory")
        elif self._number("memory.use_hierarchy") == 0:  # an old kernel: they would not count here
            self._write("memory.use_hierarchy", "1")

    def below(self) -> list[Group]:
        """The groups in it."""
        with suppress(OSError), os.scandir(self.path) as entries:
            return [Group(each.path, self._version) for each in entries if each.is_dir()]
        return []

    def enter(self, pid: int) -> None:
        """Move a process into it; what that holds already stays where it was. Raises OSError."""
        self._write("cgroup.procs", str(pid))

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command that begins in it."""
        return ["/bin/sh", "-c", _ENTER, self._file("cgroup.procs"), *command]

    def kill(self) -> None:
        """End all processes in it at once."""
        with suppress(OSError):
            self._write("cgroup.kill", "1")
            return
        for pid in self.processes():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove it; whether it is gone. One with processes in it, or groups below, stays."""
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _words(directory: str, name: str) -> list[str]:
    with suppress(OSError):
        return Path(directory, name).read_text(encoding="ascii").split()
    return []
