"""Time that passes from event to event: a heap of integers, and nothing that depends on chance.

Events at the same picosecond happen in the order in which they were told: a run is the same every time.
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
    """What is still to happen.

    Attributes:
        now_ps: The time of the event that is happening.
        count: Events that have happened.
        heap: (when, the number in which it was told, action, about): what is told most often pushes here
            by itself, with ``tick()`` for the number.
    """

    __slots__ = ("count", "heap", "now_ps", "tick")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Action, Any]] = []
        self.tick = itertools.count().__next__
        self.now_ps = 0
        self.count = 0

    def at(self, when_ps: int, action: Action, about: Any) -> None:
        """Have ``action(about)`` happen then, which must not be in the past."""
        _push(self.heap, (when_ps, self.tick(), action, about))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap, pop = self.heap, _pop
        count = 0
        while heap:
            self.now_ps, _, action, about = pop(heap)
            count += 1
            action(about)
        self.count += count
