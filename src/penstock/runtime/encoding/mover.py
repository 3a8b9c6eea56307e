"""A mover that encodes on the way out, where it is told to, and decodes on the way back."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from penstock.codec import registry
from penstock.codec.base import ITEMSIZE
from penstock.core.budget import Budget
from penstock.core.locks import defer
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.encoding.jobs import ReadJob, WriteJob
from penstock.runtime.encoding.scratch import Scratch
from penstock.runtime.encoding.tickets import EncodedTicket
from penstock.runtime.encoding.worker import Worker
from penstock.runtime.movers import BlockTarget, CpuMover, Encoding, Mover
from penstock.tier.base import Tier, Window


class EncodingMover(Mover):
    """Moves storages of host memory as the mover inside it does, or as frames of a codec.

    Only ``write``, ``read`` and ``discard`` differ: memory for what comes back is the inner mover's, at
    the same place in a cache line as the storage had. What the codecs work in, and why that suffices,
    is told in [Note: scratch].
    """

    def __init__(
        self, inner: CpuMover, *, scratch_bytes: int, budget: Budget, recorder: Recorder
    ) -> None:
        """Wrap ``inner``, which from now on belongs to this mover.

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
        self.device = inner.device
        self._inner = inner
        self._recorder = recorder
        self._scratch = Scratch(scratch_bytes, budget)
        self._worker = Worker(self._scratch, recorder)
        # A mover that is dropped without close must not leave its thread behind.
        weakref.finalize(self, defer, self._worker.stop).atexit = False

    def write(
        self,
        storage: torch.UntypedStorage,
        tier: Tier,
        label: str,
        encoding: Encoding | None = None,
    ) -> Any:
        """Begin to spill; with an ``encoding``, to encode and spill.

        The source must not change until ``written`` settles. Room in the tier is found piece by piece,
        so that with an encoding NoSpaceError comes by ``written``, with nothing left behind. A
        ``written`` that is cancelled when something of it has begun settles as cancelled soon.

        A storage that does not begin where its elements could is moved as it is, and counted.

        Raises:
            NoSpaceError: Without an encoding: the tier has no room.
            ConfigError: There is no such codec, it does not accept the type, or it needs more scratch.
            ClosedError: The mover or the tier is closed, or this is a forked process.
        """
        if encoding is None or not storage.nbytes():
            return self._inner.write(storage, tier, label)
        codec = registry.get(encoding.codec)
        piece_bytes = self._scratch.piece_bytes(codec, encoding.dtype)
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address % ITEMSIZE[encoding.dtype]:
            self._recorder.count("encoded.misaligned")
            return self._inner.write(storage, tier, label)
        worker = self._worker
        written = Transfer(nbytes, cancel=lambda _: worker.withdraw(job))
        window = Window(address, nbytes, 0)
        ticket = EncodedTicket(label, nbytes, window, encoding, piece_bytes, written)
        job = WriteJob(ticket, tier, codec, storage)
        worker.submit(job)
        return ticket

    def allocate(self, ticket: Any, *, force: bool = False) -> BlockTarget | None:
        """Memory for the storage, not for its frames."""
        return self._inner.allocate(ticket, force=force)

    def read(self, tier: Tier, ticket: Any, target: BlockTarget, priority: Priority) -> Transfer:
        """Begin to read, and to decode what was encoded.

        The transfer fails with ChecksumError or TransferError as the tier's does, with CodecError if a
        frame is damaged, and with CancelledError if the ticket is discarded meanwhile. It settles when
        nothing touches the target any more.
        """
        if not isinstance(ticket, EncodedTicket):
            return self._inner.read(tier, ticket, target, priority)
        ticket.check_readable(tier)
        worker = self._worker
        transfer = Transfer(
            ticket.nbytes,
            cancel=lambda _: worker.withdraw(job),
            promote=lambda _, better: worker.promote(job, better),
        )
        codec = registry.get(ticket.encoding.codec)
        job = ReadJob(ticket, tier, codec, target, priority=priority, transfer=transfer)
        worker.submit(job)
        return transfer

    def finish(self, target: BlockTarget) -> torch.UntypedStorage:
        """As the inner mover."""
        return self._inner.finish(target)

    def use(self, storage: torch.UntypedStorage) -> None:
        """As the inner mover."""
        self._inner.use(storage)

    def drop(self, target: BlockTarget) -> None:
        """As the inner mover."""
        self._inner.drop(target)

    def discard(self, tier: Tier, ticket: Any) -> None:
        """Give the frames up. What of them is under way ends as cancelled. Idempotent."""
        if not isinstance(ticket, EncodedTicket):
            self._inner.discard(tier, ticket)
            return
        for part in self._worker.discard(ticket):
            tier.discard(part)

    def trim(self, nbytes: int) -> int:
        """As the inner mover: scratch memory is never idle."""
        return self._inner.trim(nbytes)

    def retouch_ns(self, nbytes: int) -> float:
        """As the mover below says."""
        return self._inner.retouch_ns(nbytes)

    def target_bytes(self, ticket: Any) -> int:
        """As the inner mover, for the storage."""
        return self._inner.target_bytes(ticket)

    def charge_bytes(self, ticket: Any) -> int:
        """As the inner mover, for the storage."""
        return self._inner.charge_bytes(ticket)

    def used_bytes(self) -> int:
        """As the inner mover."""
        return self._inner.used_bytes()

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, and close the inner mover. Idempotent.

        Never call it in a done callback of a transfer: that transfer has not ended yet.
        """
        self._worker.close()
        self._inner.close()
