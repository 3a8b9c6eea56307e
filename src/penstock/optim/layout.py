"""Which parameters' elements lie in which tile.

Each parameter is laid flat, in the order in which its elements lie in memory, and the parameters of
one kind (group, dtype, form) are laid end to end, each beginning at a multiple of ``UNIT``. That line
is cut into tiles of equal length, wherever the borders of the parameters are. A tile's states are one
record on flash: one sequential transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.core.units import round_up
from penstock.optim.formats import UNIT, Array, Form


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """A range of one parameter's elements, in a tile."""

    param: int
    """Number of the parameter in the optimizer."""
    start: int
    stop: int
    """Elements of the parameter, laid flat."""
    at: int
    """Offset in the tile; this and ``start`` are multiples of ``UNIT``."""

    def cut(self, elements: int) -> Iterator[ParameterPiece]:
        """Itself in parts of at most so many elements, a multiple of ``UNIT``."""
        for start in range(self.start, self.stop, elements):
            stop = min(start + elements, self.stop)
            yield ParameterPiece(self.param, start, stop, self.at + start - self.start)


@dataclass(frozen=True, slots=True)
class Tile:
    """Elements that are read, updated and written together."""

    index: int
    group: int
    form: Form
    elements: int
    pieces: tuple[ParameterPiece, ...]
    arrays: tuple[Array, ...]
    record_bytes: int


def make_tiles(
    params: Sequence[tuple[int, int]], form: Form, *, group: int, first: int, elements: int
) -> list[Tile]:
    """Lay parameters of one kind into tiles.

    Args:
        params: Number and element count of each.
        form: Of their records.
        group: Number of their group.
        first: Number of the first tile.
        elements: Of a tile, a multiple of ``UNIT``; the last one is as long as it needs to be.
    """
    pieces: list[list[ParameterPiece]] = []
    length = 0
    for param, count in params:
        start = 0
        while start < count:
            index, at = divmod(length, elements)
            if index == len(pieces):
                pieces.append([])
            stop = min(count, start + elements - at)
            pieces[index].append(ParameterPiece(param, start, stop, at))
            length += round_up(stop - start, UNIT)
            start = stop
    tiles = []
    for index, mine in enumerate(pieces):
        size = min(elements, length - index * elements)
        arrays = form.arrays(size)
        record = form.record_bytes(size)
        tiles.append(Tile(first + index, group, form, size, tuple(mine), arrays, record))
    return tiles
