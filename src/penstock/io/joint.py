"""Several requests as one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial

from penstock.core.locks import Lock
from penstock.io.engine import Engine, Priority, Request, Transfer


def submit_all(engine: Engine, requests: Sequence[Request]) -> Transfer:
    """Begin all of ``requests``; returns at once.

    The transfer settles once, after every request has, with the first error that is not a
    cancellation if there was any. It can be cancelled while every request can still be withdrawn.

    Raises:
        PenstockError: The engine refused the first request; nothing was begun. (What is refused
            later fails the transfer instead, since then there is something in flight.)
    """
    return _Joint(engine, requests).transfer


class _Joint:
    """The state behind the transfer: it lives as long as requests are in flight."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._lock = Lock()
        self._requests: list[Request | None] = list(requests)  # None: over
        self._parts: list[Transfer | None] = [None] * len(requests)
        self._left = len(requests)
        self._error: BaseException | None = None
        self._withdrawing = False
        self._withdrawn: list[int] = []
        self.transfer = Transfer(
            sum(request.nbytes for request in requests),
            cancel=self._cancel,
            promote=self._promote,
        )
        for index, request in enumerate(requests):
            self._submit(index, request, must_begin=index == 0)

    def _submit(self, index: int, request: Request, *, must_begin: bool = False) -> None:
        try:
            part = self._engine.submit(request)
        except Exception as error:
            if must_begin:
                raise
            self._over(index, error)
            return
        with self._lock:
            self._parts[index] = part
        part.add_done_callback(partial(self._part_done, index))

    def _part_done(self, index: int, part: Transfer) -> None:
        with self._lock:
            if self._withdrawing and isinstance(part.error, CancelledError):
                self._withdrawn.append(index)
                return
        self._over(index, part.error)

    def _over(self, index: int, error: BaseException | None) -> None:
        with self._lock:
            self._requests[index] = self._parts[index] = None
            if self._error is None or (error and isinstance(self._error, CancelledError)):
                self._error = error
            self._left -= 1
            last = self._left == 0
        if last:
            self.transfer.settle(self._error)

    def _cancel(self, transfer: Transfer) -> bool:
        """Withdraw all parts, or none: what turns out to have company in flight is begun again."""
        with self._lock:
            if self._withdrawing or self._left < len(self._parts):
                return False
            self._withdrawing = True
            parts = list(self._parts)
        for part in parts:  # the one that will begin first comes first, so failing is cheap
            if part is None or not part.cancel():
                break
        with self._lock:
            withdrawn, self._withdrawn = self._withdrawn, []
            if len(withdrawn) == len(parts):
                self._requests.clear()
                return True
            self._withdrawing = False
            again = [(index, self._requests[index]) for index in withdrawn]
        for index, request in again:
            assert request is not None, "a withdrawn request was dropped"
            self._submit(index, request)
        return False

    def _promote(self, transfer: Transfer, priority: Priority) -> None:
        with self._lock:
            parts = list(self._parts)
            for index, request in enumerate(self._requests):  # for those that are begun again
                if request is not None and priority < request.priority:
                    self._requests[index] = replace(request, priority=priority)
        for part in parts:
            if part is not None:
                part.promote(priority)
