"""The reference engine: the units of one channel, event by event, with a queue for each resource.

All events of one moment happen first; then dies and elements are assigned, then the bus. So claims of the
same moment are served by number, not by the order of events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from penstock.lab.ssd.graph import BUS, DIE, UnitStage, UpdatePhase

_Claim = tuple[int, int, int]
"""Claim (time, die, number of the unit there), in the order of service."""


class _Resource:
    """A resource that serves one unit at a time."""

    def __init__(self) -> None:
        self.queue: list[_Claim] = []
        self.free = True

    def next(self) -> _Claim | None:
        """Remove and return the first claim, if it may be served."""
        if not self.free or not self.queue:
            return None
        self.free = False
        return heapq.heappop(self.queue)


class ChannelRun:
    """One channel of a phase. ``run`` it once.

    Attributes:
        units_ps: By kind, the sum over units of the time from the claim of the first stage to the end
            of the last.
        waits_ps: By kind, the part of it spent waiting for the bus.
    """

    def __init__(self, phase: UpdatePhase, number: int) -> None:
        """Prepare channel ``number``."""
        self._phase = phase
        self._number = number
        self._mine = len(range(number, phase.units, phase.channels))
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._now_ps = 0
        self._bus = _Resource()
        self._die = [_Resource() for _ in range(phase.dies)]
        self._element = [_Resource() for _ in range(phase.dies)]
        self._holder = [-1] * phase.dies  # the set that holds a die between stages
        self._place: dict[tuple[int, int], int] = {}  # by (die, unit), its stage
        self._began: dict[tuple[int, int], int] = {}  # by the same, the time of its first claim
        self.units_ps = [0] * len(phase.kinds)
        self.waits_ps = [0] * len(phase.kinds)
        self._filled = [0] * phase.dies
        self._bus_ps = self._die_ps = self._end_ps = 0

    def run(self) -> tuple[int, int, int]:
        """Return (end of the last unit, working time of the bus, working time of all dies), in ps."""
        for die in range(self._phase.dies):
            for number in range(self._phase.sets):
                self._begin(die, number)
        while self._heap:
            self._now_ps = self._heap[0][0]
            while self._heap and self._heap[0][0] == self._now_ps:
                heapq.heappop(self._heap)[2]()
            self._assign()
        return self._end_ps, self._bus_ps, self._die_ps

    def _at(self, when_ps: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (when_ps, self._sequence, action))

    def _begin(self, die: int, number: int) -> None:
        """Start a unit once its gradient has come."""
        order = number * self._phase.dies + die
        if order >= self._mine:
            if self._holder[die] == number % self._phase.sets:
                self._holder[die] = -1
                self._die[die].free = True
            return
        self._place[die, number] = 0
        unit = self._number + order * self._phase.channels
        begins = max(self._now_ps, (unit + 1) * self._phase.release_ps)
        self._began[die, number] = begins
        self._at(begins, lambda: self._ask(die, number))

    def _stage(self, die: int, number: int) -> UnitStage:
        kind = self._phase.kinds[self._phase.kind_of(die, number)]
        return kind[self._place[die, number]]

    def _ask(self, die: int, number: int) -> None:
        """Claim the resource of the unit's stage; the die first if that stands still for the bus."""
        stage = self._stage(die, number)
        holds = self._holder[die] == number % self._phase.sets
        if holds and stage.resource == DIE:
            self._work(die, number, stage, self._die[die])
            return
        if stage.resource == DIE or (stage.port and not holds):
            queue = self._die[die].queue
        else:
            queue = (self._bus if stage.resource == BUS else self._element[die]).queue
        heapq.heappush(queue, (self._now_ps, die, number))

    def _assign(self) -> None:
        """Assign free resources to the first claims."""
        for die in range(self._phase.dies):
            if claim := self._die[die].next():
                stage = self._stage(die, claim[2])
                if stage.port or stage.keeps:
                    self._holder[die] = claim[2] % self._phase.sets
                if stage.port:
                    heapq.heappush(self._bus.queue, (self._now_ps, die, claim[2]))
                else:
                    self._work(die, claim[2], stage, self._die[die])
            if claim := self._element[die].next():
                self._work(die, claim[2], self._stage(die, claim[2]), self._element[die])
        if claim := self._bus.next():
            asked, die, number = claim
            self.waits_ps[self._phase.kind_of(die, number)] += self._now_ps - asked
            self._work(die, number, self._stage(die, number), self._bus)

    def _work(self, die: int, number: int, stage: UnitStage, resource: _Resource) -> None:
        took = stage.took_ps
        if stage.resource == DIE:
            if stage.fills:
                self._filled[die] += 1
                took += self._phase.erase_ps * (self._filled[die] % self._phase.erase_every == 0)
            self._die_ps += took
        elif stage.resource == BUS:
            self._bus_ps += took

        def over() -> None:
            if stage.resource != DIE:
                resource.free = True
            if (stage.resource == DIE or stage.port) and not stage.keeps:
                self._holder[die] = -1
                self._die[die].free = True
            self._over(die, number)

        self._at(self._now_ps + took, over)

    def _over(self, die: int, number: int) -> None:
        """End a stage."""
        self._end_ps = self._now_ps
        self._place[die, number] += 1
        kind = self._phase.kind_of(die, number)
        if self._place[die, number] < len(self._phase.kinds[kind]):
            self._ask(die, number)
            return
        self.units_ps[kind] += self._now_ps - self._began.pop((die, number))
        del self._place[die, number]
        self._begin(die, number + self._phase.sets)
