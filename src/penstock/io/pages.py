"""Pages of memory that somebody else owns: given back to the system, and closed until they are refilled.

[Note: pages at rest]
    The memory of a tensor can be given back without the tensor's knowing: its whole pages are dropped
    where they are, and its addresses stay valid for all that points there. While they are at rest nobody
    may touch them: a read would find zeros, and a write would be lost. So they are closed to reads and
    writes, and who touches one all the same ends the process by SIGSEGV, rather than to train on with
    wrong numbers. Only private memory without a file goes: of shared memory other processes would lose
    their bytes, and pages of a file come from there again.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.core.errors import TransferError, transfer_error
from penstock.core.units import round_down, round_up
from penstock.io.mapping import HUGE_PAGE_BYTES, MADV_POPULATE_WRITE, PAGE_BYTES

_PROT_NONE: Final = 0
_PROT_READ_WRITE: Final = 1 | 2
_MADV_DONTNEED: Final = 4
_MADV_HUGEPAGE: Final = 14
_MAPS: Final = "/proc/self/maps"
_ANONYMOUS: Final = ("", "[heap]")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Pages(NamedTuple):
    """Whole pages, one after the other."""

    address: int
    nbytes: int


def whole_pages(address: int, nbytes: int) -> Pages:
    """Those that lie within so many bytes; none of them, of length 0, where that is too short."""
    start = round_up(address, PAGE_BYTES)
    return Pages(start, max(0, round_down(address + nbytes, PAGE_BYTES) - start))


def huge_pages_within(pages: Pages) -> Pages:
    """Where huge pages may lie among them: from the first multiple of 2 MiB to the last; may be empty."""
    start = round_up(pages.address, HUGE_PAGE_BYTES)
    end = round_down(pages.address + pages.nbytes, HUGE_PAGE_BYTES)
    return Pages(start, end - start) if start < end else Pages(pages.address, 0)


def around(inner: Pages, outer: Pages) -> list[Pages]:
    """What of the outer pages lies before and behind some that are among them."""
    before = Pages(outer.address, inner.address - outer.address)
    end = inner.address + inner.nbytes
    behind = Pages(end, outer.address + outer.nbytes - end)
    return [each for each in (before, behind) if each.nbytes]


class PrivateMemory:
    """The process's private memory that belongs to no file, as it is now."""

    def __init__(self) -> None:
        """Read what the kernel says of this process. Raises TransferError."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        try:
            self._read()
        except OSError as error:
            code = error.errno or errno.EIO
            raise transfer_error(
                errno=code, op="open", path=_MAPS, offset_bytes=0, nbytes=0
            ) from error

    def _read(self) -> None:
        with open(_MAPS, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                addresses, rights, _, _, _, *path = line.split(maxsplit=5)
                name = path[0].strip() if path else ""
                if rights == "rw-p" and (name in _ANONYMOUS or name.startswith("[anon:")):
                    start, end = (int(each, 16) for each in addresses.split("-"))
                    self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = end
        else:
            self._starts.append(start)
            self._ends.append(end)

    def holds(self, pages: Pages) -> bool:
        """Whether all of these pages are such memory."""
        i = bisect.bisect_right(self._starts, pages.address) - 1
        return i >= 0 and pages.address + pages.nbytes <= self._ends[i]


def give_back(pages: Pages) -> None:
    """Drop the pages' contents, and close them to everybody. See [Note: pages at rest].

    Raises:
        TransferError: The system refuses, as it does for memory that is locked, and where there would be
            too many mappings; nothing has changed.
    """
    _call("mprotect", pages, _PROT_NONE)  # first: it may be refused, and what is dropped is lost
    try:
        _call("madvise", pages, _MADV_DONTNEED)
    except TransferError:
        open_again(pages)
        raise


def close_to_all(pages: Sequence[Pages]) -> None:
    """Whoever touches them from now on ends the process."""
    for each in pages:
        _call("mprotect", each, _PROT_NONE)


def abandon(pages: Iterable[Pages]) -> None:
    """Close pages whose contents nobody needs, and drop what the system lets go.

    Raises:
        TransferError: Some cannot be closed; all others are.
    """
    refused: TransferError | None = None
    for each in pages:
        try:
            _call("mprotect", each, _PROT_NONE)
        except TransferError as error:
            refused = error
        _libc.madvise(each.address, each.nbytes, _MADV_DONTNEED)
    if refused is not None:
        raise refused


def open_again(pages: Pages) -> None:
    """Let the pages be written and read again; they are zeros until they are filled."""
    _call("mprotect", pages, _PROT_READ_WRITE)


def open_to_refill(pages: Pages) -> None:
    """Open them, and have them come back as huge pages where the system has some.

    To fill, and to give back, pages of 2 MiB takes a part of what as many bytes of 4 KiB take. Only huge
    pages that lie within these are meant, so no more becomes resident than before.
    """
    open_again(pages)
    if pages.nbytes >= HUGE_PAGE_BYTES:  # a refusal costs speed only
        _libc.madvise(pages.address, pages.nbytes, _MADV_HUGEPAGE)


def populate(pages: Pages) -> bool:
    """Make open pages resident, contents unchanged; False if the system refuses (before Linux 5.14)."""
    return int(_libc.madvise(pages.address, pages.nbytes, MADV_POPULATE_WRITE)) == 0


def trim_heap() -> None:
    """Have the C library give back what is free in its heap, where it can."""
    trim = getattr(_libc, "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _call(name: str, pages: Pages, argument: int) -> None:
    if getattr(_libc, name)(pages.address, pages.nbytes, argument):
        raise TransferError(
            errno=ctypes.get_errno() or errno.EINVAL,
            op=name,
            path=f"memory at {pages.address:#x}",
            offset_bytes=0,
            nbytes=pages.nbytes,
            advice="memory that is locked cannot be given back"
            if name == "madvise"
            else "there may be too many mappings: raise vm.max_map_count",
        )
