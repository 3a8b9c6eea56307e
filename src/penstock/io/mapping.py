"""Memory that is mapped through the C library: private and anonymous in 2 MiB pages, or that of files.

Python's own ``mmap`` does not suffice: the mapping is not inherited by ``fork``, and a forked child that
garbage-collects its copy of the object would unmap whatever was mapped at that address since. Here only
the process that mapped the memory unmaps it.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import TransferError
from penstock.core.process import ForkGuard, fork_guard
from penstock.core.units import MIB, round_up
from penstock.io.engine import File

HUGE_PAGE_BYTES: Final = 2 * MIB
PAGE_BYTES: Final = mmap.PAGESIZE

MADV_POPULATE_WRITE: Final = 23  # Linux 5.14

_MADV_NOHUGEPAGE: Final = 15
_MREMAP_MAYMOVE_FIXED_DONTUNMAP: Final = 1 | 2 | 4  # Linux 5.7
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mremap.restype = ctypes.c_void_p


class Mapping:
    """Zeroed memory at a multiple of 2 MiB; nothing is resident until touched.

    Whole 2 MiB pages are backed by huge pages if the kernel has some; a shorter tail never is, so
    touching it makes no more resident than its own length.

    Attributes:
        address: Its first address.
        nbytes: Its length, a multiple of the system's page.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserve address space. Raises TransferError (op ``"map"``) if the system refuses."""
        assert nbytes > 0
        assert nbytes % PAGE_BYTES == 0
        self.nbytes = nbytes
        reserved = nbytes + HUGE_PAGE_BYTES
        start = _map(reserved)
        self.address = round_up(start, HUGE_PAGE_BYTES)
        self._buffer = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address))
        self._unmap = weakref.finalize(self, _unmap, start, reserved, fork_guard())
        self._unmap.atexit = False  # daemon threads may still be moving bytes
        self._advise(mmap.MADV_DONTFORK, 0, nbytes)
        whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if whole and _huge_page_bytes() == HUGE_PAGE_BYTES:
            self._advise(mmap.MADV_HUGEPAGE, 0, whole)
        if whole < nbytes:
            self._advise(_MADV_NOHUGEPAGE, whole, nbytes - whole)

    def array(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a range of the memory as an array, which does not keep the memory mapped.

        It is a new array each time whose base is no array: then NumPy's views of it refer to it and not
        past it, so that it lives as long as they do.
        """
        return np.frombuffer(self._buffer, np.uint8, nbytes, offset)

    def populate(self, offset: int, nbytes: int) -> bool:
        """Make a page-aligned range resident, contents unchanged; return False before Linux 5.14."""
        return self._advise(MADV_POPULATE_WRITE, offset, nbytes)

    def free(self, offset: int, nbytes: int) -> bool:
        """Free the pages of a page-aligned range; contents become zero."""
        return self._advise(mmap.MADV_DONTNEED, offset, nbytes)

    def move_page(self, source: int, target: int) -> bool:
        """Move the memory of a 2 MiB page to another offset: takes some µs, while zeroing takes 200.

        The memory of ``source``, contents included, is then at ``target``, and ``source`` is as if it
        had been freed. Both become separate mappings, of which a process may have 65 530 by default.

        Args:
            source: Offset of a resident page, a multiple of 2 MiB.
            target: Offset of a page that is not resident, a multiple of 2 MiB.

        Returns:
            False, with nothing changed, before Linux 5.7, or if the process has no mapping left.
        """
        moved = _libc.mremap(
            ctypes.c_void_p(self.address + source),
            ctypes.c_size_t(HUGE_PAGE_BYTES),
            ctypes.c_size_t(HUGE_PAGE_BYTES),
            ctypes.c_int(_MREMAP_MAYMOVE_FIXED_DONTUNMAP),
            ctypes.c_void_p(self.address + target),
        )
        return moved not in {None, _MAP_FAILED}

    def unmap(self) -> None:
        """Release the address space. Idempotent; does nothing in a forked child."""
        self._unmap()

    def _advise(self, advice: int, offset: int, nbytes: int) -> bool:
        # A refused advice costs speed, never correctness: kernels without huge pages say EINVAL.
        return int(_libc.madvise(self.address + offset, nbytes, advice)) == 0


def memory_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return live memory as an array, which does not keep it alive."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)), np.uint8)


def map_files(
    parts: Sequence[tuple[File, int, int]], *, private: bool = False
) -> NDArray[np.uint8]:
    """Map ranges of files, one behind the other, as one array; writes to it reach the files.

    It is unmapped when the array dies, which ``torch.from_numpy`` keeps alive. The files may be closed
    before that. Reads go through the page cache, and agree with direct transfers that are over.

    Args:
        parts: File, offset and length of each range; offsets, and lengths of all but the last, are
            multiples of the system's page. The file must be as long, and its space be reserved: a page
            that has no room when it is written kills the process.
        private: Writes to the array stay in memory, and the files may be open for reading only.

    Raises:
        TransferError: The system refuses (op ``"map"``).
    """
    nbytes = sum(length for _, _, length in parts)
    reserved = round_up(nbytes, PAGE_BYTES)
    address = start = _map(reserved)  # at once, so that the parts lie next to each other
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _MAP_FIXED
    for file, offset, length in parts:
        if _libc.mmap(address, length, protection, flags, file.fd, offset) in (None, _MAP_FAILED):
            error = ctypes.get_errno()
            _libc.munmap(start, reserved)
            raise TransferError(
                errno=error, op="map", path=file.path, offset_bytes=offset, nbytes=length
            )
        address += round_up(length, PAGE_BYTES)
    array = memory_at(start, nbytes)
    weakref.finalize(array, _unmap, start, reserved, fork_guard()).atexit = False
    return array


def advise_random(array: NDArray[np.uint8]) -> None:
    """Say that only single rows of a mapped file are read: the kernel then reads no more than those."""
    _libc.madvise(array.ctypes.data, array.nbytes, mmap.MADV_RANDOM)


def _map(nbytes: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    address = _libc.mmap(None, nbytes, protection, flags, -1, 0)
    if address in (None, _MAP_FAILED):
        raise TransferError(
            errno=ctypes.get_errno(),
            op="map",
            path="anonymous memory",
            offset_bytes=0,
            nbytes=nbytes,
            advice="lower the memory budget, or raise `ulimit -v`",
        )
    return int(address)


def _unmap(address: int, nbytes: int, guard: ForkGuard) -> None:
    if not guard.in_child:
        _libc.munmap(address, nbytes)


def _huge_page_bytes() -> int:
    """Return the system's huge page size: 512 MiB on ARM kernels with 64 KiB pages, which is unusable."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
