"""The latest events, in bounded memory."""

from __future__ import annotations

from collections import deque
from itertools import chain
from sys import getsizeof
from typing import Final

from penstock.observe.events import LEVEL, MARK, RawEvent

BLOCK_EVENTS: Final = 64
"""Events that are measured, and later let go, together."""
_INT_BYTES: Final = 32
_ALIGN: Final = 16
"""Unit in which the interpreter allocates."""


class EventRing:
    """The latest events that fit into a number of bytes; the oldest go first. Not thread-safe.

    Appending costs no more than appending to a list: memory is measured block by block, in ``settle``.

    Attributes:
        held_bytes: Memory of the events that have been measured; never more than the limit.
        latest: Events that have not been measured yet; append to it.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Hold nothing yet, and later at most ``limit_bytes`` beside ``latest``."""
        self.held_bytes = 0
        self.latest: list[RawEvent] = []
        self._limit_bytes = limit_bytes
        self._blocks: deque[tuple[int, tuple[RawEvent, ...]]] = deque()

    def settle(self) -> None:
        """Measure the latest events, and let the oldest go that have no room. When a block is full."""
        block = tuple(self.latest)
        self.latest.clear()
        nbytes = _size(block) + sum(map(_bytes_of, block))
        self._blocks.append((nbytes, block))
        self.held_bytes += nbytes
        while self.held_bytes > self._limit_bytes:
            self.held_bytes -= self._blocks.popleft()[0]

    def events(self) -> list[RawEvent]:
        """Return those that are held, in the order in which they came."""
        return [*chain.from_iterable(block for _, block in self._blocks), *self.latest]


def _bytes_of(event: RawEvent) -> int:
    """Return the memory of an event, without the names that it shares with others."""
    kind = event[0]
    if kind == LEVEL:
        return _size(event) + 2 * _INT_BYTES
    if kind == MARK:
        fields = dict(event[3])
        own = sum(map(_size, fields.values()))
        return _size(event) + _size(event[3]) + _size(fields) + own + _INT_BYTES
    return _size(event) + _size(event[6]) + 3 * _INT_BYTES


def _size(part: object) -> int:
    return -(-getsizeof(part) // _ALIGN) * _ALIGN
