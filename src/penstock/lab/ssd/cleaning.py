"""Garbage collection over time: victims are read, moved and erased, and waiting writes continue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from penstock.core.errors import ConfigError
from penstock.lab.ssd.blocks import EMPTY, FlashBlock
from penstock.lab.ssd.commands import GC_PROGRAM, GC_READ, MAP_PROGRAM, QUEUED_ERASE, Op
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.flash import Flash
from penstock.lab.ssd.ftl import Ftl

_ROUNDS: Final = 4
"""Moves of all pages of a drive that may lie between two writes of the host."""


@dataclass(slots=True, eq=False)
class _Victim:
    """A block, or a row of blocks, that is being emptied."""

    blocks: tuple[FlashBlock, ...]
    left: int = 0
    """Pages that have not been moved yet."""
    reads_left: dict[int, int] = field(default_factory=dict)
    """Parts of the super-page that have not been read, by page, for a row."""
    stale: set[int] = field(default_factory=set)
    """Pages of the stored map that lack the new places of moved pages."""
    erasing: bool = False

    @property
    def ready(self) -> bool:
        """True if it can be erased."""
        if self.left or self.erasing:
            return False
        return not any(block.pending for block in self.blocks)


class StoredMap(Protocol):
    """A page map on flash, as garbage collection sees it."""

    def moved(self, lpn: int) -> bool:
        """Note in memory that a page moves; return False if its entry is on flash only."""

    def page_of(self, lpn: int) -> int:
        """Return the number of the map page with the entry of a logical page."""

    def update(self, number: int, ops: list[Op]) -> None:
        """Add to ``ops`` the programs that rewrite a page of the map."""


class Cleaner:
    """Garbage collection of one drive.

    Attributes:
        map: Map to update with moved pages, if it is not entirely in memory.
    """

    def __init__(self, device: Device, ftl: Ftl, flash: Flash) -> None:
        self._ftl, self._flash = ftl, flash
        spare = device.geometry.spare_bytes if device.channel.send_spare else 0
        self._whole = device.geometry.page_bytes + spare
        self._under_way: dict[FlashBlock, _Victim] = {}
        self._waiting: dict[int, deque[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self._placed = self._moved_then = 0
        self._most_moves = _ROUNDS * device.geometry.planes * device.geometry.pages_per_plane
        self.map: StoredMap | None = None
        self._map_program = GC_PROGRAM
        if device.ftl.gc_preemptible:
            flash.put_host_first(ftl.short)
            self._map_program = MAP_PROGRAM

    @property
    def busy(self) -> bool:
        """True if it needs to know when the host has finished with a block."""
        return bool(self._under_way or self._waiting)

    def wait(
        self, plane: int, act: Callable[..., None], about: tuple[Any, ...], ops: list[Op]
    ) -> None:
        """Call ``act(*about, ops)`` when the plane has room."""
        self._waiting.setdefault(plane, deque()).append((act, about))
        if not self._ftl.gc_when_filled or not self._ftl.planes[plane].cleaning:
            self.clean(plane, ops)

    def clean(self, plane: int, ops: list[Op]) -> None:
        """Start to clean blocks of a plane, if it needs cleaning."""
        ftl = self._ftl
        if ftl.planes[plane].free >= ftl.threshold:
            return
        while blocks := ftl.victim(plane):
            self._check_progress()
            victim = _Victim(blocks)
            for block in blocks:
                self._under_way[block] = victim
                for page, lpn in enumerate(block.lpns):
                    if lpn != EMPTY:
                        ops.append(Op(GC_READ, block, page, lpn, self._whole, victim, self._read))
                        victim.left += 1
                        if block.row:
                            victim.reads_left[page] = victim.reads_left.get(page, 0) + 1
            if not victim.left:
                ops += self._erase(victim)
            if ftl.gc_when_filled:
                return

    def _check_progress(self) -> None:
        """Raise ConfigError if pages are moved without end while the host's writes wait."""
        ftl = self._ftl
        if ftl.user_writes != self._placed:
            self._placed, self._moved_then = ftl.user_writes, ftl.moves
        elif ftl.moves - self._moved_then > self._most_moves:
            raise ConfigError(
                f"the drive is full: garbage collection has moved {ftl.moves - self._moved_then} pages"
                " since the host's last write and found no room for another; use less of the drive, or"
                " increase its over-provisioning"
            )

    def host_finished(self, block: FlashBlock) -> None:
        """React to the end of the host's operations on a block: erase it, or choose it as a victim."""
        victim = self._under_way.get(block)
        if victim is not None:
            if victim.ready:
                self._flash.submit(self._erase(victim))
            return
        ops: list[Op] = []
        for each in block.together:
            if self._waiting.get(each.plane):
                self.clean(each.plane, ops)
        self._flash.submit(ops)

    def _erase(self, victim: _Victim) -> list[Op]:
        victim.erasing = True
        return [
            Op(QUEUED_ERASE, block, 0, EMPTY, 0, victim, self._erased) for block in victim.blocks
        ]

    # -- events -------------------------------------------------------------------------------------

    def _read(self, op: Op) -> None:
        if op.block.row:
            self._row_read(op)
            return
        if op.block.lpns[op.page] != op.lpn:
            self._finished(op.owner, 1)  # overwritten by the host meanwhile
            return
        self._tell_map(op.owner, op.lpn)
        ftl = self._ftl
        block, page = ftl.place(op.lpn, cleaning=True)
        ops: list[Op] = []
        if ftl.gc_when_filled and page + 1 == ftl.pages_per_block:
            self.clean(block.plane, ops)  # as MQSim does, because the moved page has filled a block
        # moved pages of the map go to the map's own block: through one queue, so that pages stay in order
        queue = self._map_program if op.lpn >= ftl.map_begin else GC_PROGRAM
        ops.append(Op(queue, block, page, op.lpn, self._whole, op.owner, self._moved))
        self._flash.submit(ops)

    def _row_read(self, op: Op) -> None:
        """Move a super-page together once all its pages have been read."""
        victim: _Victim = op.owner
        victim.reads_left[op.page] -= 1
        if victim.reads_left[op.page]:
            return
        if op.block.lpns[op.page] != op.lpn:
            self._finished(victim, len(victim.blocks))
            return
        number, _ = divmod(op.lpn, len(victim.blocks))
        self._tell_map(victim, op.lpn)
        row, page = self._ftl.place_row(number, cleaning=True)
        self._flash.submit(
            Op(GC_PROGRAM, block, page, block.lpns[page], self._whole, victim, self._moved)
            for block in row
        )

    def _tell_map(self, victim: _Victim, lpn: int) -> None:
        if self.map is not None and not self.map.moved(lpn):
            victim.stale.add(self.map.page_of(lpn))

    def _moved(self, op: Op) -> None:
        self._finished(op.owner, 1)

    def _finished(self, victim: _Victim, pages: int) -> None:
        victim.left -= pages
        if victim.left:
            return
        ops: list[Op] = []
        if self.map is not None:
            for page in sorted(victim.stale):
                self.map.update(page, ops)
            victim.stale.clear()
        if victim.ready:
            ops += self._erase(victim)
        self._flash.submit(ops)

    def _erased(self, op: Op) -> None:
        block, plane = op.block, op.block.plane
        del self._under_way[block]
        self._ftl.erased(block)
        ops: list[Op] = []
        waiting = self._waiting.get(plane)
        while waiting and not self._ftl.stopped(plane):
            act, about = waiting.popleft()
            act(*about, ops)
        if waiting is not None and not waiting:
            self._waiting.pop(plane, None)
        if not self._ftl.gc_when_filled or self._ftl.stopped(plane):
            self.clean(plane, ops)
        self._flash.submit(ops)
