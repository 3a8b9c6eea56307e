"""Encoding of storages on the CUDA device, before the copy to host memory, and decoding after it.

[Note: encoding on the device]
    FlashNeuron (FAST 2021) compresses on the GPU what it offloads, in the order of the compute stream.
    Here it is done on a stream of its own, by a thread of its own (the worker of
    :mod:`penstock.store.frames`), because the length of a frame depends on the data, and somebody has to
    wait for that:

    - Neither the thread that trains nor its stream may: the host runs ahead by many kernels, and a wait
      in ``pack`` would end that at each tensor. Nor is the longest possible frame copied instead: then
      the copy, which is what should become shorter, would not.
    - So ``write`` records events behind all that works with the storage, as ever, and returns. When the
      host has seen them (a *fence*: the thread of a lane waits), the worker encodes piece by piece. It
      waits for the end of each piece, since it needs the length, and hands the frame to the ordinary
      mover, which copies it behind that. By then the network is some microseconds ahead, no more.
    - The source is held until the last frame has been copied, so that no kernel reads freed memory. A
      frame is held by the ordinary mover until the host has seen the end of its copy (rule 2 of [Note:
      streams]). Its memory is allocated, and freed, on the worker's stream.
    - Back: a target is allocated by the thread that asks, as ever. Its frames are read to memory of the
      worker's stream, which waits for each copy (rule 5) and for what used the target's memory before
      (rule 4), and decodes. That fills the target by kernels, so a stream that uses it waits for an event
      behind them, as for recomputed storages (rule 7). Checks of a frame depend on the data, too, so the
      worker waits for each piece before it says that the target is filled, or what is wrong with a
      frame. So the event has been reached long before, and nothing touches a target that is given up.

    Memory: frames, and what codecs allocate, are charged to the device's budget once, when the stage is
    opened, because encoding makes room and must not need any; torch allocates it as it is needed. Where
    the device itself has not so much left, a piece goes as it is: its part of the source is copied
    without a frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from penstock.codec.base import Codec
from penstock.codec.device import FORMS
from penstock.codec.device.base import decode_tensor, encode_tensor, scratch_bytes
from penstock.core.errors import ClosedError
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda.codec_speeds import CodecSpeeds
from penstock.runtime.cuda.link import CudaLink, Stream
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.tickets import CudaTicket, Fill
from penstock.runtime.encoding import EncodingStage
from penstock.staging import bytes_of
from penstock.store.account import Account
from penstock.store.base import Tier
from penstock.store.frames import FrameJob, Frames, FrameScratch, FrameWorker, Slot

_SLOTS: Final = 4
"""Frames at once: two that are made and copied out, the rest for those that come back."""


class DeviceCoder:
    """Codecs on storages of CUDA devices, on a stream of its own for each.

    A slot holds a frame that was made until the mover has it, or the target that a frame is read to.
    """

    def __init__(
        self, inner: CudaMover, link: CudaLink, scratch: FrameScratch, speeds: CodecSpeeds
    ) -> None:
        self.inner = inner
        self._speeds = speeds
        self.link = link
        self._frames = scratch.frames
        self._slot_bytes, self._working_bytes = scratch.slot_bytes, scratch.working_bytes
        self._streams: dict[torch.device, Stream] = {}

    def accepts(self, codec: str) -> bool:
        """Return True if the codec has a form for devices."""
        return codec in FORMS

    def fits(self, codec: Codec, dtype: str, piece_bytes: int) -> bool:
        """Compare what the codec's form takes, as torch counts it."""
        most = scratch_bytes(codec.name, dtype, piece_bytes, self.inner.device)
        bound = codec.spec(dtype, piece_bytes).bound_bytes
        return bound <= self._slot_bytes and most <= self._working_bytes

    def begin(self, worker: FrameWorker, job: FrameJob) -> None:
        """Submit once everything that works with the source has ended."""
        self.inner.fence(job.memory, job.frames.label, partial(_complete, worker, job))

    def encode_piece(self, job: FrameJob, index: int, slot: Slot) -> int:
        """Encode on the device; where it has no memory for that, the piece goes as it is."""
        frames, storage = job.frames, job.memory
        assert storage is not None, "a source was dropped before its end"
        start, nbytes = frames.range_of(index)
        try:
            with self._waiting(frames, nbytes, decoding=False):
                source = bytes_of(storage)[start : start + nbytes]
                frame = encode_tensor(frames.codec, source, frames.dtype)
                slot.held = frame.untyped_storage()
        except torch.OutOfMemoryError:
            frames.raw.add(index)
            slot.held = storage[start : start + nbytes]  # which holds the whole
        return int(slot.held.nbytes())

    def write_frame(self, job: FrameJob, slot: Slot, frame_bytes: int) -> CudaTicket:
        """Begin to copy a frame, and to write it; the inner mover holds it from here on."""
        storage, slot.held = slot.held, None
        with self.link.within(self._stream(job.frames.device)):  # and no other has used it
            return self.inner.write(storage, job.tier, job.frames.label)

    def read_frame(self, job: FrameJob, index: int, slot: Slot, priority: Priority) -> Transfer:
        """Begin to read a frame to memory of the worker's stream."""
        part = job.frames.parts[index]
        with self.link.within(self._stream(job.frames.device)):
            target = self.inner.allocate(part, force=True, budget=self._frames)
        assert target is not None, "memory was forced"
        slot.held = target
        return self.inner.read(job.tier, part, target, priority)

    def decode_piece(self, job: FrameJob, index: int, slot: Slot) -> None:
        """Decode on the device, when the target's memory is free."""
        frames, target, link = job.frames, job.memory, self.link
        start, nbytes = frames.range_of(index)
        stream = self._stream(frames.device)
        frame = self.inner.finish(slot.held)
        with link.within(stream):
            self.inner.use(frame)
            link.wait(stream, target.ready)
            here = link.record(stream)
        link.synchronize(here)  # or the codec's time would include what it waits for
        with self._waiting(frames, nbytes, decoding=True):
            decoded = bytes_of(frame)
            if index not in frames.raw:
                decoded = decode_tensor(
                    decoded, nbytes, codec_name=frames.codec, dtype=frames.dtype
                )
            bytes_of(target.storage)[start : start + nbytes].copy_(decoded)
            target.fill = Fill(stream, made=link.record(stream))

    def discard_frame(self, tier: Tier, part: Any) -> None:
        """Give up a frame that the inner mover has."""
        self.inner.discard(tier, part)

    def _stream(self, device: torch.device) -> Stream:
        """Return the stream that the worker uses on a device. In the worker only."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self.link.copy_stream(device)
        return stream

    @contextmanager
    def _waiting(self, frames: Frames, nbytes: int, *, decoding: bool) -> Iterator[None]:
        """Within, operators run on the worker's stream; wait for them at the end, however it comes.

        The time that a piece takes is counted.
        """
        link, stream = self.link, self._stream(frames.device)
        timed = self._speeds.timed(frames.codec, frames.dtype, nbytes, decoding=decoding)
        with timed, link.within(stream):
            try:
                yield
            finally:
                link.synchronize(link.record(stream))


def _complete(worker: FrameWorker, job: FrameJob, error: BaseException | None) -> None:
    """In the thread of a lane: the source is complete, or nobody knows."""
    try:
        if error is None and not job.frames.discarded:
            worker.submit(job)
            return
    except ClosedError as closed:
        error = closed
    worker.withdraw(job, error)


def open_device_stage(
    inner: CudaMover,
    *,
    link: CudaLink,
    scratch_bytes: int,
    budget: Account,
    recorder: Recorder,
    speeds: CodecSpeeds,
) -> EncodingStage:
    """Open a stage for storages of CUDA devices. See [Note: encoding on the device].

    Args:
        inner: Moves frames, and what is not encoded.
        link: To the devices, as ``inner`` has it.
        scratch_bytes: What encoding and decoding work in: taken from ``budget`` now, freed by ``close``.
            A piece is an eighth of it, at most.
        budget: The device's.
        recorder: Gets a span for each piece, and counters.
        speeds: Gets the time of each piece.

    Raises:
        ConfigError: ``scratch_bytes`` is less than 64 KiB.
        BudgetError: The budget has not so much left.
    """
    scratch = FrameScratch(scratch_bytes, budget, slots=_SLOTS, working=_SLOTS)
    coder = DeviceCoder(inner, link, scratch, speeds)
    return EncodingStage(inner, coder, scratch, recorder, partial(link.adopt_thread, inner.device))
