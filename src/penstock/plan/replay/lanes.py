"""Channels of a simulated machine, and queues of jobs with priorities before them.

A *channel* (a direction of the link, of flash, the codec's thread) does one thing at a time. A *lane*
is a queue of jobs of one kind before one or two channels, first come, first served; a job occupies all
of its lane's channels at once, as when bytes flow through the link to flash piece by piece. If lanes
share a channel, the job that can begin earliest goes first; of several that can begin at the same time,
the first of: decode, read, write, encode; of two reads or two writes, the one that arrived first. Jobs
are not interrupted.

[Note: lazy lanes]
    Lanes only run when ``advance`` is called: until then an added job waits in its lane. Since jobs begin
    in the order of time, and are added at the time at which they arrive, the time of the call makes no
    difference. Only changes out of order (``cancel``, ``go_first``) need the lanes to be up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

NOT_YET: Final = -1
"""Placeholder for the end of a job that has not begun."""
CANCELLED: Final = -2
"""Placeholder for the end of a job that must not begin any more."""
DECODE, READ, WRITE, ENCODE = range(4)
"""Kinds of lanes, by precedence."""
NEVER: Final = 1 << 200
"""Time of what cannot begin, as far as is known."""


class ReplayChannel:
    """Resource that does one job at a time; free from ``free_ns`` on."""

    __slots__ = ("free_ns",)

    def __init__(self) -> None:
        self.free_ns = 0


_free_ns: Final = attrgetter("free_ns")


class ReplayLane:
    """A queue of jobs, each a slot by its index.

    Attributes:
        precedence: Priority; a smaller number goes first.
        log: (start, slot) of every job that has begun, in order.
        done: End of the last stage, by slot; NOT_YET or CANCELLED before that has begun.
        then: Lane of the next stage, by slot; None if this is the last stage. None: the last for all.
    """

    __slots__ = ("_came_ns", "_latency_ns", "_uses", "done", "log", "precedence", "queue", "then")

    def __init__(
        self,
        *uses: tuple[ReplayChannel, Sequence[int]],
        precedence: int,
        done: list[int],
        latency_ns: int = 0,
        then: list[ReplayLane | None] | None = None,
    ) -> None:
        """Create a lane before these channels, each with the time for which each slot occupies it.

        ``latency_ns`` passes from the end of a job to the end of its stage; other jobs run meanwhile.
        """
        self._uses = uses
        self.precedence = precedence
        self._latency_ns = latency_ns
        self.done = done
        self.then = then
        self.queue: deque[tuple[int, int]] = deque()
        self._came_ns: dict[int, int] = {}  # by slot, when the job in the queue arrived
        self.log: list[tuple[int, int]] = []

    def add(self, at_ns: int, slot: int) -> None:
        """Queue a job that arrives at ``at_ns``, behind those that arrive no later."""
        queue = self.queue
        self._came_ns[slot] = at_ns
        place = len(queue)
        while place and queue[place - 1][0] > at_ns:
            place -= 1
        if place == len(queue):
            queue.append((at_ns, slot))
        else:
            queue.insert(place, (at_ns, slot))

    def add_first(self, at_ns: int, slot: int) -> None:
        """Queue a job ahead of all others."""
        self._came_ns[slot] = at_ns
        self.queue.appendleft((at_ns, slot))

    def go_first(self, slot: int) -> None:
        """Move a job ahead of all others if it is queued."""
        queue, at_ns = self.queue, self._came_ns.get(slot)
        if at_ns is not None and queue[0][1] != slot:
            queue.remove((at_ns, slot))
            queue.appendleft((at_ns, slot))

    def next_ns(self) -> int:
        """Return the time when the next job can begin; ``NEVER`` if there is none."""
        queue, done = self.queue, self.done
        while queue:
            at_ns, slot = queue[0]
            if done[slot] == CANCELLED:
                queue.popleft()
                del self._came_ns[slot]
                continue
            for channel, _ in self._uses:
                at_ns = max(at_ns, channel.free_ns)
            return at_ns
        return NEVER

    def begin(self, at_ns: int) -> None:
        """Begin the next job."""
        _, slot = self.queue.popleft()
        del self._came_ns[slot]
        end_ns = at_ns
        for channel, times in self._uses:
            channel.free_ns = at_ns + times[slot]
            end_ns = max(end_ns, channel.free_ns)
        end_ns += self._latency_ns
        self.log.append((at_ns, slot))
        following = None if self.then is None else self.then[slot]
        if following is None:
            self.done[slot] = end_ns
        else:
            following.add(end_ns, slot)

    def run(self, until_ns: int) -> None:
        """Begin all jobs that can begin by then. Requires one channel of its own and no next stage."""
        queue, done, log = self.queue, self.done, self.log
        ((channel, times),) = self._uses
        free_ns, latency_ns = channel.free_ns, self._latency_ns
        while queue:
            at_ns, slot = queue[0]
            if done[slot] != CANCELLED:
                at_ns = max(at_ns, free_ns)
                if at_ns > until_ns:
                    break
                free_ns = at_ns + times[slot]
                log.append((at_ns, slot))
                done[slot] = free_ns + latency_ns
            queue.popleft()
            del self._came_ns[slot]
        channel.free_ns = free_ns

    @property
    def channels(self) -> tuple[ReplayChannel, ...]:
        """Channels that its jobs occupy."""
        return tuple(channel for channel, _ in self._uses)


class ReplayLanes:
    """All lanes of one machine.

    Args:
        lanes: All lanes.
        together: True if some of them share a channel or feed one another.
    """

    def __init__(self, lanes: Sequence[ReplayLane], *, together: bool) -> None:
        self._lanes = lanes
        self._together = together
        self._channels = [channel for lane in lanes for channel in lane.channels]

    def advance(self, until_ns: int) -> None:
        """Begin all jobs that can begin by ``until_ns``."""
        if not self._together:
            for lane in self._lanes:
                if lane.queue:
                    lane.run(until_ns)
            return
        while True:
            first, turn = None, (until_ns + 1, 0, 0)
            for lane in self._lanes:
                queue = lane.queue
                if not queue or queue[0][0] > turn[0]:
                    continue
                if (at_ns := lane.next_ns()) <= turn[0] and queue:
                    its = (at_ns, lane.precedence, queue[0][0])
                    if its < turn:
                        first, turn = lane, its
            if first is None:
                return
            first.begin(turn[0])

    def next_ns(self) -> int:
        """Return the time when the next job of any lane can begin; ``NEVER`` if there is none."""
        return min((lane.next_ns() for lane in self._lanes), default=NEVER)

    def end_of(self, slot: int, done: Sequence[int]) -> int:
        """Return the end of a queued job, assuming that nothing is added until then."""
        while done[slot] == NOT_YET:
            self.advance(self.next_ns())
        return done[slot]

    def busy_until(self) -> int:
        """Return the time from which no begun job occupies a channel."""
        return max(map(_free_ns, self._channels), default=0)


class LaneEnds:
    """Iterator over the ends of begun jobs of some lanes."""

    def __init__(self, lanes: ReplayLanes, those: Sequence[ReplayLane]) -> None:
        """Watch ``those`` of all ``lanes``; each must end its jobs in order."""
        self._lanes = lanes
        self._those = those
        self._seen = [0] * len(those)

    def by(self, until_ns: int) -> Iterator[tuple[int, int]]:
        """Yield (end, slot) once for every job that has ended by then, lane by lane."""
        self._lanes.advance(until_ns)
        for place, lane in enumerate(self._those):
            log, done, seen = lane.log, lane.done, self._seen[place]
            while seen < len(log):
                slot = log[seen][1]
                if done[slot] > until_ns:
                    break
                seen += 1
                yield done[slot], slot
            self._seen[place] = seen

    def next_ns(self) -> int | None:
        """Return the end of the next job that ``by`` has not yielded; None if there is none."""
        while True:
            ends = [
                lane.done[lane.log[seen][1]]
                for lane, seen in zip(self._those, self._seen, strict=True)
                if seen < len(lane.log)
            ]
            end_ns = min(ends, default=NEVER)
            begin_ns = self._lanes.next_ns()
            if begin_ns >= end_ns:
                return None if end_ns == NEVER else end_ns
            self._lanes.advance(begin_ns)
