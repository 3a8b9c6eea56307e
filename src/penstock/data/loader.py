"""A loader that reads ahead as far as the training needs, in memory that is bounded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final, Protocol

import torch
from torch.utils.data import default_collate

from penstock.core.errors import ClosedError, PenstockWarning
from penstock.data.dataset import FlashDataset, _from_state, _state, place_in_world
from penstock.data.depth import Depth
from penstock.data.order import BatchNumbers, Epoch, Order, Share, Tail
from penstock.data.rates import rates_of
from penstock.data.reader import ReadCounts
from penstock.data.resources import LoaderResources, choose_order, lends_mostly, lump_of
from penstock.data.stream import Stream, Tally
from penstock.data.values import current_cuda_device, nbytes_of, pinned, to_torch

_SETTLED: Final = 8
"""Batches after which the measured demand counts: first steps are slow."""


class Lender(Protocol):
    """A session, as a loader sees it: see :class:`penstock.Session`."""

    def add_loader(self, loader: FlashLoader, /) -> None:
        """This loader reads from now on."""

    def remove_loader(self, loader: FlashLoader, /) -> None:
        """Stop reading."""


class FlashLoader:
    """Batches of a :class:`FlashDataset`, each sample once per epoch.

    Iterate over it once for each epoch. In the background one thread reads and decodes; how far ahead is
    tuned, so that nobody waits for it with the least memory. What it delivers depends on (seed, epoch)
    only, in any number of ranks.

    Attributes:
        epoch: Of the pass that is under way, or of the next.
        order: In which samples are delivered.
        rates: What ``order="auto"`` was decided by; None: by the length of samples.
    """

    sampler: None = None  # Accelerate asks for these two, as torch's loader has them
    prefetch_factor: None = None

    def __init__(
        self,
        dataset: FlashDataset,
        batch_size: int,
        *,
        order: str | Order = "auto",
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        tail: Tail = "uneven",
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        decode_threads: int = 1,
        decode_processes: int = 0,
        pin_memory: bool = False,
        ready: int = 2,
        session: Lender | None = None,
        demand: float = 0.0,
    ) -> None:
        """Say what to deliver; nothing is read yet, but what ``order="auto"`` may measure.

        Args:
            dataset: The data set, with its memory.
            batch_size: Samples in a batch of one rank.
            order: ``auto``: a full shuffle where flash delivers it at full speed (that is measured once,
                and kept beside the index), else windows; ``full``,
                ``window``, ``sequential``; or an :class:`Order`.
            seed: Of the order.
            rank: Which of the world's processes this is; torch.distributed's if None.
            world: How many there are, likewise.
            tail: The last step, if too few samples are left: ``uneven``, ``drop`` or ``pad``.
            collate_fn: Makes a batch of decoded samples; not used where batches are arrays.
            decode_threads: That decode a batch together.
            decode_processes: The same in processes, for functions that hold the interpreter's lock.
            pin_memory: Batches in page-locked memory, for CUDA.
            ready: Most decoded batches to have waiting; of small ones some more, a MiB each time.
            session: An open session of :func:`penstock.offload`, whose plans leave to the loader what it
                needs of flash. Close the loader before it.
            demand: Bytes per second that the training will take, if they are known before they have been
                measured; for those plans.

        Raises:
            ConfigError: Something makes no sense.
            BudgetError: There is too little memory.
            ClosedError: The session is not open.
        """
        rank, world = place_in_world(rank, world)
        self.dataset, self.collate_fn = dataset, collate_fn
        self.share = Share(batch_size=batch_size, rank=rank, world=world, tail=tail)
        self._assembler = dataset.assembler(
            collate_fn, threads=decode_threads, processes=decode_processes
        )
        self._bfloat16 = dataset.bfloat16_fields(self._assembler)
        self._ready = max(1, ready)
        self._lump = lump_of(self._assembler, batch_size, dataset.memory_bytes)
        self._waiting = (self._ready + 1) * self._lump  # one lump is being made
        self._waiting_bytes = 0
        self._session = session
        self._demand_bytes_per_s = demand
        self._reads = ReadCounts()
        self._closed = False
        self._resources: LoaderResources | None = None
        resources = self._open_resources()
        self._batch_bytes = self._assembler.decoded_bytes() * batch_size
        room_bytes = resources.room_beside(self._batch_bytes * self._waiting)
        # ranks must agree: where there are several, the length of samples decides
        alone = order == "auto" and world == 1
        self.rates = rates_of(dataset.opened, resources.reader) if alone else None
        self.order = choose_order(
            order,
            dataset.index,
            room_bytes,
            seed=seed,
            batch_size=batch_size,
            world=world,
            rates=self.rates,
        )
        self.epoch = 0
        self._consumed = 0
        self._resume = False
        self._pin = pin_memory and torch.cuda.is_available()
        self._cuda_device: int | None = None  # of whoever iterates
        if pin_memory and not self._pin:
            warnings.warn(
                "pin_memory is set, but there is no CUDA device: batches are in plain memory",
                PenstockWarning,
                stacklevel=2,
            )
        self._lends = False
        self._set_aside(self._batch_bytes)
        self._depth = Depth()
        self._tally = Tally()
        self._stream: Stream | None = None
        self._rested: Stream | None = None  # of a pass that goes on after a rest
        if session is not None:
            try:
                session.add_loader(self)
            except BaseException:
                self.rest()
                raise

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return self.share.count(len(self.dataset))

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch; of what is left of it, after ``load_state_dict``.

        Raises:
            TransferError: A sample cannot be read (``on_error="raise"``).
            ChecksumError: A sample is damaged (likewise).
            DatasetError: A sample does not decode, or a file is missing.
            BudgetError: A batch does not fit; names its longest sample.
            WorkerError: A decoding process was killed.
            ClosedError: The loader is closed.
        """
        self._end_stream()
        if not self._resume:  # who counts batches does not come back to hear that there are no more
            self.epoch, self._consumed = self.epoch + self._is_over(), 0
        self._resume = False
        stream = self._stream = self._begin()
        return self._batches(stream)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is of this epoch, from its beginning; else epochs are counted."""
        self.epoch, self._consumed, self._resume = epoch, 0, False

    @property
    def batch_sampler(self) -> BatchNumbers:
        """Which samples the batches of this epoch have, for torch's loader.

        Accelerate, and with it Hugging Face's Trainer, skips by it what a resumed run has trained on.
        """
        return BatchNumbers(self.order, self.share, len(self.dataset), self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """How far the training has come: a few numbers. Batches that only wait do not count."""
        over = self._is_over()
        consumed = 0 if over else self._consumed
        return _state(self.order, self.epoch + over, consumed, len(self.dataset))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on from there, in any world, with the order of the state.

        Raises:
            ConfigError: It is of another data set, or of a later version.
        """
        self._end_stream()
        self.order, self.epoch, self._consumed = _from_state(state, len(self.dataset))
        self._resume = True

    @property
    def demand_bytes_per_s(self) -> float:
        """Bytes per second that training consumes, those of its batches by the time of its steps."""
        if not self._tally.batches or not self._depth.step_s:
            return 0.0
        return self._tally.data_bytes / self._tally.batches / self._depth.step_s

    @property
    def read_demand_bytes_per_s(self) -> float:
        """The same in what is read of flash: blocks and gaps included; what was declared, at first."""
        if self._tally.batches < _SETTLED:
            return self._demand_bytes_per_s
        if not self._reads.wanted_bytes:
            return 0.0
        return self.demand_bytes_per_s * self._reads.read_bytes / self._reads.wanted_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now, in index, read memory, and batches that wait; 0 while it rests."""
        return self._resources.held_bytes if self._resources is not None else 0

    def stats(self) -> dict[str, Any]:
        """Return the totals so far, of this rank."""
        return {
            **asdict(self._tally),
            "read_bytes": self._reads.read_bytes,
            "held_bytes": self.held_bytes,
            "memory_bytes": self.dataset.memory_bytes,
            "demand_bytes_per_s": self.demand_bytes_per_s,
            "order": self.order.to_json(),
            "rates": None if self.rates is None else asdict(self.rates),
            "batches_ahead": self._depth.batches,
            "step_s": self._depth.step_s,
            "waits": self._depth.waits,
        }

    def rest(self) -> None:
        """Give back memory, files and threads until the next batch is asked for: the same as ever.

        Not to be called while another thread takes a batch. A session that is suspended calls it; batches
        that were handed over stay what they are.
        """
        self._end_stream(keep=True)
        self._assembler.close()
        resources, self._resources = self._resources, None
        if resources is not None:
            self._waiting_bytes = resources.waiting_bytes
            resources.close()

    def close(self) -> None:
        """End the thread, and give back memory and files. Idempotent."""
        self._closed = True
        self._end_stream()
        if self._session is not None:
            self._session.remove_loader(self)
        self.rest()

    def __enter__(self) -> FlashLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_over(self) -> bool:
        """Return whether the last batch of the epoch was delivered."""
        return self._consumed > 0 and not self.share.count(len(self.dataset), self._consumed)

    def _open_resources(self) -> LoaderResources:
        """Return the reader, opened again if it was closed."""
        if self._closed:
            raise ClosedError("this loader is closed; make another")
        if self._resources is None:
            self._resources = self.dataset.resources(self._waiting_bytes, self._reads)
            self._assembler.room = self._resources.batch_room
        return self._resources

    def _set_aside(self, batch_bytes: int) -> None:
        """Reserve memory for batches that wait; for one lump of them if most are lent."""
        resources = self._open_resources()
        self._lends = (
            resources.reader.lends
            and not self._pin
            and lends_mostly(
                *(self._assembler, self.dataset.index, self.order, self.share),
                lump=self._lump,
                waiting=self._waiting,
                room_bytes=resources.memory.limit_bytes,
            )
        )
        resources.set_aside(batch_bytes * (self._lump if self._lends else self._waiting))

    def _begin(self) -> Stream:
        self._set_aside(self._batch_bytes)
        self._cuda_device = current_cuda_device() if self._pin else None
        samples = len(self.dataset)
        return Stream(
            self._open_resources().reader,
            Epoch(self.order, samples, self.epoch),
            self.share.steps(samples, self._consumed),
            self._assembler,
            depth=self._depth,
            tally=self._tally,
            policy=self.dataset.on_error,
            ready=self._ready,
            lump=self._lump,
            on_value=self._finish,
        )

    def _finish(self, value: Any) -> Any:
        assert self._resources is not None, "the stream ends before the resources"
        value = to_torch(value, self._bfloat16)
        if self._pin:
            value = self._pinned(value)
        nbytes = nbytes_of(value)
        if nbytes > self._batch_bytes or (self._lends and not self._resources.reader.lends):
            self._batch_bytes = max(nbytes, self._batch_bytes)
            self._set_aside(self._batch_bytes)
        return value

    def _pinned(self, value: Any) -> Any:
        try:
            return pinned(value, self._cuda_device)
        except RuntimeError as error:  # the driver refuses: plain memory does, and is slower
            self._pin = False
            warnings.warn(
                f"no page-locked memory for batches ({error}): they are in plain memory from now on",
                PenstockWarning,
                stacklevel=2,
            )
            return value

    def _batches(self, stream: Stream) -> Iterator[Any]:
        try:
            while True:
                if stream is self._rested:
                    stream, self._rested = self._begin(), None
                    self._stream = stream
                delivery = stream.take()
                if delivery is None:
                    break
                self._consumed = delivery.step.consumed
                values = [delivery.value]
                del delivery  # only whoever takes a batch keeps it
                if values[0] is not None:
                    yield values.pop()
        except BaseException:
            self._end_stream(stream)
            raise
        if stream is self._stream:  # and not one of a pass that was given up
            self._end_stream(stream)
            self.epoch, self._consumed = self.epoch + 1, 0

    def _end_stream(self, stream: Stream | None = None, *, keep: bool = False) -> None:
        """End the one that is under way, or this one; ``keep``: its pass goes on with another."""
        if self._stream is not None and stream in (None, self._stream):
            ended, self._stream = self._stream, None
            ended.close()
            self._rested = ended if keep else None
        elif not keep and stream in (None, self._rested):
            self._rested = None
