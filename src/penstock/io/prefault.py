"""Prefaulting of memory pages by several threads, ahead of the reads that fill them.

[Note: prefaulting]
    A page that is touched for the first time must be found and cleared. A virtual machine may have to
    request it from its host, slower than its disk reads: a page that was freed a second ago is already
    gone there. A direct read faults its pages in one after the other, in the single thread that submits
    reads. So several threads fault pages in ahead of it, in the order of the reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final, Self

from penstock.core.locks import condition
from penstock.core.units import MIB
from penstock.io.pages import PageRange, populate

MAX_THREADS: Final = 4
_PIECE_BYTES: Final = 16 * MIB
"""Bytes that a thread faults in at once."""


class Prefault:
    """Threads that make pages resident, contents unchanged, while the first of them are being filled.

    It is only a hint: if the system refuses, or no thread can be started, the pages become resident, or
    fail, when they are touched. The pages must be writable. Leave the ``with`` block to stop and wait.
    """

    def __init__(self, pages: Sequence[PageRange], *, threads: int | None = None) -> None:
        """Start the threads.

        Args:
            pages: Pages in the order in which they are needed.
            threads: Number of threads; None: one per core, at most four.
        """
        self._pages = pages
        self._lock = condition()
        self._left = [-(-each.nbytes // _PIECE_BYTES) for each in pages]
        self._pieces = self._in_order()
        self._over = False
        self._threads: list[threading.Thread] = []
        wanted = min(MAX_THREADS, _cores()) if threads is None else threads
        try:
            for number in range(min(wanted, sum(self._left))):
                thread = threading.Thread(
                    target=self._work, name=f"penstock-supply-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # no thread can be started
            self._over = not self._threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for(self, number: int) -> None:
        """Wait until all of these pages were faulted in, or the threads have stopped."""
        with self._lock:
            self._lock.wait_for(lambda: self._over or not self._left[number])

    def close(self) -> None:
        """Stop the threads and wait for them. Idempotent."""
        with self._lock:
            self._over = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _in_order(self) -> Iterator[tuple[int, PageRange]]:
        for number, (address, nbytes) in enumerate(self._pages):
            for start in range(0, nbytes, _PIECE_BYTES):
                yield number, PageRange(address + start, min(_PIECE_BYTES, nbytes - start))

    def _work(self) -> None:
        while True:
            with self._lock:
                number, piece = (0, None) if self._over else next(self._pieces, (0, None))
            if piece is None:
                return
            populate(piece)
            with self._lock:
                self._left[number] -= 1
                if not self._left[number]:
                    self._lock.notify_all()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
