"""Freeing and refilling in place of memory pages that other objects own.

[Note: swapped pages]
    A tensor's memory can be freed without its knowledge: its whole pages are freed in place, and its
    addresses stay valid for everything that points to them. While pages are swapped out they must not be
    touched: a read would find zeros, and a write would be lost. So they are protected against reads and
    writes, and any access ends the process by SIGSEGV, rather than training on with wrong numbers. Only
    private memory without a file is freed this way: other processes would lose the bytes of shared
    memory, and pages of a file would be read from the file again.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from penstock.core.errors import TransferError, transfer_error
from penstock.core.units import round_down, round_up
from penstock.io.mapping import HUGE_PAGE_BYTES, MADV_POPULATE_WRITE, PAGE_BYTES

_PROT_NONE: Final = 0
_PROT_READ_WRITE: Final = 1 | 2
_MADV_DONTNEED: Final = 4
_MADV_HUGEPAGE: Final = 14
_THRESHOLDS: Final = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
"""Environment variables of glibc's heap, and their options of ``mallopt``."""
_RETURNED_BYTES: Final = 1 << 20
_LARGEST_GAP_BYTES: Final = 1 << 30
_MAPS: Final = "/proc/self/maps"
_ANONYMOUS: Final = ("", "[heap]")
_PAGEMAP: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
_PRESENT_OR_SWAPPED: Final = np.uint64(3 << 62)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.malloc.restype = ctypes.c_void_p
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PageRange(NamedTuple):
    """Range of whole pages."""

    address: int
    nbytes: int


def whole_pages(address: int, nbytes: int) -> PageRange:
    """Return the whole pages within a range of bytes; of length 0 if the range is too short."""
    start = round_up(address, PAGE_BYTES)
    return PageRange(start, max(0, round_down(address + nbytes, PAGE_BYTES) - start))


def huge_pages_within(pages: PageRange) -> PageRange:
    """Return the part of the pages between the first and the last multiple of 2 MiB; may be empty."""
    start = round_up(pages.address, HUGE_PAGE_BYTES)
    end = round_down(pages.address + pages.nbytes, HUGE_PAGE_BYTES)
    return PageRange(start, end - start) if start < end else PageRange(pages.address, 0)


def around(inner: PageRange, outer: PageRange) -> list[PageRange]:
    """Return the parts of the outer pages before and after the inner ones."""
    before = PageRange(outer.address, inner.address - outer.address)
    end = inner.address + inner.nbytes
    behind = PageRange(end, outer.address + outer.nbytes - end)
    return [each for each in (before, behind) if each.nbytes]


class PrivateMemory:
    """Snapshot of the process's private memory that is not backed by a file."""

    def __init__(self) -> None:
        """Read the process's mappings from the kernel. Raises TransferError."""
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

    def holds(self, pages: PageRange) -> bool:
        """Return True if all of these pages are such memory."""
        i = bisect.bisect_right(self._starts, pages.address) - 1
        return i >= 0 and pages.address + pages.nbytes <= self._ends[i]


def is_untouched(pages: PageRange) -> bool:
    """Return whether none of some pages of private memory was touched, so that all of them are zeros.

    Returns False if the kernel does not tell. For memory of files the answer means nothing.
    """
    count = pages.nbytes // PAGE_BYTES
    try:
        fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, _ENTRY_BYTES * count, pages.address // PAGE_BYTES * _ENTRY_BYTES)
        finally:
            os.close(fd)
    except OSError:
        return False
    entries = np.frombuffer(data, np.uint64)
    return len(entries) == count and not (entries & _PRESENT_OR_SWAPPED).any()


def forget_contents(pages: PageRange) -> None:
    """Free the pages, if the system allows it; private memory is zeros when it is touched again."""
    if pages.nbytes:
        _libc.madvise(pages.address, pages.nbytes, _MADV_DONTNEED)


def free_pages(pages: PageRange) -> None:
    """Free the pages and protect them against access. See [Note: swapped pages].

    Raises:
        TransferError: The system refuses, because the memory is locked or there would be too many
            mappings; nothing has changed.
    """
    _call(
        "mprotect", pages, _PROT_NONE
    )  # first, because it may be refused, and freed bytes are lost
    try:
        _call("madvise", pages, _MADV_DONTNEED)
    except TransferError:
        unprotect(pages)
        raise


def protect(pages: Sequence[PageRange]) -> None:
    """Protect pages against access: from now on it ends the process."""
    for each in pages:
        _call("mprotect", each, _PROT_NONE)


def protect_and_free(pages: Iterable[PageRange]) -> None:
    """Protect pages whose contents are not needed, and free those that the system allows.

    Raises:
        TransferError: Some cannot be protected; all others are.
    """
    refused: TransferError | None = None
    for each in pages:
        try:
            _call("mprotect", each, _PROT_NONE)
        except TransferError as error:
            refused = error
        forget_contents(each)
    if refused is not None:
        raise refused


def unprotect(pages: PageRange) -> None:
    """Make pages accessible again; they are zeros until they are filled."""
    _call("mprotect", pages, _PROT_READ_WRITE)


def unprotect_for_refill(pages: PageRange) -> None:
    """Make pages accessible, and refill them with huge pages if the system has some.

    Filling and freeing pages of 2 MiB takes a fraction of the time for as many bytes in 4 KiB pages.
    Only huge pages within the range are used, so no more memory becomes resident than before.
    """
    unprotect(pages)
    if pages.nbytes >= HUGE_PAGE_BYTES:  # a refusal costs speed only
        _libc.madvise(pages.address, pages.nbytes, _MADV_HUGEPAGE)


def populate(pages: PageRange) -> bool:
    """Make accessible pages resident, contents unchanged; return False if refused (before Linux 5.14)."""
    return int(_libc.madvise(pages.address, pages.nbytes, MADV_POPULATE_WRITE)) == 0


def trim_heap() -> None:
    """Make the C library free unused memory of its heap, if it can."""
    trim = getattr(_libc, "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def free_heap_bytes() -> int:
    """Return the unused memory that the C library keeps in its heap; 0 if it does not tell."""
    found = _malloc_info()
    return 0 if found is None else int(found.fordblks)


def _malloc_info() -> _MallocInfo | None:
    info = getattr(_libc, "mallinfo2", None)
    if info is None:
        return None
    info.restype = _MallocInfo
    found: _MallocInfo = info()
    return found


def return_freed_blocks() -> None:
    """Make the C library return freed blocks of a MiB and more to the system at once, if it can.

    Thresholds that the user has set for it in the environment stay in force.
    """
    tune = getattr(_libc, "mallopt", None)
    if tune is None:
        return
    for variable, option in _THRESHOLDS.items():
        if variable not in os.environ:
            tune(option, _RETURNED_BYTES)


class HeapGaps:
    """Gaps of a MiB and more that freed blocks have left in the C library's heap, taken out of its use.

    It would fill them with large blocks, and what these leave when they are freed stays resident: only
    blocks that it maps one by one are returned at once. If the heap was trimmed before, taken gaps have
    no pages but their first.
    """

    def __init__(self) -> None:
        """Take the gaps of this thread's heap, after ``return_freed_blocks`` and ``trim_heap``."""
        self._blocks: list[int] = []
        size = _LARGEST_GAP_BYTES
        while size >= _RETURNED_BYTES:
            block = self._in_gap(size)
            if block:
                self._blocks.append(block)
            else:
                size //= 2

    def _in_gap(self, size: int) -> int:
        """Return the address of a block in a gap; 0 if there is none of this size."""
        before = _malloc_info()
        if before is None:
            return 0
        block = int(_libc.malloc(size) or 0)
        after = _malloc_info()
        if block and after is not None and before.fordblks - after.fordblks >= size:
            return block  # else the heap has grown for it, or another allocator has it
        _libc.free(block)
        return 0

    def close(self) -> None:
        """Give the gaps back. Idempotent."""
        while self._blocks:
            _libc.free(self._blocks.pop())


def _call(name: str, pages: PageRange, argument: int) -> None:
    if getattr(_libc, name)(pages.address, pages.nbytes, argument):
        raise TransferError(
            errno=ctypes.get_errno() or errno.EINVAL,
            op=name,
            path=f"memory at {pages.address:#x}",
            offset_bytes=0,
            nbytes=pages.nbytes,
            advice="memory that is locked cannot be freed"
            if name == "madvise"
            else "there may be too many mappings: raise vm.max_map_count",
        )
