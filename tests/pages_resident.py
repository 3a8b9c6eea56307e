"""How much of some memory is resident."""

import ctypes
import mmap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def resident_bytes(pages):
    """Of these whole pages."""
    count = pages.nbytes // mmap.PAGESIZE
    told = ctypes.create_string_buffer(count)
    assert _libc.mincore(pages.address, pages.nbytes, told) == 0
    return mmap.PAGESIZE * sum(each & 1 for each in told.raw[:count])
