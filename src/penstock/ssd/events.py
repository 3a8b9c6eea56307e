"""Time that passes from event to event: a heap of integers, and nothing that depends on chance.

Events at the same picosecond happen in the order in which they were told: a run is the same every time.
"""

from __future__ import annotations

import heapq
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
    """

    __slots__ = ("_heap", "_told", "count", "now_ps")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Action, Any]] = []
        self._told = 0
        self.now_ps = 0
        self.count = 0

    def at(self, when_ps: int, action: Action, about: Any) -> None:
        """Have ``action(about)`` happen then, which must not be in the past."""
        self._told += 1
        _push(self._heap, (when_ps, self._told, action, about))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        count = 0
        while heap:
            self.now_ps, _, action, about = _pop(heap)
            count += 1
            action(about)
        self.count += count
