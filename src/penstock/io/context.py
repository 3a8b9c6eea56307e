"""Contexts of Linux's native asynchronous I/O: four system calls that libc does not wrap."""

from __future__ import annotations

import ctypes
import errno as errnos
import os
import platform
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from penstock.core.errors import ConfigError


class _Numbers(NamedTuple):
    """Numbers of the system calls."""

    setup: int
    destroy: int
    submit: int
    getevents: int


NUMBERS: Final = {
    "x86_64": _Numbers(206, 207, 209, 208),
    "aarch64": _Numbers(0, 1, 2, 4),
    "riscv64": _Numbers(0, 1, 2, 4),
}
_POINTERS: Final = (ctypes.c_void_p, ctypes.c_void_p)


class Context:
    """Kernel context that takes ``struct iocb`` and returns ``struct io_event``.

    Attributes:
        submit: Submits blocks, ``(count, pointers)``. Returns how many were accepted; if not even the
            first was, -1, with the error in ``ctypes.get_errno()``.
        events: Waits for events, ``(least, most, address, timeout)``. Returns how many were written to
            the address, or -1.
        close: Destroys the context; no transfer may be in flight.
    """

    def __init__(self, depth: int) -> None:
        """Set up a context for ``depth`` transfers. Raises ConfigError if it is not available."""
        numbers = NUMBERS.get(platform.machine())
        if numbers is None or not hasattr(os, "eventfd"):
            where = f"{platform.system()} on {platform.machine()}"
            raise ConfigError(f"asynchronous I/O is not supported for {where}")
        context = ctypes.c_ulong(0)
        setup = _system_call(numbers.setup, ctypes.c_void_p)
        if setup(depth, ctypes.addressof(context)) < 0:
            raise unavailable_error("io_setup", ctypes.get_errno())
        # the calls themselves, without a frame of Python around them: one of each for every transfer
        longs = [ctypes.c_long] * 2
        submit = _system_call(numbers.submit, ctypes.c_long, ctypes.c_void_p)
        events = _system_call(numbers.getevents, *longs, *_POINTERS)
        self.submit: Callable[[int, int], int] = partial(submit, context.value)
        self.events: Callable[[int, int, int, int | None], int] = partial(events, context.value)
        self.close: Callable[[], int] = partial(_system_call(numbers.destroy), context.value)


def _system_call(number: int, *arguments: type) -> Callable[..., int]:
    """Return a system call that releases the GIL; its first argument is a long."""
    call = ctypes.CDLL(None, use_errno=True)["syscall"]
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_ulong, *arguments)
    return partial(call, number)


def unavailable_error(call: str, errno: int) -> ConfigError:
    """Return the error that asynchronous I/O is not available, with the reason."""
    why = os.strerror(errno)
    if errno == errnos.EAGAIN:
        why = "the limit fs.aio-max-nr is reached; raise it"
    return ConfigError(f"asynchronous I/O is not available: {call}: {why}")
