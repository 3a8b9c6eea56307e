"""What a thread's CUDA calls mean for a CUDA graph that another thread is capturing.

In torch's default mode of capture, calls such as ``cudaEventQuery`` and ``cudaHostAlloc`` break a capture
whichever thread makes them, unless that thread is in the mode *relaxed*. torch has no function for that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

_RELAXED: Final = 2
"""``cudaStreamCaptureModeRelaxed``."""


def relax() -> None:
    """Let the calling thread break no capture of another thread from now on.

    Nothing happens where torch has no CUDA runtime, or it cannot be found (ROCm).
    """
    _exchange(_RELAXED)


@contextmanager
def relaxed() -> Iterator[None]:
    """Let the calling thread break no capture of another thread within this context."""
    former = _exchange(_RELAXED)
    try:
        yield
    finally:
        if former is not None:
            _exchange(former)


def _exchange(mode: int) -> int | None:
    """Set the calling thread's mode; return the former one, or None if there is no CUDA runtime."""
    exchange = getattr(_cudart(), "cudaThreadExchangeStreamCaptureMode", None)
    if exchange is None:
        return None
    value = ctypes.c_int(mode)
    exchange(ctypes.byref(value))
    return value.value


@cache
def _cudart() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libcudart" in line}
        return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None
    except OSError:
        return None
