"""A data set on flash, as torch's loaders want it: by number, or as a stream."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data as torch_data

from penstock.core.errors import ConfigError, PenstockWarning, renewed
from penstock.core.units import parse_bytes
from penstock.data.assemble import Assembler, How
from penstock.data.build import Opened, Paths, open_index
from penstock.data.depth import Depth
from penstock.data.formats import Progress
from penstock.data.index import Index
from penstock.data.order import Epoch, Order, Share, Tail
from penstock.data.reader import Policy, ReadCounts
from penstock.data.resources import LoaderResources, choose_order
from penstock.data.stream import Stream, Tally
from penstock.data.values import to_torch
from penstock.io.engine import Engine


class FlashDataset(torch_data.Dataset[Any]):
    """Samples of a data set that stays on flash, by number.

    Read with O_DIRECT into bounded memory; nothing stays in the page cache. Works under
    ``torch.utils.data.DataLoader`` with any sampler, with workers that are forked or spawned, which
    together hold ``memory``. :class:`FlashLoader` reads the same faster, ahead and in an order that flash
    likes.

    Attributes:
        index: Where the samples are.
        memory_bytes: What may be held.
        skipped: Samples that were left out, here and not in workers (``on_error="skip"``).
    """

    def __init__(
        self,
        paths: Paths,
        *,
        format: str | None = None,
        memory: int | str = "64MiB",
        decode: How = "auto",
        on_error: Policy = "raise",
        verify: bool = True,
        index_dir: str | os.PathLike[str] | None = None,
        rebuild: bool = False,
        progress: Progress = lambda _: None,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """Open a data set; the first time, its index is built.

        Args:
            paths: A file, a directory, or files.
            format: ``packed``, ``npy``, ``tokens``, ``webdataset``, ``mds``, ``safetensors``, ``arrow``,
                ``parquet``, ``images``; told by the names if None.
            memory: All that a process, or a loader with its workers, may hold: index, reads, and
                batches that wait. Bytes, or a size with a unit.
            decode: ``auto``: as the format has it; ``raw``: bytes; or a function of a ``Sample``.
            on_error: About a sample that cannot be read, or whose checksum is wrong: ``raise``, or
                ``skip`` (it is left out and counted).
            verify: Compare checksums where the format has them.
            index_dir: Where the index is kept; the directory ``PENSTOCK_CACHE`` if None.
            rebuild: Build the index anew.
            progress: Told the share that is done, 0 to 1, while the index is built.
            engine: Moves bytes, but not in workers; the engine of this process if None.
            options: Of the format, as ``context=1024`` of ``tokens``.

        Raises:
            ConfigError: An unknown format or option, or a package that is missing.
            DatasetError: Damaged, or changed since its index was built: says what.
            ChecksumError: A packed set's header or tables are damaged.
            TransferError: Something cannot be read.
            BudgetError: The index alone takes all the memory.
        """
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error is {on_error!r}, it is 'raise' or 'skip'")
        self.memory_bytes = parse_bytes(memory, what="memory")
        self.decode, self.on_error, self.verify = decode, on_error, verify
        self.opened = open_index(
            paths,
            format_name=format,
            options=options,
            index_dir=index_dir,
            rebuild=rebuild,
            progress=progress,
        )
        if left_out := self.index.meta.get("left_out"):
            warnings.warn(
                f"columns of {self.opened.root!r} that are no ranges of bytes, or of kinds that are not"
                f" known here, are left out: {', '.join(left_out)}",
                PenstockWarning,
                stacklevel=2,
            )
        self.skipped = 0
        self._engine = engine
        self._resources: LoaderResources | None = None
        self._values: Assembler | None = None
        self.assembler(collate=list).close()  # what cannot be decoded is told here

    @property
    def index(self) -> Index:
        """Index of the samples."""
        return self.opened.index

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, where the format has classes."""
        meta = self.index.meta
        return tuple(meta.get("classes") or meta.get("meta", {}).get("classes", ()))

    def __len__(self) -> int:
        """How many samples."""
        return self.index.samples

    def __getitem__(self, sample: int) -> Any:
        """One sample. Raises IndexError; and as reading does, whatever ``on_error`` is."""
        (value,) = self._get([sample], "raise")
        return value

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Several, read together; torch's loader asks so for a batch.

        Raises: As reading does; with ``on_error="skip"`` if none of them can be read.
        """
        return self._get(samples, self.on_error)

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers: the index is read again there, or goes with it if it is kept nowhere."""
        return {
            **self.__dict__,
            "_resources": None,
            "_values": None,
            "_engine": None,
            "opened": None,
        } | {"reopen": (self.opened.root, self.opened.index_path or self.opened.index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the worker."""
        root, kept = state.pop("reopen")
        self.__dict__.update(state)
        path = kept if isinstance(kept, str) else None
        index = kept if path is None else Index.load(path)
        self.opened = Opened(root=root, index=index, index_path=path, built=False)

    def assembler(self, collate: Any, *, threads: int = 1, processes: int = 0) -> Assembler:
        """Return the decoder. For the loaders."""
        return Assembler(
            self.index,
            self.opened.root,
            self.decode,
            collate=collate,
            threads=threads,
            processes=processes,
        )

    def resources(
        self, waiting_bytes: int = 0, counts: ReadCounts | None = None
    ) -> LoaderResources:
        """Return the reader of this process. For the loaders."""
        info = torch_data.get_worker_info()
        return LoaderResources(
            self.opened,
            self.memory_bytes,
            engine=self._engine if info is None else None,
            verify=self.verify,
            waiting_bytes=waiting_bytes,
            counts=counts,
            sharers=1 if info is None else info.num_workers,
        )

    def bfloat16_fields(self, assembler: Assembler) -> frozenset[str]:
        """Which fields NumPy has no type for. For the loaders."""
        names = [each.name for each in assembler.columns or () if each.dtype == "bfloat16"]
        alone = assembler.columns is not None and len(assembler.columns) == 1
        return frozenset([*names, ""] if names and alone else names)

    def close(self) -> None:
        """Give back memory and files of this process; the next access takes them again."""
        resources, self._resources = self._resources, None
        if resources is not None:
            resources.close()

    def _get(self, samples: Sequence[int], policy: Policy) -> list[Any]:
        wanted = np.asarray(samples, np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not ((wanted >= 0) & (wanted < len(self))).all():
            raise IndexError(f"a sample of {list(samples)} is not among {len(self)}")
        if self._resources is None or self._resources.guard.in_child:
            self._resources = self.resources()
            self._values = self.assembler(list)
        assert self._values is not None
        group = self._resources.reader.read(wanted, policy)
        try:
            rows = [row for row in range(len(wanted)) if row not in group.bad]
            self.skipped += len(group.bad)
            if group.bad and not rows:  # there is no batch of no samples
                text = f"none of the {len(wanted)} samples that are asked for can be read"
                group.bad[0].add_note(text)
                raise renewed(group.bad[0])
            values = self._values.samples(group, rows)
        finally:
            group.free()
        names = self.bfloat16_fields(self._values)
        return [to_torch(value, names) for value in values]


class FlashIterable(torch_data.IterableDataset[Any]):
    """The same as a stream of batches, for ``DataLoader(iterable, batch_size=None, num_workers=...)``.

    Workers take the batches of a rank in turns; a loader that keeps their order, as torch's does,
    delivers
    what :class:`FlashLoader` would. The loader runs ahead of the training, so it is the training that
    knows how far it has come: :meth:`state_after`.
    """

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
        workers: int = 1,
        collate_fn: Any = torch_data.default_collate,
    ) -> None:
        """Say what to deliver.

        Args:
            dataset: The data set.
            batch_size: Samples in a batch of one rank.
            order: ``auto``, ``full``, ``window``, ``sequential``, or an :class:`Order`.
            seed: Of the order.
            rank: Which of the world's processes this is; torch.distributed's if None.
            world: How many there are, likewise.
            tail: See :class:`Share`.
            workers: How many the loader has: they share the memory, and the window is for that.
            collate_fn: Makes a batch of decoded samples.

        Raises:
            ConfigError: Something makes no sense.
        """
        self.dataset = dataset
        rank, world = place_in_world(rank, world)
        self.share = Share(batch_size=batch_size, rank=rank, world=world, tail=tail)
        room = (dataset.memory_bytes // max(1, workers)) - dataset.index.nbytes
        self.order = choose_order(
            order,
            dataset.index,
            room,
            seed=seed,
            batch_size=batch_size,
            world=world * max(1, workers),
        )
        self._where = torch.zeros(2, dtype=torch.int64)  # epoch, consumed; workers that stay see it
        self._where.share_memory_()  # type: ignore[no-untyped-call]
        self._collate = collate_fn

    @property
    def epoch(self) -> int:
        """Of the next pass."""
        return int(self._where[0])

    @property
    def consumed(self) -> int:
        """Positions of the epoch that the next pass leaves out."""
        return int(self._where[1])

    def set_epoch(self, epoch: int) -> None:
        """The next pass is of this epoch, from its beginning; also in workers that are persistent."""
        self._where[0], self._where[1] = epoch, 0

    def state_after(self, steps: int) -> dict[str, Any]:
        """The state when so many batches of this pass have been trained on."""
        consumed, samples = (
            self.consumed + steps * self.share.batch_size * self.share.world,
            len(self.dataset),
        )
        if not self.share.count(samples, consumed):
            return _state(self.order, self.epoch + 1, 0, samples)
        return _state(self.order, self.epoch, consumed, samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on from there, in any world. Raises ConfigError: of another data set."""
        self.order, self._where[0], self._where[1] = _from_state(state, len(self.dataset))

    def __len__(self) -> int:
        """Batches of this rank in the next pass."""
        return self.share.count(len(self.dataset), self.consumed)

    def __iter__(self) -> Iterator[Any]:
        """The batches, or this worker's share of them."""
        info = torch_data.get_worker_info()
        assembler = self.dataset.assembler(self._collate)
        names = self.dataset.bfloat16_fields(assembler)
        resources = self.dataset.resources()
        share = self.share
        if info is not None:
            share = Share(
                batch_size=share.batch_size,
                rank=share.rank,
                world=share.world,
                tail=share.tail,
                worker=info.id,
                workers=info.num_workers,
            )
        samples = len(self.dataset)
        stream = Stream(
            resources.reader,
            Epoch(self.order, samples, self.epoch),
            share.steps(samples, self.consumed),
            assembler,
            depth=Depth(),
            tally=Tally(),
            policy=self.dataset.on_error,
            on_value=lambda value: to_torch(value, names),
        )
        try:
            while (delivery := stream.take()) is not None:
                if delivery.value is not None:
                    yield delivery.value
        finally:
            stream.close()
            resources.close()


def place_in_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """Which process this is, and of how many: torch.distributed's answer where there is none."""
    inside = dist.is_available() and dist.is_initialized()
    return (
        (dist.get_rank() if inside else 0) if rank is None else rank,
        (dist.get_world_size() if inside else 1) if world is None else world,
    )


def _state(order: Order, epoch: int, consumed: int, samples: int) -> dict[str, Any]:
    return {
        "version": 1,
        "epoch": epoch,
        "consumed": consumed,
        "samples": samples,
        "order": order.to_json(),
    }


def _from_state(state: dict[str, Any], samples: int) -> tuple[Order, int, int]:
    if state.get("version") != 1:
        raise ConfigError(f"a loader's state of version {state.get('version')!r} is not known here")
    if state["samples"] != samples:
        raise ConfigError(
            f"the state is of a data set of {state['samples']} samples, this one has {samples}: its order"
            " would be another"
        )
    return Order.from_json(state["order"]), int(state["epoch"]), int(state["consumed"])
