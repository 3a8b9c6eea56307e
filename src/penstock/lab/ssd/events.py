"""Simulated time, from event to event: a heap of integers, without randomness.

Events at the same picosecond happen in the order in which they were scheduled: all runs are equal.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

Action: TypeAlias = Callable[[Any], None]
_pop = heapq.heappop
_push = heapq.heappush


class Events:
    """The pending events.

    Attributes:
        now_ps: Time of the current event.
        count: Number of events that have happened.
        heap: (time, sequence number, action, argument); frequent events are pushed here directly, with
            ``tick()`` for the number.
    """

    __slots__ = ("count", "heap", "now_ps", "tick")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Action, Any]] = []
        self.tick = itertools.count().__next__
        self.now_ps = 0
        self.count = 0

    def at(self, when_ps: int, action: Action, about: Any) -> None:
        """Schedule ``action(about)`` at a time that must not be in the past."""
        _push(self.heap, (when_ps, self.tick(), action, about))

    def run(self) -> None:
        """Execute events until none is left."""
        heap, pop = self.heap, _pop
        count = 0
        while heap:
            self.now_ps, _, action, about = pop(heap)
            count += 1
            action(about)
        self.count += count
