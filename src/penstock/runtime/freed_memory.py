"""Memory that was freed but that the C library keeps: returned to the system before it runs short.

[Note: kept memory]
    glibc's ``malloc`` keeps freed blocks of up to 32 MiB. A step that frees many tensors can leave more
    of it than the tensors take that are in use, and all of it stays resident. To have such blocks
    returned as they are freed costs new pages with each block, a fifth of a step on a virtual machine. So
    the heap is trimmed only where the process would otherwise come near the memory that it may use.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.core.memory import MemoryRequest, ProcessMemory, usable_memory
from penstock.core.ranks import local_processes
from penstock.core.units import MIB, format_bytes
from penstock.io.pages import trim_heap

_LEFT_BYTES: Final = 128 * MIB
_LEFT_SHARE: Final = 8
"""The heap is trimmed once so little of the usable memory is left: what the process can fill until the
heap has been trimmed, but at most an eighth. Memory that is trimmed earlier has to be mapped again."""
_GROWTH_SHARE: Final = 4
_LEAST_GROWTH_SHARE: Final = 32
"""Parts of that by which the process grows before the heap is trimmed again: a quarter, or less where it
would reach the limit, but not so little that the heap is trimmed all the time."""
_LEAST_WAIT_S: Final = 0.002
_MOST_WAIT_S: Final = 0.5
"""Most time between two looks at the process: each takes some 0.7 ms of a core that computes."""
_GROWTH_BYTES_PER_S: Final = 4 * 10**9
"""Speed at which a process may fill new pages."""
_USABLE_EVERY_S: Final = 0.1
"""Least time between two looks at what others leave, where much is left."""
_USABLE_EVERY: Final = 10
"""Looks at the process to each look at what others leave, where little is left."""


class HeapTrimmer:
    """Watch this process in a thread of its own, and trim the heap when little usable memory is left.

    Attributes:
        times: Number of times that the heap was trimmed.
        returned_bytes: Bytes that the process held less afterwards, in total.
    """

    def __init__(self, usable_bytes: Callable[[int], int] | None = None) -> None:
        """Start the thread.

        Args:
            usable_bytes: Function that returns the bytes that the process may use, from those that it
                holds; by default what the machine and the control groups leave.
        """
        self.times = 0
        self.returned_bytes = 0
        self._usable_bytes = usable_bytes or _usable_bytes
        self._limit_bytes = 0
        self._process = ProcessMemory()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-heap", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return (
            f"the C library's unused memory was returned to the system ({self.times} times,"
            f" {format_bytes(self.returned_bytes)} in all), since this process may use"
            f" {format_bytes(self._limit_bytes)}"
        )

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._process.close()

    def _watch(self) -> None:
        wait_s, looked_s, trimmed_to = 0.0, -math.inf, 0
        while not self._stop.wait(wait_s):
            held = self._process.held_bytes()
            now_s = time.monotonic()
            if now_s - looked_s >= min(_USABLE_EVERY_S, _USABLE_EVERY * wait_s):
                self._limit_bytes, looked_s = self._usable_bytes(held), now_s
            trimmed_to = min(trimmed_to, held)
            trim_at = trim_above(self._limit_bytes, trimmed_to)
            if held > trim_at:
                trim_heap()
                trimmed_to = self._process.held_bytes()
                self.times += 1
                self.returned_bytes += max(0, held - trimmed_to)
            room = max(0, trim_at - held)
            wait_s = min(_MOST_WAIT_S, max(_LEAST_WAIT_S, room / _GROWTH_BYTES_PER_S))


def trim_above(limit_bytes: int, trimmed_to: int) -> int:
    """Return the bytes above which the heap is trimmed.

    Args:
        limit_bytes: What the process may use.
        trimmed_to: What it has held at least since the heap was trimmed; 0 if it was not.
    """
    left = min(limit_bytes // _LEFT_SHARE, _LEFT_BYTES)
    growth = min(left // _GROWTH_SHARE, (limit_bytes - trimmed_to) // 2)
    return max(limit_bytes - left, trimmed_to + max(growth, left // _LEAST_GROWTH_SHARE))


def _usable_bytes(held: int) -> int:
    return usable_memory(MemoryRequest(), held, processes=local_processes()).nbytes
