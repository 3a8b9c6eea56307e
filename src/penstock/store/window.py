"""Transfers in flight: begun and completed in order, bounded, and cancelled together.

A client that reads ahead or writes behind has some transfers in flight, each of which carries an *item*,
such as a block of memory and the place of its bytes. A :class:`TransferWindow` holds them. It completes
the oldest when the next needs its memory, and all of them at the end. After an error it cancels what has
not started and waits for the rest, so that nothing accesses the memory when it is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from penstock.core.errors import PenstockError
from penstock.io.engine import Priority, Transfer

Item = TypeVar("Item")
Memory = TypeVar("Memory")


class _InFlight(NamedTuple, Generic[Item]):
    item: Item
    transfer: Transfer
    nbytes: int


def _nothing(_: object) -> None:
    return


def _raise(_: object, error: Exception) -> None:
    raise error


class TransferWindow(Generic[Item]):
    """Transfers in flight, the oldest first. Not thread-safe, except for ``priority``.

    As a context manager it finishes all transfers, or cancels them if the block raises.

    Attributes:
        priority: Priority of the transfers that begin from now on; any thread may change it.
    """

    def __init__(
        self,
        *,
        complete: Callable[[Item], None] = _nothing,
        fail: Callable[[Item, Exception], None] = _raise,
        release: Callable[[Item], None] = _nothing,
        limit_bytes: int | None = None,
        priority: Priority = Priority.PREFETCH,
    ) -> None:
        """Begin with nothing in flight.

        Args:
            complete: Called with each item whose transfer has succeeded, in order.
            fail: Called with an item and the error of its transfer, or of ``complete``. If it returns,
                the window goes on; by default it raises the error.
            release: Called once with each item, when nothing accesses its memory any more.
            limit_bytes: Most bytes that ``make_room`` leaves in flight; None: no limit.
            priority: Priority of the transfers.
        """
        self.priority = priority
        self._complete = complete
        self._fail = fail
        self._release = release
        self._limit_bytes = limit_bytes
        self._in_flight: deque[_InFlight[Item]] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        """Return the number of items in flight."""
        return len(self._in_flight)

    def __enter__(self) -> TransferWindow[Item]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.cancel()

    def begin(
        self, item: Item, submit: Callable[[Priority], Transfer], nbytes: int = 0
    ) -> Transfer:
        """Begin a transfer.

        Args:
            item: Item that it carries. Released if ``submit`` raises a PenstockError; not after what a
                signal's handler raises, as the transfer may have begun.
            submit: Begins the transfer, with a priority.
            nbytes: Bytes that count towards the limit.

        Returns:
            The transfer.
        """
        try:
            transfer = submit(self.priority)
        except PenstockError:
            self._release(item)
            raise
        self.add(item, transfer, nbytes)
        return transfer

    def add(self, item: Item, transfer: Transfer, nbytes: int = 0) -> None:
        """Append a transfer that has begun; see ``begin``."""
        self._in_flight.append(_InFlight(item, transfer, nbytes))
        self._nbytes += nbytes

    def pop(self) -> Item:
        """Remove the oldest transfer and return its item. The caller waits for it, and releases it."""
        item, _, nbytes = self._in_flight.popleft()
        self._nbytes -= nbytes
        return item

    def pop_excess(self, nbytes: int) -> Item | None:
        """Pop the oldest if ``nbytes`` more would exceed the limit; None if not, or if none is left.

        Threads that share a window make room by this: under their lock, which they free to wait.
        """
        return self.pop() if self._in_flight and self._exceeds(nbytes) else None

    def make_room(self, nbytes: int) -> None:
        """Complete the oldest transfers until ``nbytes`` more are within the limit, or none is left."""
        while self._exceeds(nbytes) and self.advance():
            pass

    def take(self, allocate: Callable[[], Memory | None]) -> Memory | None:
        """Return what ``allocate`` returns, completing the oldest transfers as long as that is None.

        Returns None if nothing is in flight any more and there is still no memory.
        """
        while (memory := allocate()) is None and self.advance():
            pass
        return memory

    def advance(self) -> bool:
        """Wait for the oldest transfer and complete it; return False if there is none.

        An item whose error ``fail`` raises stays in flight until ``cancel``.
        """
        if not self._in_flight:
            return False
        item, transfer, _ = self._in_flight[0]
        try:
            transfer.wait()
            self._complete(item)
        except Exception as error:
            if not transfer.done:  # it is of a signal's handler, and the transfer goes on
                raise
            self._fail(item, error)
        self._drop_oldest()
        return True

    def finish(self) -> None:
        """Complete everything in flight, in order."""
        while self.advance():
            pass

    def cancel(self) -> None:
        """Cancel what has not started, wait for the rest, and release all. Idempotent.

        What a signal's handler raises meanwhile is raised when all are released.
        """
        for each in reversed(self._in_flight):
            each.transfer.cancel()
        interrupt: BaseException | None = None
        while self._in_flight:
            try:
                self._in_flight[0].transfer.wait_for_end()
            except BaseException as error:  # noqa: BLE001  (raised below)
                interrupt = error
            self._drop_oldest()
        if interrupt is not None:
            raise interrupt

    def _exceeds(self, nbytes: int) -> bool:
        return self._limit_bytes is not None and self._nbytes + nbytes > self._limit_bytes

    def _drop_oldest(self) -> None:
        self._release(self.pop())
