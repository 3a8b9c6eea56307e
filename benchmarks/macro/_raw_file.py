"""Bytes that are moved, and nothing else: through Penstock's engine as fast as the disk allows, or by
system calls beside what is measured."""

import json
import mmap
import os
import subprocess
import sys
import time

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


class Mover:
    """A process that does nothing but read and write a file, by system calls, evenly over a time."""

    def __init__(self, directory):
        self._process = subprocess.Popen(
            [sys.executable, __file__, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.wait()

    def begin(self, read, written, over_s):
        """Move so many bytes, the last of them after about so many seconds."""
        self._process.stdin.write(json.dumps([read, written, over_s]) + "\n")
        self._process.stdin.flush()

    def wait(self):
        """Wait until that is done."""
        if not self._process.stdout.readline():
            sys.exit("the process that moves bytes has ended; what it said is above")

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def serve_moves(directory):
    """Move what each line of stdin says; tell when that is done."""
    fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT)
    memory = [mmap.mmap(-1, PIECE) for _ in range(DEPTH)]
    for number, start in enumerate(range(0, LENGTH, PIECE)):
        os.pwritev(fd, [memory[number % DEPTH]], start)
    print(flush=True)
    for line in sys.stdin:
        read, written, over_s = json.loads(line)
        begun = time.perf_counter()
        pieces = sorted([*pieces_of("read", read), *pieces_of("write", written)])
        for number, (share, op, start, _) in enumerate(pieces):
            time.sleep(max(0, begun + share * over_s - time.perf_counter()))
            move = os.preadv if op == "read" else os.pwritev
            move(fd, [memory[number % DEPTH]], start % LENGTH)
        print(flush=True)


if __name__ == "__main__":
    serve_moves(sys.argv[1])
