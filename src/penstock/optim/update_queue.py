"""The updates of one step: threads of a pool make them, and so does a thread that waits for them.

[Note: who waits takes part]
    A thread that waits for updates makes the next one itself if no thread of the pool has begun it: the
    cores on which it computes would be idle. More threads in the pool would take cores from computing
    where updates are not late. With parameters on a device the thread is autograd's own for it, and its
    stream the one that backward computes on, so there it only waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import get_ident

import torch

from penstock.optim.pool import wait_for_all


class UpdateQueue:
    """Updates of tiles, each made once. A tile is known by its index.

    Attributes:
        takes_part: True if ``make_next`` makes updates; see [Note: who waits takes part].
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.takes_part = False
        self._futures: dict[int, Future[None]] = {}  # by tile, in the order of submission
        self._not_done: set[Future[None]] = set()  # of these
        # updates that no thread may have begun yet, oldest first
        self._pending: deque[tuple[int, Callable[[], None], Future[None]]] = deque()
        # updates outside of the pool, and their threads
        self._outside: dict[Future[None], int] = {}

    def __bool__(self) -> bool:
        """Return whether updates were submitted in this step."""
        return bool(self._futures)

    def __contains__(self, tile: int) -> bool:
        """Return whether the update of a tile was submitted."""
        return tile in self._futures

    def __iter__(self) -> Iterator[int]:
        """Return the tiles in the order in which their updates were submitted."""
        return iter(self._futures)

    def submit(self, tile: int, update: Callable[[], None], pool: ThreadPoolExecutor) -> None:
        """Have a tile updated."""
        future = pool.submit(update)
        self._note(tile, future)
        self._pending.append((tile, update, future))

    def under_way(self) -> list[Future[None]]:
        """Return the updates that have not ended."""
        return [future for future in list(self._not_done) if not future.done()]

    def make_next(self) -> bool:
        """Make the oldest update that no thread has begun, in this thread; return False if there is none.

        An error is raised by ``wait``. An interrupt is raised at once.
        """
        while self.takes_part:
            try:
                tile, update, queued = self._pending.popleft()
            except IndexError:
                break
            own: Future[None] = Future()
            own.set_running_or_notify_cancel()
            self._outside[own] = get_ident()
            try:
                if not (self.takes_part and queued.cancel()):
                    continue
                self._note(tile, own)
                with torch.no_grad():
                    update()
                own.set_result(None)
            except BaseException as error:
                if not own.done():
                    own.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                del self._outside[own]
            return True
        return False

    def wait(self) -> None:
        """Wait for all updates. Raises the first error of one, when no thread is at work any more."""
        wait_for_all(list(self._futures.values()))

    def cancel(self) -> None:
        """Take back the updates that have not begun."""
        for future in list(self._futures.values()):
            future.cancel()

    def close(self) -> None:
        """Take back what has not begun, and wait for what other threads make outside of the pool."""
        self.takes_part = False
        self.cancel()
        wait([each for each, thread in list(self._outside.items()) if thread != get_ident()])

    def clear(self) -> None:
        """Forget all, when nothing is under way."""
        self._futures.clear()
        self._pending.clear()

    def _note(self, tile: int, future: Future[None]) -> None:
        self._futures[tile] = future
        self._not_done.add(future)
        future.add_done_callback(self._not_done.discard)
