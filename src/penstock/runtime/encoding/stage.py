"""Encoding stage in front of a mover: storages are encoded on the way out and decoded on the way back."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from penstock.codec import registry
from penstock.codec.base import ITEMSIZE, Codec
from penstock.core.locks import defer
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.encoding.jobs import EncodedTicket, ReadJob, WriteJob
from penstock.runtime.encoding.scratch import Scratch, ScratchSlots
from penstock.runtime.encoding.worker import CodecWorker
from penstock.runtime.movers import BlockTarget, CpuMover, Mover, Transport
from penstock.runtime.storage import Encoding
from penstock.store.account import Account
from penstock.store.base import Tier, Window, check_readable

InnerT = TypeVar("InnerT", bound=Mover)
TargetT = TypeVar("TargetT")


class EncodingStage(Transport, Generic[InnerT, TargetT]):
    """Writes storages as frames of a codec, or through the mover as they are. Thread-safe.

    Memory for what comes back, and the order of uses, stay with the mover. A subclass decides how a
    piece is encoded and where frames lie.

    Attributes:
        inner: The mover behind this stage.
    """

    def __init__(
        self,
        inner: InnerT,
        scratch: ScratchSlots,
        recorder: Recorder,
        adopt_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Stand in front of ``inner``, which is closed with the stage, as is ``scratch``."""
        self.inner = inner
        self._recorder = recorder
        self._scratch = scratch
        self._worker = CodecWorker(scratch, recorder, adopt_thread)
        # A stage that is dropped without close must not leave its thread behind.
        weakref.finalize(self, defer, self._worker.stop).atexit = False

    # -- decided by subclasses ---------------------------------------------------------------------

    def _has_form(self, codec: str) -> bool:
        """Return whether the codec can work with memory of this device; if not, that is counted."""
        return True

    @abstractmethod
    def _write_job(
        self, ticket: EncodedTicket, tier: Tier, codec: Codec, storage: torch.UntypedStorage
    ) -> WriteJob: ...

    @abstractmethod
    def _read_job(
        self,
        ticket: EncodedTicket,
        tier: Tier,
        codec: Codec,
        target: TargetT,
        *,
        priority: Priority,
        transfer: Transfer,
    ) -> ReadJob: ...

    def _begin(self, job: WriteJob, storage: torch.UntypedStorage) -> None:
        """Have the worker encode it, as soon as that may be done."""
        self._worker.submit(job)

    # -- transport ----------------------------------------------------------------------------------

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
        if encoding is None or not storage.nbytes() or not self._has_form(encoding.codec):
            return self.inner.write(storage, tier, label)
        codec = registry.get(encoding.codec)
        piece_bytes = self._scratch.piece_bytes(codec, encoding.dtype)
        if storage.data_ptr() % ITEMSIZE[encoding.dtype]:
            self._recorder.count("encoded.misaligned")
            return self.inner.write(storage, tier, label)
        worker, nbytes = self._worker, storage.nbytes()
        written = Transfer(nbytes, cancel=lambda _: worker.withdraw(job))
        window = Window(storage.data_ptr(), nbytes, 0)
        ticket = EncodedTicket(
            label, nbytes, window, encoding, piece_bytes, written, storage.device
        )
        job = self._write_job(ticket, tier, codec, storage)
        self._begin(job, storage)
        return ticket

    def read(self, tier: Tier, ticket: Any, target: TargetT, priority: Priority) -> Transfer:
        """Begin to read, and to decode what was encoded.

        The transfer fails as the mover's does, with CodecError if a frame is damaged, and with
        CancelledError if the ticket is discarded meanwhile. Of what was encoded it settles when the
        target is filled, and nothing touches it any more.

        Raises:
            ConfigError: ``ticket.written`` has not settled without an error, or it was discarded.
            ClosedError: The mover is closed, or this is a forked process.
        """
        if not isinstance(ticket, EncodedTicket):
            return self.inner.read(tier, ticket, target, priority)
        check_readable(ticket, tier.spec)
        worker = self._worker
        transfer = Transfer(
            ticket.nbytes,
            cancel=lambda _: worker.withdraw(job),
            promote=lambda _, better: worker.promote(job, better),
        )
        codec = registry.get(ticket.encoding.codec)
        job = self._read_job(ticket, tier, codec, target, priority=priority, transfer=transfer)
        worker.submit(job)
        return transfer

    def discard(self, tier: Tier, ticket: Any) -> None:
        """Discard the frames. Those under way end as cancelled. Idempotent."""
        if not isinstance(ticket, EncodedTicket):
            self.inner.discard(tier, ticket)
            return
        for part in self._worker.discard(ticket):
            self.inner.discard(tier, part)

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


class HostEncodingStage(EncodingStage[CpuMover, BlockTarget]):
    """For storages of host memory.

    What comes back has the same place in a cache line as the storage had. What the codecs work in, and
    why that suffices, is in [Note: scratch].
    """

    def __init__(
        self, inner: CpuMover, *, scratch_bytes: int, budget: Account, recorder: Recorder
    ) -> None:
        """Stand in front of ``inner``, which is closed with the stage.

        Args:
            inner: Moves what is not encoded, and has the memory for what comes back.
            scratch_bytes: What encoding and decoding work in: taken from ``budget`` now, given back by
                ``close``. A piece is a tenth of it, at most.
            budget: The device's.
            recorder: Gets a span for each piece, and counters.

        Raises:
            ConfigError: ``scratch_bytes`` is less than 80 KiB.
            BudgetError: The budget has not so much left.
        """
        super().__init__(inner, Scratch(scratch_bytes, budget), recorder)

    def _write_job(
        self, ticket: EncodedTicket, tier: Tier, codec: Codec, storage: torch.UntypedStorage
    ) -> WriteJob:
        return WriteJob(ticket, tier, codec, storage)

    def _read_job(
        self,
        ticket: EncodedTicket,
        tier: Tier,
        codec: Codec,
        target: BlockTarget,
        *,
        priority: Priority,
        transfer: Transfer,
    ) -> ReadJob:
        return ReadJob(ticket, tier, codec, target, priority=priority, transfer=transfer)
