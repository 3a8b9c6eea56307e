"""A file that is read and written through Penstock's engine, and nothing else: what the disk allows."""

from penstock.core.units import GIB, MIB
from penstock.io.engine import Priority, Request
from penstock.io.files import open_unlinked
from penstock.store.arena import Arena
from penstock.store.engine import shared_engine

LENGTH = 4 * GIB
PIECE = 16 * MIB
DEPTH = 8


class RawFile:
    """A file without a name, over which transfers go again and again."""

    def __init__(self, directory):
        self._file, self._arena = open_unlinked(directory), Arena(DEPTH * PIECE)
        self._file.preallocate(LENGTH)
        self._blocks = [self._arena.allocate(PIECE) for _ in range(DEPTH)]

    def go(self, op, total):
        """Read or write so many bytes; ``op`` is the word."""
        moving = [None] * DEPTH
        for number, start in enumerate(range(0, total, PIECE)):
            if moving[number % DEPTH] is not None:
                moving[number % DEPTH].wait()
            block = self._blocks[number % DEPTH]
            moving[number % DEPTH] = shared_engine().submit(
                Request(
                    op=op,
                    file=self._file,
                    offset_bytes=start % LENGTH,
                    address=block.address,
                    nbytes=min(PIECE, total - start),
                    keep_alive=block,
                    priority=Priority.PREFETCH,
                )
            )
        for each in moving:
            if each is not None:
                each.wait()
