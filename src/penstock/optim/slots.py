"""Slot of each tile's newest record. It outlives the buffers that records pass through."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.optim.layout import Tile


class RecordSlots:
    """Which tiles have a record, and in which of its places on flash the newest one is.

    The lock of the pipeline that fills them guards it.

    Attributes:
        filled: Numbers of the tiles that have a record, on flash or in memory.
        newest: By number of a tile, the slot of the newest record on flash.
    """

    def __init__(self) -> None:
        """No tile has a record."""
        self.filled: set[int] = set()
        self.newest: dict[int, int] = {}
        self._committed: dict[int, int] = {}  # the ones that a journal knows

    def of(self, tile: Tile) -> int:
        """The slot to read a tile from."""
        return self.newest.get(tile.index, 0)

    def not_committed(self, tile: Tile) -> int:
        """Of two slots, the one to write a tile to."""
        return 1 - self._committed.get(tile.index, 1)

    def commit(self) -> None:
        """Take the last writes as committed to a journal, so that the next do not overwrite them."""
        self._committed = dict(self.newest)

    def keep(self, slots: Mapping[int, int]) -> None:
        """Protect records that a journal knows, though nobody reads them, from the next writes."""
        self._committed = dict(slots)

    def restore(self, slots: Mapping[int, int]) -> None:
        """Restore from a journal which tiles have a record, and in which slot."""
        self.newest, self._committed = dict(slots), dict(slots)
        self.filled = set(slots)
