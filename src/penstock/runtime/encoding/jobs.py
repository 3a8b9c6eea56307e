"""One storage on its way out or back, piece by piece; what the worker does for each piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from penstock.codec.base import Codec
from penstock.core.errors import CodecError
from penstock.io.engine import Priority, Transfer
from penstock.io.mapping import memory_at
from penstock.observe.recorder import Recorder, Stage
from penstock.runtime.encoding.scratch import Slot
from penstock.runtime.storage import Encoding
from penstock.store.base import Ticket, Tier, Window


@dataclass(slots=True, eq=False)
class EncodedTicket:
    """A claim on the frames of a storage that a tier holds. Fields are for reading only."""

    label: str
    """Name of the storage in errors and traces."""
    nbytes: int
    """Length of the storage."""
    window: Window
    """Memory of the storage: ``CpuMover.allocate`` asks for its place in a cache line."""
    encoding: Encoding
    piece_bytes: int
    """How much of the storage is in each frame but the last; whole pages."""
    written: Transfer
    """Settled once all frames are written; or with the first error, when nothing of it moves any more."""
    device: torch.device
    """The storage's."""
    parts: list[Ticket] = field(default_factory=list)
    """The tier's own tickets, frame by frame; grows until it is written."""
    frame_bytes: int = 0
    """Length of the frames together; grows until it is written."""
    raw: set[int] = field(default_factory=set)
    """Pieces of a device's that went as they were, for want of memory to encode them in."""
    discarded: bool = False

    @property
    def source_bytes(self) -> int:
        """Length of what is encoded, to compare ``frame_bytes`` with."""
        return self.nbytes

    @property
    def pieces(self) -> int:
        """How many frames there are, or will be."""
        return -(-self.nbytes // self.piece_bytes)

    def range_of(self, index: int) -> tuple[int, int]:
        """Return a piece's offset in the storage, and its length."""
        start = index * self.piece_bytes
        return start, min(self.piece_bytes, self.nbytes - start)


class CodecJob(ABC):
    """Base of jobs in both directions. Fields are guarded by the worker's lock."""

    def __init__(self, ticket: EncodedTicket, tier: Tier, codec: Codec, transfer: Transfer) -> None:
        self.ticket = ticket
        self.tier = tier
        self.codec = codec
        self.transfer = transfer
        self.begun = 0
        """Pieces that were taken up."""
        self.pending = 0
        """Those of them that have not ended; each has a slot."""
        self.error: BaseException | None = None
        """The first one. From then on no piece is taken up."""
        self.over = False
        """True if somebody settles it, or has."""

    @property
    def waits(self) -> bool:
        """Return whether there are pieces to take up."""
        return self.error is None and self.begun < self.ticket.pieces

    def take_up(self) -> int:
        """The index of the next piece, which is pending from now on."""
        self.begun += 1
        self.pending += 1
        return self.begun - 1

    def end(self) -> bool:
        """Return whether the caller is the one to settle it: nothing is pending, and nothing will be."""
        if self.over or self.pending or self.waits:
            return False
        self.over = True
        return True

    def _account(self, recorder: Recorder, stage: Stage, start_ns: int, nbytes: int) -> None:
        now_ns = recorder.clock.now_ns()
        tier, slot = self.tier.spec.name, self.ticket.label
        recorder.span(stage, start_ns, now_ns, nbytes=nbytes, tier=tier, slot=slot)

    @abstractmethod
    def withdrawals(self) -> list[Callable[[], object]]:
        """Return what to call, without the lock, when it has failed and again when it has ended."""

    @abstractmethod
    def let_go(self) -> None:
        """Drop the memory that it moves from or to."""


class WriteJob(CodecJob):
    """A storage that is encoded and written. It holds the storage until all has ended."""

    def __init__(
        self,
        ticket: EncodedTicket,
        tier: Tier,
        codec: Codec,
        storage: torch.UntypedStorage,
    ) -> None:
        """Begin nothing yet."""
        super().__init__(ticket, tier, codec, ticket.written)
        self._storage: torch.UntypedStorage | None = storage

    def encode(self, index: int, slot: Slot, recorder: Recorder) -> int:
        """Encode a piece to a frame in ``slot``; its length. In the worker, without the lock."""
        _, nbytes = self.ticket.range_of(index)
        start_ns = recorder.clock.now_ns()
        frame_bytes = self._encode_piece(index, slot)
        self._account(recorder, Stage.ENCODE, start_ns, nbytes)
        recorder.count(f"encoded.source_bytes.{self.codec.name}", nbytes)
        recorder.count(f"encoded.frame_bytes.{self.codec.name}", frame_bytes)
        return frame_bytes

    def _encode_piece(self, index: int, slot: Slot) -> int:
        ticket = self.ticket
        start, nbytes = ticket.range_of(index)
        source = memory_at(ticket.window.address + start, nbytes)
        return self.codec.encode(source, slot.memory, dtype=ticket.encoding.dtype)

    def write(self, slot: Slot, frame_bytes: int) -> Ticket:
        """Begin to write a frame. In the worker, without the lock."""
        label = self.ticket.label
        return self.tier.write(slot.address, frame_bytes, keep_alive=slot, label=label)

    def withdrawals(self) -> list[Callable[[], object]]:
        """Discard what was, or is being, written."""
        return [partial(self.discard, part) for part in self.ticket.parts]

    def discard(self, part: Ticket) -> None:
        """Give up a frame that was handed to the tier."""
        self.tier.discard(part)

    def let_go(self) -> None:
        """Drop the source."""
        self._storage = None


class ReadJob(CodecJob):
    """A storage that is read and decoded. It holds the target until all has ended."""

    def __init__(
        self,
        ticket: EncodedTicket,
        tier: Tier,
        codec: Codec,
        target: Any,
        *,
        priority: Priority,
        transfer: Transfer,
    ) -> None:
        """Begin nothing yet."""
        super().__init__(ticket, tier, codec, transfer)
        self.priority = priority
        self.moving: set[Transfer] = set()
        """The tier's own, of frames on their way."""
        self.arrived: deque[tuple[int, Slot]] = deque()
        """Frames to decode: of which piece, and where."""
        self._target: Any = target

    def read(self, index: int, slot: Slot, priority: Priority) -> Transfer:
        """Begin to read a frame. In the worker, without the lock."""
        part = self.ticket.parts[index]
        return self.tier.read(part, slot.address, keep_alive=slot, priority=priority)

    def decode(self, index: int, slot: Slot, recorder: Recorder) -> None:
        """Decode a frame to its place in the target. In the worker, without the lock."""
        ticket = self.ticket
        start_ns = recorder.clock.now_ns()
        try:
            self._decode_piece(index, slot)
        except CodecError as error:
            problem = str(error)
        else:
            _, nbytes = ticket.range_of(index)
            self._account(recorder, Stage.DECODE, start_ns, nbytes)
            return
        raise CodecError(  # not within: the first one's frames hold the slot
            f"{ticket.label}: piece {index} of {ticket.pieces}, as read from tier"
            f" {self.tier.spec.name} ({self.tier.spec.where}), does not decode: {problem}; the device"
            " or its memory is faulty, stop using it"
        )

    def _decode_piece(self, index: int, slot: Slot) -> None:
        ticket, part, target = self.ticket, self.ticket.parts[index], self._target
        start, nbytes = ticket.range_of(index)
        frame = slot.memory[part.window.skew : part.window.skew + part.nbytes]
        memory = memory_at(target.block.address + target.skew + start, nbytes)
        self.codec.decode(frame, memory, dtype=ticket.encoding.dtype)

    def withdrawals(self) -> list[Callable[[], object]]:
        """Cancel what has not begun."""
        return [transfer.cancel for transfer in self.moving]

    def let_go(self) -> None:
        """Drop the target."""
        self._target = None
