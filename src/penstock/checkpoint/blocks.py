"""A file whose header is known last: its blocks fill as bytes come, and the first of them waits."""

from __future__ import annotations

import ctypes

from penstock.checkpoint.encoded import EncodedBody
from penstock.checkpoint.manifest import FileEntry
from penstock.checkpoint.streams import BlockWrites, digest
from penstock.io.files import DirectFile
from penstock.store.pool import Block


class Blocks:
    """Blocks of a file that fill as bytes come. The first is kept until the header is known.

    Attributes:
        nbytes: How long the file is so far.
        differs: Whether a block is not as in the base.
    """

    def __init__(
        self,
        out: BlockWrites,
        block_bytes: int,
        header_bytes: int,
        file: DirectFile | None,
        base: FileEntry | None,
    ) -> None:
        """Begin behind the header.

        Args:
            out: Takes blocks to the device.
            block_bytes: How long they are.
            header_bytes: How long the header is.
            file: Where they go; None: nowhere, they are compared.
            base: What they are compared with.
        """
        self.nbytes = header_bytes
        self.differs = False
        self._out = out
        self._size = block_bytes
        self._first = header_bytes // block_bytes
        self._file = file
        self._known = () if base is None else base.sums
        self._sums: dict[int, str] = {}
        self._block: Block | None = None
        self._kept: Block | None = None

    def put(self, address: int, nbytes: int) -> None:
        """Add bytes. Raises TransferError."""
        while nbytes:
            if self._block is None:
                self._block = self._out.room()
            at = self.nbytes % self._size
            count = min(nbytes, self._size - at)
            ctypes.memmove(self._block.address + at, address, count)
            self.nbytes += count
            address += count
            nbytes -= count
            if self.nbytes % self._size == 0:
                self._close()

    def end(self, header: bytes) -> tuple[str, ...]:
        """The checksums of all blocks; those with the header are the last to be written."""
        if self._block is not None:
            self._close()
        for index, begin in enumerate(range(0, len(header), self._size)):
            part = header[begin : begin + self._size]
            block = None
            if index == self._first:
                block, self._kept = self._kept, None
            if block is None:
                block = self._out.room()
            ctypes.memmove(block.address, part, len(part))
            self._send(index, block)
        block, self._kept = self._kept, None
        if block is not None:  # the header ends where a block does
            self._send(self._first, block)
        return tuple(self._sums[index] for index in range(len(self._sums)))

    def give_back(self) -> None:
        """Free the buffer of a block that was not sent."""
        for block in (self._block, self._kept):
            if block is not None:
                self._out.give(block)
        self._block = self._kept = None

    def _close(self) -> None:
        block, self._block = self._block, None
        assert block is not None
        index = (self.nbytes - 1) // self._size
        if index == self._first:
            self._kept = block
        else:
            self._send(index, block)

    def _send(self, index: int, block: Block) -> None:
        begin = index * self._size
        nbytes = min(self._size, self.nbytes - begin)
        found = self._sums[index] = digest(block.address, nbytes)
        if self._file is not None:
            self._out.send(self._file, begin, nbytes, block)
            return
        self._out.give(block)
        self.differs |= index >= len(self._known) or self._known[index] != found


def agrees(body: EncodedBody, out: BlockWrites, block_bytes: int, known: FileEntry) -> bool:
    """Return whether a file with encoded tensors is known, by its checksums; nothing is written.

    Args:
        body: What is in it.
        out: Has blocks; nothing is sent.
        block_bytes: How long they are.
        known: The file.
    """
    blocks = Blocks(out, block_bytes, body.header_bytes, None, known)
    try:
        for span in body.spans():
            blocks.put(span.address, span.nbytes)
            if blocks.differs:
                return False
        sums = blocks.end(body.header())
    finally:
        blocks.give_back()
    return (blocks.nbytes, sums) == (known.nbytes, known.sums)
