"""Waiting for threads that update tiles."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait


def wait_for_all(futures: Sequence[Future[None]]) -> None:
    """Wait until all are over; if one fails, those that have not begun are cancelled. Raises that.

    The same if the wait is interrupted: nothing goes on behind the back of who catches that.
    """
    try:
        wait(futures, return_when="FIRST_EXCEPTION")
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
