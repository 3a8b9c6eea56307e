"""Memory that the system has yet to supply, touched ahead by several threads.

[Note: memory takes time]
    A page that is touched for the first time has to be found and cleared. A virtual machine may have to
    ask its host for it, at a fraction of what its disk reads in the time: a page that was given back a
    second ago is gone there already. A direct read asks for its pages one after the other, in the one
    thread that hands over reads. So several threads ask ahead of it, in the order of the reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final, Self

from penstock.core.locks import condition
from penstock.core.units import MIB
from penstock.io.pages import Pages, populate

MOST_THREADS: Final = 4
_PIECE_BYTES: Final = 16 * MIB
"""What a thread asks for at once."""


class Supply:
    """Has pages made resident, their contents unchanged, while somebody reads into the first of them.

    A hint, as it were: where the system refuses, or no thread is to be had, whoever touches the pages
    gets them, or the error. The pages must be writable. Leave the ``with`` block to stop and to wait.
    """

    def __init__(self, pages: Sequence[Pages], *, threads: int | None = None) -> None:
        """Begin.

        Args:
            pages: In the order in which they are needed.
            threads: How many ask; as many as there are cores, but at most four, if None.
        """
        self._pages = pages
        self._lock = condition()
        self._left = [-(-each.nbytes // _PIECE_BYTES) for each in pages]
        self._pieces = self._in_order()
        self._over = False
        self._threads: list[threading.Thread] = []
        wanted = min(MOST_THREADS, _cores()) if threads is None else threads
        try:
            for number in range(min(wanted, sum(self._left))):
                thread = threading.Thread(
                    target=self._work, name=f"penstock-supply-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # none is to be had
            self._over = not self._threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for(self, number: int) -> None:
        """Until all of these pages were asked for; no longer than anybody asks."""
        with self._lock:
            self._lock.wait_for(lambda: self._over or not self._left[number])

    def close(self) -> None:
        """Ask for nothing more, and wait until nobody does. Idempotent."""
        with self._lock:
            self._over = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _in_order(self) -> Iterator[tuple[int, Pages]]:
        for number, (address, nbytes) in enumerate(self._pages):
            for start in range(0, nbytes, _PIECE_BYTES):
                yield number, Pages(address + start, min(_PIECE_BYTES, nbytes - start))

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
    """Those that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
