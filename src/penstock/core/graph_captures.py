"""Effect of a thread's CUDA calls on a CUDA graph that another thread is capturing.

In torch's default mode of capture, calls such as ``cudaEventQuery`` and ``cudaHostAlloc`` break a capture
whichever thread makes them, unless that thread is in *relaxed* mode. torch has no function to set it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

_RELAXED: Final = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``."""


def relax() -> None:
    """Keep the calling thread from breaking captures of other threads from now on.

    Does nothing if there is no CUDA driver (ROCm), or the process has not begun to use it.
    """
    _exchange(_RELAXED)


@contextmanager
def relaxed() -> Iterator[None]:
    """Keep the calling thread from breaking captures of other threads within this context."""
    former = _exchange(_RELAXED)
    try:
        yield
    finally:
        if former is not None:
            _exchange(former)


def _exchange(mode: int) -> int | None:
    """Set the calling thread's mode; return the former one, or None if there is no driver in use."""
    driver = _driver()
    if driver is None:
        return None
    value = ctypes.c_int(mode)
    failed = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return None if failed else value.value


@cache
def _driver() -> ctypes.CDLL | None:
    """Return the CUDA driver, of which a process has only one, however many runtimes it loads."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
