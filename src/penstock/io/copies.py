"""Engine that copies between ranges of host memory, in a thread of its own and in order of priority."""

from __future__ import annotations

import ctypes
from typing import Final

from penstock.io.engine import File
from penstock.io.threads import Syscalls, ThreadEngine


class _Memory:
    """Host memory as a file: offsets are addresses."""

    fd: Final = -1
    path: Final = "host memory"
    direct: Final = True
    granule_bytes: Final = 1


MEMORY: Final = _Memory()


class _Copies(Syscalls):
    """Copies in place of reads and writes; without the interpreter's lock while bytes move."""

    def read(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        ctypes.memmove(address, offset_bytes, nbytes)
        return nbytes

    def write(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        ctypes.memmove(offset_bytes, address, nbytes)
        return nbytes


class CopyEngine(ThreadEngine):
    """Moves bytes between memory and ``MEMORY``, the file of which is memory, too.

    It has one thread, since one core reaches most of the memory's bandwidth and the others train.
    """

    def __init__(self, name: str) -> None:
        """Make an engine; its thread has this name and a number."""
        super().__init__(1, name=name, syscalls=_Copies())
