"""Linux control groups for memory limits that the kernel enforces.

[Note: what the kernel counts]
    The memory of a group is that which its processes hold and do not share with processes outside, the
    kernel's memory for them (page tables, sockets), and the page cache of files that they were the first
    to read or write. The kernel reclaims that cache before the limit counts as reached; so the memory
    that a group *holds* is everything but the cache. Swap is disabled for a group by default, because
    memory over the limit would go there silently. Pages of hugetlbfs are not counted.

Both versions are supported: v1, where the memory controller is mounted by itself, and v2
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
_MARGIN_BYTES: Final = 4 * MIB
"""Minimum distance of a new limit to the held memory: v2 would kill processes otherwise."""
_ENTER: Final = 'echo $$ > "$0" || exit 125; exec "$@"'
"""Shell script that enters a group and then runs the command, so that no memory is counted outside."""
ADVICE: Final = (
    "start the manager in its own group, owned by this user, such as with `systemd-run --user --scope -p"
    " Delegate=yes penstock jobs run ...` (as root: without --user)"
)
_NAMES: Final[Mapping[int, Mapping[str, str]]] = {
    1: {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes"},
    2: {"limit": "memory.max", "usage": "memory.current"},
}


@dataclass(frozen=True, slots=True)
class CgroupMembership:
    """The memory group of a process."""

    path: str
    """Directory of the group."""
    version: int
    """Version of control groups: 1 or 2."""


def place_of(cgroup: str, mountinfo: str) -> CgroupMembership:
    """Return the memory group of a process.

    Args:
        cgroup: Content of ``/proc/PID/cgroup``.
        mountinfo: Content of ``/proc/PID/mountinfo``.

    Raises:
        JobError: There is no memory controller, or its files are not visible.
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
        return CgroupMembership(directory, version)
    raise JobError("this process sees no mount of the memory controller")


def own_place() -> CgroupMembership:
    """Return the memory group of this process. Raises JobError as ``place_of`` does."""
    try:
        here = Path("/proc/self")
        return place_of(
            (here / "cgroup").read_text(encoding="utf-8"),
            (here / "mountinfo").read_text(encoding="utf-8"),
        )
    except OSError as error:
        raise JobError(f"control groups cannot be read: {error}") from error


def _mounts(mountinfo: str) -> list[tuple[str, str, str, str]]:
    """Return (root within its file system, mount point, type, options) of each mount."""
    found = []
    for line in mountinfo.splitlines():
        words, _, after = line.partition(" - ")
        first, last = words.split(), after.split()
        if len(first) >= 5 and len(last) >= 3:
            root, mount = (each.replace("\\040", " ") for each in first[3:5])
            found.append((root, mount, last[0], last[2]))
    return found


class Cgroup:
    """A control group with a limit. For one thread.

    Attributes:
        path: Directory of the group.
        limit_bytes: Limit that was set last; the kernel may round it down to a page.
    """

    def __init__(self, path: str, version: int) -> None:
        """Wrap an existing group; see ``make``."""
        self.path = path
        self.limit_bytes = NO_LIMIT
        self._version = version
        self._names = _NAMES[version]

    @classmethod
    def at(cls, path: str) -> Cgroup:
        """Wrap an existing group of either version."""
        old = os.path.exists(os.path.join(path, _NAMES[1]["limit"]))
        return cls(path, 1 if old else 2)

    @classmethod
    def make(cls, parent: str, name: str, version: int, *, limited: bool = True) -> Cgroup:
        """Create a group, without a limit yet, or use an existing one.

        Args:
            parent: Parent group.
            name: Name of the directory.
            version: 1 or 2.
            limited: The group must support a limit.

        Raises:
            JobError: It is not permitted, or the group does not support a limit.
        """
        path = os.path.join(parent, name)
        try:
            with suppress(FileExistsError):
                os.mkdir(path, 0o755)
        except OSError as error:
            raise JobError(
                f"a control group cannot be created in {parent!r} ({error.strerror}): {ADVICE}"
            ) from error
        group = cls(path, version)
        if limited and not os.path.exists(group._file("limit")):
            group.remove()
            raise JobError(f"a control group in {parent!r} would have no memory limit")
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

    # -- content --------------------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Return the memory that the group holds. See [Note: what the kernel counts]."""
        prefix = "total_" if self._version == 1 else ""
        stat = self._fields("memory.stat")
        cache = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
        return max((self._number("usage") or 0) - cache, 0)

    def kills(self) -> int:
        """Return the number of processes that the kernel has killed because of a limit."""
        where = "memory.oom_control" if self._version == 1 else "memory.events"
        return self._fields(where).get("oom_kill", 0)

    def processes(self) -> list[int]:
        """Return the numbers of the processes in this group, without those of child groups."""
        return [int(word) for word in _words(self.path, "cgroup.procs")]

    # -- changes --------------------------------------------------------------------------------------

    def limit(self, nbytes: int, *, swap: bool = False) -> bool:
        """Set the limit to ``nbytes``, or to the presently held memory if that is more.

        Args:
            nbytes: Limit of memory.
            swap: Allow swap in addition.

        Returns:
            True if the limit is ``nbytes``.

        Raises:
            JobError: The kernel refuses the limit.
        """
        wanted = nbytes
        if nbytes < NO_LIMIT:
            nbytes = max(nbytes, self.held_bytes() + _MARGIN_BYTES)
        try:
            if self._version == 1:
                self._limit_v1(nbytes, swap=swap)
            else:
                self._write("memory.swap.max", "max" if swap else "0", optional=True)
                self._write("limit", "max" if nbytes >= NO_LIMIT else str(nbytes))
        except OSError as error:
            if error.errno == errno.EBUSY:  # it holds more now
                return False
            raise JobError(
                f"{self.path!r} refuses a limit of {format_bytes(nbytes)}: {error.strerror}"
            ) from error
        self.limit_bytes = nbytes
        return nbytes == wanted

    def _limit_v1(self, nbytes: int, *, swap: bool) -> None:
        """Set the limits of memory, and of memory and swap together, which is never the lower one."""
        text = "-1" if nbytes >= NO_LIMIT else str(nbytes)
        both = "-1" if swap else text
        if (self._number("memory.memsw.limit_in_bytes") or 0) < nbytes or swap:
            self._write("memory.memsw.limit_in_bytes", both, optional=True)
            self._write("limit", text)
        else:
            self._write("limit", text)
            self._write("memory.memsw.limit_in_bytes", both, optional=True)

    def _write(self, what: str, text: str, *, optional: bool = False) -> None:
        try:
            fd = os.open(self._file(what), os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if optional:
                return
            raise
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def can_bar_swap(self) -> bool:
        """Return whether swap can be disabled for the group."""
        name = "memory.memsw.limit_in_bytes" if self._version == 1 else "memory.swap.max"
        return os.path.exists(self._file(name))

    def kill_together(self) -> None:
        """Let the kernel kill all processes of the group together at the limit, if it can."""
        with suppress(OSError):
            self._write("memory.oom.group", "1")

    def limit_groups_below(self, *, allowed: bool = True) -> None:
        """Allow or forbid limits in child groups. Raises OSError; EBUSY if it contains processes."""
        if self._version == 2:
            self._write("cgroup.subtree_control", "+memory" if allowed else "-memory")
        elif self._number("memory.use_hierarchy") == 0:  # an old kernel: they would not count here
            self._write("memory.use_hierarchy", "1")

    def below(self) -> list[Cgroup]:
        """Return the child groups."""
        with suppress(OSError), os.scandir(self.path) as entries:
            return [Cgroup(each.path, self._version) for each in entries if each.is_dir()]
        return []

    def enter(self, pid: int) -> None:
        """Move a process into the group, but not the memory that it holds. Raises OSError."""
        self._write("cgroup.procs", str(pid))

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return a command that enters the group and then runs ``command``."""
        return ["/bin/sh", "-c", _ENTER, self._file("cgroup.procs"), *command]

    def kill(self) -> None:
        """Kill all processes in the group."""
        with suppress(OSError):
            self._write("cgroup.kill", "1")
            return
        for pid in self.processes():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group if it has no processes and child groups; return whether it is removed."""
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
