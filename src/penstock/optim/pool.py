"""Threads that update tiles, and waiting for them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

import torch

_FOR_TWO: Final = 1 << 18
"""Elements that torch divides among threads."""


def make_pool(threads: int, device: torch.device | None) -> ThreadPoolExecutor:
    """Make a pool of threads in which torch uses no further threads.

    Args:
        threads: Number of threads.
        device: CUDA device that is current in them. A new thread's is device 0, and a call that
            finds it current may take memory there, for each process that trains on another one.
    """
    return ThreadPoolExecutor(
        threads,
        thread_name_prefix="penstock-optim",
        initializer=_compute_alone,
        initargs=(device,),
    )


def wait_for_all(futures: Sequence[Future[None]]) -> None:
    """Wait until all have ended; if one fails, cancel those that have not begun, and raise its error.

    The same if the wait is interrupted: nothing goes on in the background after that.
    """
    try:
        wait(futures, return_when="FIRST_EXCEPTION")
    finally:
        _cancel(futures)
    failed = [each for each in futures if not each.cancelled() and each.exception() is not None]
    del futures
    if failed:
        raise _take_error(failed)


def _cancel(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.cancel()
    wait(futures)


def _take_error(failed: list[Future[None]]) -> BaseException:
    """Return the first error. No frame that it passes refers to it, or the frame would live on."""
    error = failed[0].exception()
    failed.clear()
    assert error is not None
    return error


def _compute_alone(device: torch.device | None) -> None:
    """Set up a thread that updates tiles: no gradients, and torch computes in this thread only.

    ``torch.set_num_threads`` would change it for all threads. What counts for an element-wise operation
    is OpenMP's own setting, which each thread has for itself.

    Before, two threads compute something here once. GNU's OpenMP then counts one thread more. A thread of
    the training that waits for the others of its team, which this one may keep from their core, spins
    for milliseconds if the threads that are counted have a core each, and sleeps at once if not.
    """
    if device is not None:
        torch.cuda.set_device(device)
    torch.set_grad_enabled(False)
    torch.get_num_threads()  # has torch set it up in this thread, once
    _set_threads(2)
    torch.zeros(_FOR_TWO)
    _set_threads(1)


def _set_threads(count: int) -> None:
    """Set how many threads of OpenMP compute for this one."""
    for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"):
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_set_num_threads(count)
        except (OSError, AttributeError):
            continue
