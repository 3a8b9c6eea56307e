"""Encoding of storages on the CUDA device, before the copy to host memory, and decoding after it.

[Note: encoding on the device]
    FlashNeuron (FAST 2021) compresses on the GPU what it offloads, in the order of the compute stream.
    Here it is done on a stream of its own, by a thread of its own (the worker of
    :mod:`penstock.runtime.encoding.worker`), for how long a frame is depends on the data, and somebody
    has to wait for that:

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

    Memory: frames, and what codecs allocate, are charged to the device's budget once, when the mover is
    made (:class:`DeviceScratch`), because encoding makes room and must not need any. Where the device
    itself has not so much left, a piece goes as it is: its part of the source is copied without a frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from penstock.codec.base import Codec
from penstock.codec.device import FORMS
from penstock.codec.device.base import decode_tensor, encode_tensor, scratch_bytes
from penstock.core.errors import ClosedError
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda.link import CudaLink, Stream
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.tickets import CudaTarget, Fill
from penstock.runtime.encoding.jobs import EncodedTicket, ReadJob, WriteJob
from penstock.runtime.encoding.scratch import ScratchSlots
from penstock.runtime.encoding.stage import EncodingStage
from penstock.staging import bytes_of
from penstock.store.account import Account
from penstock.store.base import Tier

_SLOTS: Final = 4
"""Frames at once: two that are made and copied out, the rest for those that come back."""
_PARTS: Final = 8
"""Slots, and what codecs may allocate, in slots: theirs is half of everything."""


@dataclass(slots=True, eq=False)
class FrameSlot:
    """A claim on the memory of one frame."""

    encoding: bool = False
    storage: torch.UntypedStorage | None = None
    """A frame that was made, until it is handed to the mover."""
    target: CudaTarget | None = None
    """Memory that a frame is read to."""


class DeviceScratch(ScratchSlots):
    """Device memory for frames, and for what codecs allocate; charged, and left to torch to allocate.

    Attributes:
        frames: What memory for frames that come back is charged to: the slots, charged already.
    """

    def __init__(self, nbytes: int, budget: Account) -> None:
        """Take ``nbytes`` from ``budget``, at once.

        Raises:
            ConfigError: It is less than 64 KiB.
            BudgetError: The budget has not so much left.
        """
        super().__init__(nbytes, budget, slots=_SLOTS, parts=_PARTS)
        self.frames = Account(_SLOTS * self.slot_bytes, name="frames")
        self._free = [FrameSlot() for _ in range(_SLOTS)]

    def _charged_bytes(self) -> int:
        return _PARTS * self.slot_bytes

    def _fits(self, codec: Codec, dtype: str, piece: int) -> bool:
        bound = codec.spec(dtype, piece).bound_bytes
        return (
            bound <= self.slot_bytes
            and scratch_bytes(codec.name, dtype, piece) <= self.working_bytes
        )

    def release(self, slot: FrameSlot) -> None:
        """Nothing touches the slot's memory any more."""
        slot.storage = slot.target = None
        super().release(slot)


class _Side:
    """The ordinary mover, and the worker's stream on each device."""

    def __init__(self, inner: CudaMover, link: CudaLink, scratch: DeviceScratch) -> None:
        self.inner = inner
        self.scratch = scratch
        self.link = link
        self._streams: dict[torch.device, Stream] = {}

    def stream(self, device: torch.device) -> Stream:
        """Asked for by the worker only."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self.link.copy_stream(device)
        return stream

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Within, operators run on the worker's stream; wait for them at the end, however it comes."""
        link, stream = self.link, self.stream(device)
        with link.within(stream):
            try:
                yield
            finally:
                link.synchronize(link.record(stream))


class DeviceWriteJob(WriteJob):
    """As :class:`WriteJob`, for frames that are made on the device."""

    def __init__(
        self,
        ticket: EncodedTicket,
        tier: Tier,
        codec: Codec,
        storage: torch.UntypedStorage,
        side: _Side,
    ) -> None:
        """Begin nothing yet."""
        super().__init__(ticket, tier, codec, storage)
        self._side = side

    def _encode_piece(self, index: int, slot: Any) -> int:
        ticket, storage = self.ticket, self._storage
        assert storage is not None, "a source was dropped before its end"
        start, nbytes = ticket.range_of(index)
        try:
            with self._side.waiting(ticket.device):
                source = bytes_of(storage)[start : start + nbytes]
                frame = encode_tensor(self.codec.name, source, ticket.encoding.dtype)
                slot.storage = frame.untyped_storage()
        except torch.OutOfMemoryError:
            ticket.raw.add(index)
            slot.storage = storage[start : start + nbytes]  # which holds the whole
        return int(slot.storage.nbytes())

    def write(self, slot: Any, frame_bytes: int) -> Any:
        """Begin to copy a frame, and to write it; the inner mover holds it from here on."""
        ticket, side = self.ticket, self._side
        storage, slot.storage = slot.storage, None
        with side.link.within(side.stream(ticket.device)):  # and no other has used it
            return side.inner.write(storage, self.tier, ticket.label)

    def discard(self, part: Any) -> None:
        """Give up a frame that was handed to the inner mover."""
        self._side.inner.discard(self.tier, part)


class DeviceReadJob(ReadJob):
    """As :class:`ReadJob`, for frames that are decoded on the device."""

    def __init__(
        self,
        ticket: EncodedTicket,
        tier: Tier,
        codec: Codec,
        target: CudaTarget,
        *,
        priority: Priority,
        transfer: Transfer,
        side: _Side,
    ) -> None:
        """Begin nothing yet."""
        super().__init__(ticket, tier, codec, target, priority=priority, transfer=transfer)
        self._side = side

    def read(self, index: int, slot: Any, priority: Priority) -> Transfer:
        """Begin to read a frame to memory of the worker's stream."""
        ticket, side = self.ticket, self._side
        part: Any = ticket.parts[index]
        with side.link.within(side.stream(ticket.device)):
            target = side.inner.allocate(part, force=True, budget=side.scratch.frames)
        assert target is not None, "memory was forced"
        slot.target = target
        return side.inner.read(self.tier, part, target, priority)

    def _decode_piece(self, index: int, slot: Any) -> None:
        ticket, side, target = self.ticket, self._side, self._target
        start, nbytes = ticket.range_of(index)
        stream = side.stream(ticket.device)
        frame = side.inner.finish(slot.target)
        with side.link.within(stream):
            side.inner.use(frame)
            side.link.wait(stream, target.ready)
        with side.waiting(ticket.device):
            decoded = bytes_of(frame)
            if index not in ticket.raw:
                decoded = decode_tensor(
                    decoded, nbytes, codec_name=self.codec.name, dtype=ticket.encoding.dtype
                )
            bytes_of(target.storage)[start : start + nbytes].copy_(decoded)
            target.fill = Fill(stream, made=side.link.record(stream))


class DeviceEncodingStage(EncodingStage[CudaMover, CudaTarget]):
    """For storages of CUDA devices: frames are made on the device.

    See [Note: encoding on the device]. Thread-safe; ``write`` and ``read`` wait for nothing.
    """

    def __init__(
        self,
        inner: CudaMover,
        *,
        link: CudaLink,
        scratch_bytes: int,
        budget: Account,
        recorder: Recorder,
    ) -> None:
        """Stand in front of ``inner``, which is closed with the stage.

        Args:
            inner: Moves frames, and what is not encoded.
            link: To the devices, as ``inner`` has it.
            scratch_bytes: What encoding and decoding work in: taken from ``budget`` now, given back by
                ``close``. A piece is an eighth of it, at most.
            budget: The device's.
            recorder: Gets a span for each piece, and counters.

        Raises:
            ConfigError: ``scratch_bytes`` is less than 64 KiB.
            BudgetError: The budget has not so much left.
        """
        scratch = DeviceScratch(scratch_bytes, budget)
        super().__init__(inner, scratch, recorder, partial(link.adopt_thread, inner.device))
        self._side = _Side(inner, link, scratch)

    def _has_form(self, codec: str) -> bool:
        if codec not in FORMS:
            self._recorder.count("encoded.no_device_form")
            return False
        return True

    def _write_job(
        self, ticket: EncodedTicket, tier: Tier, codec: Codec, storage: torch.UntypedStorage
    ) -> WriteJob:
        return DeviceWriteJob(ticket, tier, codec, storage, self._side)

    def _begin(self, job: WriteJob, storage: torch.UntypedStorage) -> None:
        self.inner.fence(storage, job.ticket.label, partial(self._complete, job))

    def _complete(self, job: WriteJob, error: BaseException | None) -> None:
        """In the thread of a lane: the source is complete, or nobody knows."""
        try:
            if error is None and not job.ticket.discarded:
                self._worker.submit(job)
                return
        except ClosedError as closed:
            error = closed
        self._worker.withdraw(job, error)

    def _read_job(
        self,
        ticket: EncodedTicket,
        tier: Tier,
        codec: Codec,
        target: CudaTarget,
        *,
        priority: Priority,
        transfer: Transfer,
    ) -> ReadJob:
        return DeviceReadJob(
            ticket, tier, codec, target, priority=priority, transfer=transfer, side=self._side
        )
