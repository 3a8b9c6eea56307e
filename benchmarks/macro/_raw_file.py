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

    def go(self, read=0, written=0):
        """Read and write so many bytes, both spread over the whole time."""
        pieces = [*pieces_of("read", read), *pieces_of("write", written)]
        moving = [None] * DEPTH
        for number, (_, op, start, nbytes) in enumerate(sorted(pieces)):
            if moving[number % DEPTH] is not None:
                moving[number % DEPTH].wait()
            block = self._blocks[number % DEPTH]
            moving[number % DEPTH] = shared_engine().submit(
                Request(
                    op=op,
                    file=self._file,
                    offset_bytes=start % LENGTH,
                    address=block.address,
                    nbytes=nbytes,
                    keep_alive=block,
                    priority=Priority.PREFETCH,
                )
            )
        for each in moving:
            if each is not None:
                each.wait()


def pieces_of(op, total):
    """Share of all that is behind each piece, the word, where it begins, and its bytes."""
    return [
        (start / total, op, start, min(PIECE, total - start)) for start in range(0, total, PIECE)
    ]
