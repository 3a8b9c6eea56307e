"""Whose turn it is: which tile is read next, and which one makes room for it.

[Note: which tiles stay]
    A pass visits tiles in an order that is known before, at least roughly. Reads are begun in that
    order as long as a buffer is free. A buffer is freed by writing a tile that was updated in this
    pass, and of those the one that the next pass needs last. So if the next pass goes backwards, what
    was visited last stays, is not written at all, and is updated where it is; if it goes the same way
    again, what was visited first stays. As many buffers as tiles, and nothing is ever moved.

Nothing here waits, moves a byte or changes a buffer: it only says which one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from penstock.optim.layout import Tile
from penstock.optim.ring import BufferPhase, BufferRing, RecordBuffer


class Turns:
    """The order of one pass after the other. The pipeline's lock guards it."""

    def __init__(self, ring: BufferRing) -> None:
        """Nothing is to be read yet."""
        self._ring = ring
        self._ahead: deque[Tile] = deque()
        self._rank: Mapping[int, int] = {}
        self._rotating = len(ring)

    def begin(self, order: Sequence[Tile], rank: Mapping[int, int], rotating: int) -> None:
        """Begin a pass; see ``TilePipeline.begin``."""
        self._ahead = deque(order)
        self._rank = rank
        self._rotating = rotating

    def forget(self) -> None:
        """Nothing more is to be read ahead."""
        self._ahead.clear()

    def postpone(self, tile: Tile) -> None:
        """A tile that was read ahead is given up, and to be read again at the end."""
        self._ahead.append(tile)

    def next_to_read(self) -> tuple[Tile, RecordBuffer] | None:
        """The next tile to read ahead, and where to; None: nothing is to be read, or there is no room."""
        while self._ahead and self._ring.of(self._ahead[0]) is not None:
            self._ahead.popleft()
        room = self._ring.first(BufferPhase.FREE) if self._ahead else None
        return None if room is None else (self._ahead.popleft(), room)

    def to_let_go(self) -> list[RecordBuffer]:
        """Updated tiles that should make room for reads that wait for it, those needed last first."""
        if not self._ahead:
            return []
        absent = (tile for tile in self._ahead if self._ring.of(tile) is None)
        waiting = sum(1 for _ in islice(absent, len(self._ring)))  # no more can be helped
        moving = [each for each in self._ring if _is_rotating(each)]
        room = sum(each.phase is BufferPhase.FREE or each.leaves for each in moving)
        wanted = min(waiting - room, self._rotating - len(moving))
        if wanted <= 0:
            return []
        done = [each for each in self._ring if each.is_done and not each.leaves and each.rests]
        done.sort(key=self._next_use, reverse=True)
        return done[:wanted]

    def to_give_up(self) -> RecordBuffer | None:
        """Return a buffer that can be reused at once: its record is on flash as it is, or not needed."""
        spare = [
            each
            for each in self._ring
            if each.phase is BufferPhase.CLEAN or (each.is_fresh and each.rests)
        ]
        return max(spare, key=lambda b: (b.is_done, b.is_early, self._next_use(b)), default=None)

    def to_write(self) -> RecordBuffer | None:
        """Return the changed buffer to write back for a tile that waits."""
        dirty = [each for each in self._ring if each.phase is BufferPhase.DIRTY]
        return max(dirty, key=lambda b: (b.is_done, self._next_use(b)), default=None)

    def _next_use(self, buffer: RecordBuffer) -> int:
        assert buffer.tile is not None
        return self._rank.get(buffer.tile.index, 1 << 60)


def _is_rotating(buffer: RecordBuffer) -> bool:
    return (
        buffer.phase in (BufferPhase.FREE, BufferPhase.READING) or buffer.leaves or buffer.is_early
    )
