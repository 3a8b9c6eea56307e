"""The emulated runtime as Python calls it. Importing this fails where torch has another runtime."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
from collections.abc import Iterator
from pathlib import Path


def _library(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    import torch  # noqa: F401  (which loads the runtime)

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if os.path.basename(path).startswith("libcudart.so"):
            library = kind(path)
            if hasattr(library, "emu_schedule"):
                return library
    raise ImportError("torch does not run over the emulated device; see tests/device/README.md")


calls = _library(ctypes.PyDLL)
"""Functions that never wait for the device: they are called with the GIL."""

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_long)
calls.emu_kernel.argtypes = [ctypes.c_void_p, KERNEL, ctypes.c_long]
calls.emu_capturing.argtypes = [ctypes.c_void_p]
calls.emu_host_address.argtypes = [ctypes.c_size_t]
calls.emu_host_address.restype = ctypes.c_size_t
calls.emu_recorded_by_allocator.argtypes = [ctypes.c_ulong, ctypes.c_void_p, ctypes.c_int]
calls.emu_limit.argtypes = [ctypes.c_size_t]
for _name in ("emu_context", "emu_uses", "emu_offence"):
    getattr(calls, _name).restype = ctypes.c_char_p
for _name in ("emu_queued", "emu_copies"):
    getattr(calls, _name).restype = ctypes.c_long


class Schedule(enum.IntEnum):
    """When the device does what it was told: see ``runtime/streams.cpp``."""

    EAGER = 0
    LAZY = 1
    RANDOM = 2
    FIXED = 3


PATIENCE_US = 3000
"""How long no thread but the library's own must have called before these are served, if all is lazy."""


def set_schedule(schedule: Schedule, seed: int = 0) -> None:
    """From now on."""
    calls.emu_schedule(int(schedule), seed, PATIENCE_US)


def recorded_by_allocator(thread: int) -> set[int]:
    """See ``penstock.testing.access_order.AccessOrder``."""
    handles = (ctypes.c_void_p * 64)()
    count = calls.emu_recorded_by_allocator(thread, handles, len(handles))
    return {handle or 0 for handle in handles[:count]}


def offences() -> list[str]:
    """Calls that a capture prohibited, and their threads."""
    found: list[str] = []
    while text := calls.emu_offence(len(found)).decode():
        found.append(text)
    return found


def uses(device: int) -> list[str]:
    """Calls that were made while a device was current, and their threads."""
    return calls.emu_uses(device).decode().splitlines()


@contextlib.contextmanager
def served_last() -> Iterator[None]:
    """What the calling thread waits for comes as late as it can."""
    calls.emu_served_last(1)
    try:
        yield
    finally:
        calls.emu_served_last(0)
