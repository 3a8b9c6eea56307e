"""The way of a replay's slots through staging memory, as on CUDA devices.

What goes to flash is copied over the link to a buffer in pinned host memory: then its memory on the
device is free. From there it is written to flash: then the buffer is free. What comes from flash is read
to a buffer, and copied from there over the link. Each copy or read takes its buffer when it begins, and
waits until there is room; a copy to a buffer leaves room for the read that is next.

A slot that is asked for while a buffer still holds it is copied from there, and nothing is read. A write
that has not begun when its slot is freed is cancelled.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.replay.lanes import (
    CANCELLED,
    NEVER,
    NOT_YET,
    READ,
    WRITE,
    ReplayChannel,
    ReplayLane,
    ReplayLanes,
)


class StagingRoom:
    """Buffers of the staging memory, one per slot at most, while transfers touch them.

    Attributes:
        sizes: Bytes that the buffer of each slot takes.
        peak_bytes: Most bytes in buffers at once.
        changes: (time, bytes) taken, or freed if negative.
    """

    __slots__ = (
        "_capacity",
        "_ends",
        "_free",
        "_last_ns",
        "_touching",
        "changes",
        "peak_bytes",
        "sizes",
    )

    def __init__(self, capacity: int, sizes: Sequence[int]) -> None:
        """Start with ``capacity`` bytes, all of them free."""
        self.sizes = sizes
        self.peak_bytes = 0
        self.changes: list[tuple[int, int]] = []
        self._capacity = self._free = capacity
        self._ends: list[
            tuple[int, int]
        ] = []  # (time, slot) of the buffers that will be free, sorted
        self._touching = [0] * len(sizes)  # transfers by slot that use its buffer, or are queued
        self._last_ns = [0] * len(sizes)  # the latest end of these that is known

    def when(self, nbytes: int) -> int:
        """Return the time from which so many bytes are free; ``NEVER`` if it is not known yet."""
        free = self._free
        if nbytes <= free:
            return 0
        for at_ns, slot in self._ends:
            free += self.sizes[slot]
            if nbytes <= free:
                return at_ns
        return NEVER

    def take(self, slot: int, at_ns: int) -> None:
        """Give a slot a buffer, for one transfer. There must be room."""
        ends = self._ends
        while ends and ends[0][0] <= at_ns:
            self._give_back(*ends.pop(0))
        self._free -= self.sizes[slot]
        self.peak_bytes = max(self.peak_bytes, self._capacity - self._free)
        self.changes.append((at_ns, self.sizes[slot]))
        self._touching[slot] = 1
        self._last_ns[slot] = at_ns

    def leave(self, slot: int, at_ns: int) -> None:
        """Note the end of a transfer; after the last one the buffer is free."""
        self._touching[slot] -= 1
        self._last_ns[slot] = max(self._last_ns[slot], at_ns)
        if not self._touching[slot]:
            insort(self._ends, (self._last_ns[slot], slot))

    def holds(self, slot: int, at_ns: int) -> bool:
        """Return True if a slot has a buffer, as far as is known."""
        return self._touching[slot] > 0 or self._last_ns[slot] > at_ns

    def join(self, slot: int) -> None:
        """Note another transfer of a slot that has a buffer."""
        if not self._touching[slot]:
            self._ends.remove((self._last_ns[slot], slot))
        self._touching[slot] += 1

    def close(self) -> None:
        """Enter into ``changes`` all that will be free, however late."""
        for end in self._ends:
            self._give_back(*end)
        self._ends.clear()

    def _give_back(self, at_ns: int, slot: int) -> None:
        self._free += self.sizes[slot]
        self.changes.append((at_ns, -self.sizes[slot]))


class _TakingLane(ReplayLane):
    """Lane whose jobs take a buffer when they begin, unless the next of ``first`` needs the room."""

    __slots__ = ("_first", "_room")

    def __init__(
        self,
        use: tuple[ReplayChannel, Sequence[int]],
        room: StagingRoom,
        following: ReplayLane,
        *,
        precedence: int,
        done: list[int],
        latency_ns: int = 0,
        first: ReplayLane | None = None,
    ) -> None:
        super().__init__(
            use,
            precedence=precedence,
            done=done,
            latency_ns=latency_ns,
            then=[following] * len(done),
        )
        self._room = room
        self._first = first

    def next_ns(self) -> int:
        at_ns = super().next_ns()
        if at_ns == NEVER:
            return NEVER
        room, first = self._room, self._first
        nbytes = room.sizes[self.queue[0][1]]
        at_ns = max(at_ns, room.when(nbytes))
        if first is not None and first.queue and first.queue[0][0] <= at_ns:
            at_ns = max(at_ns, room.when(nbytes + room.sizes[first.queue[0][1]]))
        return at_ns

    def begin(self, at_ns: int) -> None:
        self._room.take(self.queue[0][1], at_ns)
        super().begin(at_ns)


class _Copies(_TakingLane):
    """Lane of copies to buffers: their ends are known, though the write to flash follows."""

    __slots__ = ()

    def begin(self, at_ns: int) -> None:
        slot = self.queue[0][1]
        super().begin(at_ns)
        ((channel, _),) = self._uses
        self.done[slot] = channel.free_ns


class _LeavingLane(ReplayLane):
    """Lane whose jobs leave their buffer when they end."""

    __slots__ = ("_room",)

    def __init__(
        self,
        use: tuple[ReplayChannel, Sequence[int]],
        room: StagingRoom,
        *,
        precedence: int,
        done: list[int],
        latency_ns: int = 0,
        then: list[ReplayLane | None] | None = None,
    ) -> None:
        super().__init__(use, precedence=precedence, done=done, latency_ns=latency_ns, then=then)
        self._room = room

    def begin(self, at_ns: int) -> None:
        slot = self.queue[0][1]
        super().begin(at_ns)
        ((channel, _),) = self._uses
        self._room.leave(slot, channel.free_ns + self._latency_ns)


class StagedReads(_TakingLane):
    """Lane of reads from flash. What a buffer holds skips it, and is copied from there.

    Attributes:
        lanes: All lanes; to be set before the first read.
        copied: Slots that were copied from the buffer of their write.
    """

    __slots__ = ("_to_device", "copied", "lanes")

    def __init__(
        self,
        use: tuple[ReplayChannel, Sequence[int]],
        room: StagingRoom,
        to_device: ReplayLane,
        *,
        done: list[int],
        latency_ns: int,
    ) -> None:
        """Create a lane before ``use``, flash and its times, and before the link, ``to_device``."""
        super().__init__(use, room, to_device, precedence=READ, done=done, latency_ns=latency_ns)
        self._to_device = to_device
        self.copied: list[int] = []
        self.lanes: ReplayLanes | None = None

    def add(self, at_ns: int, slot: int) -> None:
        """Queue a slot for its read, or for its copy from a buffer."""
        if self._joins(at_ns, slot):
            self._to_device.add(at_ns, slot)
        else:
            super().add(at_ns, slot)

    def add_first(self, at_ns: int, slot: int) -> None:
        """Do the same ahead of all others."""
        if self._joins(at_ns, slot):
            self._to_device.add_first(at_ns, slot)
        else:
            super().add_first(at_ns, slot)

    def go_first(self, slot: int) -> None:
        """Move a slot ahead of all others where it is queued."""
        super().go_first(slot)
        self._to_device.go_first(slot)

    def _joins(self, at_ns: int, slot: int) -> bool:
        if not self._room.holds(slot, at_ns):
            return False
        assert self.lanes is not None
        self.lanes.advance(at_ns)
        if not self._room.holds(slot, at_ns):
            return False
        self._room.join(slot)
        self.copied.append(slot)
        return True


@dataclass(slots=True)
class StagedLanes:
    """Lanes between device and flash."""

    out: ReplayLane
    """From the device to a buffer; its ends are in ``written``."""
    to_flash: ReplayLane
    back: StagedReads
    """From flash to a buffer."""
    to_device: ReplayLane
    room: StagingRoom
    written: list[int]
    """End of the copy to a buffer, by slot."""
    on_flash: list[int]
    """End of the write to flash, by slot."""

    def discard(self, i: int, now: int) -> None:
        """Cancel the write to flash of a slot that is not needed any more, if it has not begun."""
        if self.on_flash[i] != NOT_YET or not self.room.holds(i, now):
            return
        assert self.back.lanes is not None
        self.back.lanes.advance(now)
        if self.on_flash[i] == NOT_YET:
            self.on_flash[i] = CANCELLED
            self.room.leave(i, max(now, self.written[i]))


def staged_lanes(
    staging_bytes: int,
    sizes: Sequence[int],
    *,
    link_out: tuple[ReplayChannel, Sequence[int]],
    link_in: tuple[ReplayChannel, Sequence[int]],
    flash_out: tuple[ReplayChannel, Sequence[int]],
    flash_in: tuple[ReplayChannel, Sequence[int]],
    written: list[int],
    arrived: list[int],
    latency_ns: int,
    to_decode: list[ReplayLane | None] | None,
) -> StagedLanes:
    """Create the lanes through ``staging_bytes`` of memory, before channels and their times.

    Args:
        staging_bytes: At least the largest of ``sizes`` that moves.
        sizes: Bytes of the buffer of each slot.
        link_out: The link from the device; the next three are the same for others.
        link_in: The link to the device.
        flash_out: Writes to flash.
        flash_in: Reads from flash.
        written: Gets the ends of the copies from the device.
        arrived: Gets the ends of the copies to the device.
        latency_ns: Of flash.
        to_decode: What follows the copy to the device, by slot.
    """
    room = StagingRoom(staging_bytes, sizes)
    on_flash = [NOT_YET] * len(sizes)
    to_flash = _LeavingLane(flash_out, room, precedence=WRITE, done=on_flash, latency_ns=latency_ns)
    to_device = _LeavingLane(link_in, room, precedence=READ, done=arrived, then=to_decode)
    back = StagedReads(flash_in, room, to_device, done=arrived, latency_ns=latency_ns)
    out = _Copies(link_out, room, to_flash, precedence=WRITE, done=written, first=back)
    return StagedLanes(out, to_flash, back, to_device, room, written, on_flash)
