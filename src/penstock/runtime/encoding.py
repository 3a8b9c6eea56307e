"""Encoding stage in front of a mover: storages are encoded on the way out and decoded on the way back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from penstock.codec import registry
from penstock.codec.base import ITEMSIZE, Codec
from penstock.core.errors import ConfigError
from penstock.core.locks import defer
from penstock.io.engine import Priority, Transfer
from penstock.io.mapping import memory_at
from penstock.observe.recorder import Recorder
from penstock.runtime.movers import CpuMover, Mover, Transport
from penstock.runtime.storage import Encoding
from penstock.store.account import Account
from penstock.store.base import Ticket, Tier, Window
from penstock.store.frames import FrameCoder, FrameJob, Frames, FrameScratch, FrameWorker, Slot

SLOTS: Final = 8
WORKING_SLOTS: Final = 2


class StorageCoder(FrameCoder, Protocol):
    """Codecs on the storages of one kind of device."""

    def accepts(self, codec: str) -> bool:
        """Return True if the codec can work with memory of this device."""

    def fits(self, codec: Codec, dtype: str, piece_bytes: int) -> bool:
        """Return True if a slot, and the memory beside the slots, suffice for a piece."""

    def begin(self, worker: FrameWorker, job: FrameJob) -> None:
        """Submit a write to the worker as soon as its source is complete. Returns at once."""


class EncodingStage(Transport):
    """Writes storages as frames of a codec, or through the mover as they are. Thread-safe.

    Memory for what comes back, and the order of uses, stay with the mover.

    Attributes:
        inner: The mover behind this stage.
        coder: How its storages are encoded.
    """

    def __init__(
        self,
        inner: Mover,
        coder: StorageCoder,
        scratch: FrameScratch,
        recorder: Recorder,
        adopt_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Stand in front of ``inner``, which is closed with the stage, as is ``scratch``."""
        self.inner = inner
        self.coder = coder
        self._recorder = recorder
        self._scratch = scratch
        self._worker = FrameWorker(coder, scratch, recorder, adopt_thread)
        # A stage that is dropped without close must not leave its thread behind.
        weakref.finalize(self, defer, self._worker.stop).atexit = False

    def write(
        self,
        storage: torch.UntypedStorage,
        tier: Tier,
        label: str,
        encoding: Encoding | None = None,
    ) -> Any:
        """Begin to spill; with an ``encoding``, to encode and spill. Waits for nothing.

        The source must not change until ``written`` settles. Room in the tier is found piece by piece,
        so that with an encoding NoSpaceError comes by ``written``, with nothing left behind. A
        ``written`` that is cancelled when something of it has begun settles as cancelled soon.

        What cannot be encoded here goes as it is, and is counted: a storage that does not begin where
        its elements could, or by a codec without a form for the device.

        Raises:
            NoSpaceError: Without an encoding, as for the mover.
            ConfigError: There is no such codec, it does not accept the type, or it needs more scratch.
            HookError: A CUDA graph is being captured.
            ClosedError: The mover or the tier is closed, or this is a forked process.
        """
        nbytes = storage.nbytes()
        if encoding is None or not nbytes:
            return self.inner.write(storage, tier, label)
        if not self.coder.accepts(encoding.codec):
            self._recorder.count("encoded.no_device_form")
            return self.inner.write(storage, tier, label)
        codec = registry.get(encoding.codec)
        piece_bytes = self._piece_bytes(codec, encoding.dtype)
        if storage.data_ptr() % ITEMSIZE[encoding.dtype]:
            self._recorder.count("encoded.misaligned")
            return self.inner.write(storage, tier, label)
        window = Window(storage.data_ptr(), nbytes, 0)
        frames = Frames(label, nbytes, window, *encoding, piece_bytes, storage.device)
        self.coder.begin(self._worker, self._worker.write_job(frames, tier, storage))
        return frames

    def _piece_bytes(self, codec: Codec, dtype: str) -> int:
        found = self._scratch.piece_bytes(lambda nbytes: self.coder.fits(codec, dtype, nbytes))
        if not found:
            raise ConfigError(
                f"codec {codec.name} cannot encode a page of {dtype} in slots of"
                f" {self._scratch.slot_bytes} bytes and {self._scratch.working_bytes} bytes beside"
                " them; give more scratch memory"
            )
        return found

    def read(self, tier: Tier, ticket: Any, target: Any, priority: Priority) -> Transfer:
        """Begin to read, and to decode what was encoded.

        The transfer fails as the mover's does, with CodecError if a frame is damaged, and with
        CancelledError if the ticket is discarded meanwhile. Of what was encoded it settles when the
        target is filled, and nothing touches it any more.

        Raises:
            ConfigError: ``ticket.written`` has not settled without an error, or it was discarded.
            ClosedError: The mover is closed, or this is a forked process.
        """
        if isinstance(ticket, Frames):
            return self._worker.read(ticket, tier, target, priority)
        return self.inner.read(tier, ticket, target, priority)

    def discard(self, tier: Tier, ticket: Any) -> None:
        """Discard the bytes. Transfers of frames under way end as cancelled. Idempotent."""
        if isinstance(ticket, Frames):
            self._worker.discard(tier, ticket)
        else:
            self.inner.discard(tier, ticket)

    def drain(self) -> None:
        """Wait until all that was begun is encoded, decoded and copied."""
        self.inner.drain()  # whose fences hand storages to the worker
        self._worker.drain()
        self.inner.drain()

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, and close the mover. Idempotent.

        Never call it in a done callback of a transfer: that transfer has not ended yet.
        """
        self._worker.close()
        self.inner.close()


class HostCoder:
    """Codecs on storages of host memory, between slots that a tier writes and reads itself.

    What comes back has the same place in a cache line as the storage had.
    """

    def __init__(self, scratch: FrameScratch) -> None:
        """Give the slots of ``scratch`` their memory."""
        self._slot_bytes, self._working_bytes = scratch.slot_bytes, scratch.working_bytes
        scratch.map_slots()

    def accepts(self, codec: str) -> bool:
        """Return True: every codec can."""
        return True

    def fits(self, codec: Codec, dtype: str, piece_bytes: int) -> bool:
        """Compare what the codec says beforehand."""
        spec = codec.spec(dtype, piece_bytes)
        return spec.bound_bytes <= self._slot_bytes and spec.scratch_bytes <= self._working_bytes

    def begin(self, worker: FrameWorker, job: FrameJob) -> None:
        """Submit at once: host memory is complete."""
        worker.submit(job)

    def encode_piece(self, job: FrameJob, index: int, slot: Slot) -> int:
        """Encode to the slot's memory."""
        frames = job.frames
        start, nbytes = frames.range_of(index)
        source = memory_at(frames.window.address + start, nbytes)
        return registry.get(frames.codec).encode(source, slot.memory, dtype=frames.dtype)

    def write_frame(self, job: FrameJob, slot: Slot, frame_bytes: int) -> Ticket:
        """Write from the slot's memory."""
        address = slot.memory.ctypes.data
        return job.tier.write(address, frame_bytes, keep_alive=slot, label=job.frames.label)

    def read_frame(self, job: FrameJob, index: int, slot: Slot, priority: Priority) -> Transfer:
        """Read to the slot's memory."""
        part, address = job.frames.parts[index], slot.memory.ctypes.data
        return job.tier.read(part, address, keep_alive=slot, priority=priority)

    def decode_piece(self, job: FrameJob, index: int, slot: Slot) -> None:
        """Decode to the piece's place in the block."""
        frames, part, target = job.frames, job.frames.parts[index], job.memory
        start, nbytes = frames.range_of(index)
        frame = slot.memory[part.window.skew : part.window.skew + part.nbytes]
        memory = memory_at(target.block.address + target.skew + start, nbytes)
        registry.get(frames.codec).decode(frame, memory, dtype=frames.dtype)

    def discard_frame(self, tier: Tier, part: Ticket) -> None:
        """Discard the bytes on the tier."""
        tier.discard(part)


def open_host_stage(
    inner: CpuMover, *, scratch_bytes: int, budget: Account, recorder: Recorder
) -> EncodingStage:
    """Open a stage for storages of host memory.

    Args:
        inner: Moves what is not encoded, and has the memory for what comes back.
        scratch_bytes: What encoding and decoding work in: taken from ``budget`` now, freed by ``close``.
            A piece is a tenth of it, at most. See [Note: scratch].
        budget: The device's.
        recorder: Gets a span for each piece, and counters.

    Raises:
        ConfigError: ``scratch_bytes`` is less than 80 KiB.
        BudgetError: The budget has not so much left.
    """
    scratch = FrameScratch(scratch_bytes, budget, slots=SLOTS, working=WORKING_SLOTS)
    return EncodingStage(inner, HostCoder(scratch), scratch, recorder)
