"""Memory of the machine, of this process's control groups, and of this process itself.

No function raises OSError: what the system does not report is ``None``, 0 or left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

from penstock.core.errors import SizeError
from penstock.core.units import KIB, format_bytes, parse_bytes

AUTO: Final = "auto"
"""Setting of ``memory`` that finds a limit from the memory that is available."""
MEMBERSHIP: Final = Path("/proc/self/cgroup")
CGROUPS: Final = Path("/sys/fs/cgroup")
_SHARE: Final = re.compile(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*")
_NO_LIMIT: Final = 1 << 60
"""Value from which on a limit of a v1 cgroup means that there is none."""
_OWN: Final = (b"RssAnon:", b"RssShmem:")
"""Fields of memory that is not backed by a file, which the kernel cannot drop."""


class MemoryRequest(NamedTuple):
    """Value of the setting ``memory``: a size, a share, or ``"auto"`` (neither)."""

    nbytes: int | None = None
    """Limit of all that Penstock holds."""
    share: Fraction | None = None
    """Part of the machine's or the control group's memory to which the process is limited."""

    def __str__(self) -> str:
        if self.nbytes is not None:
            return format_bytes(self.nbytes)
        return AUTO if self.share is None else f"{float(self.share * 100):g}%"


def parse_memory(value: int | str, *, what: str = "memory") -> MemoryRequest:
    """Parse a size (``"8GiB"``, an integer of bytes), a share (``"60%"``), or ``"auto"``.

    Raises:
        SizeError: None of these, no bytes, or a share that is not above 0 and up to 100 %.
    """
    if isinstance(value, str):
        if value.strip() == AUTO:
            return MemoryRequest()
        if match := _SHARE.fullmatch(value):
            share = Fraction(match[1]) / 100
            if not 0 < share <= 1:
                raise SizeError(
                    f"{what}: {value!r} is not a share; it is above 0% and at most 100%"
                )
            return MemoryRequest(share=share)
    try:
        nbytes = parse_bytes(value, what=what)
    except SizeError as error:
        raise SizeError(
            f"{error}; or give a share of the machine's memory, as '60%', or 'auto'"
        ) from error
    if nbytes == 0:
        raise SizeError(f"{what} must be more than 0 bytes")
    return MemoryRequest(nbytes=nbytes)


# -- the machine and its control groups -------------------------------------------------------------


def memory_sizes() -> dict[str, int]:
    """Return sizes in bytes by their names in ``/proc/meminfo``."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * KIB for name, _, rest in (x.partition(":") for x in lines)}


def physical_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class CgroupLimit(NamedTuple):
    """Limit of a control group that this process is in."""

    nbytes: int
    held_bytes: int
    """Memory that the group holds, without the page cache, which the kernel drops if need be."""


def cgroup_limits(membership: Path | None = None, root: Path | None = None) -> list[CgroupLimit]:
    """Return the memory limits of this process's control groups, of both versions.

    Args:
        membership: Path of ``/proc/self/cgroup``.
        root: Path of ``/sys/fs/cgroup``.
    """
    root = CGROUPS if root is None else root
    try:
        lines = (MEMBERSHIP if membership is None else membership).read_text().splitlines()
    except OSError:
        return []
    found: list[CgroupLimit] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            found += _limits(root, group, ("memory.max", "memory.high"), "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes",)
            usage = "memory.usage_in_bytes"
            found += _limits(root / "memory", group, names, usage, "total_")
    return found


def _limits(
    root: Path, group: str, names: Sequence[str], usage: str, prefix: str
) -> Iterator[CgroupLimit]:
    """Yield the visible limits of a group and its parents; a container hides some."""
    place = root / group.lstrip("/")
    for folder in (place, *place.parents):
        if not folder.is_relative_to(root):
            break
        limits = (_number(folder / name) for name in names)
        limit = min((each for each in limits if each is not None), default=_NO_LIMIT)
        if limit < _NO_LIMIT:
            yield CgroupLimit(limit, _held_bytes(folder, usage, prefix))


def _held_bytes(folder: Path, usage: str, prefix: str) -> int:
    cache = 0
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in (f"{prefix}active_file", f"{prefix}inactive_file"):
                cache += int(value)
    return max(0, (_number(folder / usage) or 0) - cache)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


# -- this process -----------------------------------------------------------------------------------


class ProcessMemory:
    """Resident memory of this process that is not backed by a file.

    Reading takes some 3 microseconds, because the file stays open. A forked child needs its own.
    """

    def __init__(self) -> None:
        """Open the process's status, if there is one."""
        self._fd = -1
        self._top_bytes = self._files_bytes = self._peak_bytes = 0
        with suppress(OSError):
            self._fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def held_bytes(self) -> int:
        """Return the anonymous and shared memory that is resident; 0 if it is not known."""
        return own_bytes(self._status())

    def peak_bytes(self) -> int:
        """Return the most that has been resident at any one time, without pages of files.

        The kernel's peak includes pages of files, and it does not tell how many there were then. So when
        the peak has risen since the last call, those of this call are taken off it, or those of the last
        call if they were fewer: it may be too much by pages that came and went in between.
        """
        # getrusage has the peak of the program that was replaced by exec, too
        status = self._status()
        top, files = (_sum(status, (field,)) for field in (b"VmHWM:", b"RssFile:"))
        if top > self._top_bytes:
            own = top - min(files, self._files_bytes if self._top_bytes else files)
            self._top_bytes, self._peak_bytes = top, max(self._peak_bytes, own)
        self._files_bytes = files
        return max(self._peak_bytes, own_bytes(status))

    def _status(self) -> bytes:
        if self._fd >= 0:
            with suppress(OSError):
                return os.pread(self._fd, 8192, 0)
        return b""

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def own_bytes(status: bytes) -> int:
    """Return the memory that ``/proc/PID/status`` reports as not backed by a file."""
    return _sum(status, _OWN)


def _sum(status: bytes, fields: tuple[bytes, ...]) -> int:
    lines = (line for line in status.splitlines() if line.startswith(fields))
    return sum(int(line.split()[1]) * KIB for line in lines)


# -- what the process may use -----------------------------------------------------------------------


class UsableMemory(NamedTuple):
    """Memory that this process may use."""

    nbytes: int
    source: str
    """Origin of the figure, for people: ``"60% of the cgroup's limit of 8.00 GiB"``."""


def usable_memory(request: MemoryRequest, own: int, *, processes: int = 1) -> UsableMemory:
    """Return the memory that this process may use under a share or ``"auto"``.

    A share is one of the tightest limit: of a control group, or the machine's memory. ``"auto"`` is what
    this process holds and what is still available to it.

    Args:
        request: A share, or ``"auto"``.
        own: Bytes that the process holds now.
        processes: Processes like this one, as those of a launcher, which divide the share, or what is
            available, between them.
    """
    between = f", divided between {processes} processes" if processes > 1 else ""
    sizes = memory_sizes()
    total = sizes.get("MemTotal", 0) or physical_bytes()
    groups = cgroup_limits()
    if request.share is not None:
        tightest = min((each.nbytes for each in groups), default=total)
        of = "the machine's" if tightest >= total else "the cgroup's limit of"
        nbytes = min(total, tightest)
        share = int(nbytes * request.share) // processes
        return UsableMemory(share, f"{request} of {of} {format_bytes(nbytes)}{between}")
    available = sizes.get("MemAvailable", total - own)
    found = UsableMemory(
        _with(own, available, processes), f"the machine's available memory{between}"
    )
    for group in groups:
        nbytes = _with(own, group.nbytes - group.held_bytes, processes)
        if nbytes < found.nbytes:
            limit = format_bytes(group.nbytes)
            found = UsableMemory(nbytes, f"what the cgroup's limit of {limit} leaves{between}")
    return found


def _with(own: int, available: int, processes: int) -> int:
    return own + max(0, available) // processes
