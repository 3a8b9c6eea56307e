"""In which order samples are delivered, and who gets which.

[Note: order and share]
    An *order* says which sample stands at which *position* of an epoch; it is a pure function of (seed,
    epoch) and takes no memory. A *share* says which positions a rank gets in the step that begins where
    ``consumed`` positions have been delivered to the whole world. Ranks and batch sizes may change
    between
    any two steps: what remains is what has not been consumed, and each position is delivered once. So
    (epoch, consumed) is all the state there is.

[Note: windows]
    A *window* of chunks, chosen at random from the whole set, is read in long pieces and then shuffled in
    memory: neighbours in a chunk land within one window, and in no other way is the order less than
    random. With several *lanes* each reader (a rank, or its worker) has chunks of its own in every
    window: positions go to the lanes in turns, ``stripe_samples`` at a time. The last positions, which
    fill no window, are shuffled among themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self

import numpy as np

from penstock.core.errors import ConfigError
from penstock.data.permutation import Numbers, Permutation

Kind = Literal["sequential", "full", "window"]
Tail = Literal["uneven", "drop", "pad"]

_KINDS: Final = ("sequential", "full", "window")
_TAILS: Final = ("uneven", "drop", "pad")


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """How a set is shuffled. Comparable, printable, JSON both ways."""

    kind: Kind = "full"
    """``sequential``; ``full``: a random permutation; ``window``: see [Note: windows]."""
    seed: int = 0
    chunk_samples: int = 1
    """Of a window: samples that are neighbours on flash and are read together."""
    window_chunks: int = 1
    """Of a window."""
    lanes: int = 1
    """Of a window: into how many parts its chunks are dealt."""
    stripe_samples: int = 1
    """Of a window: positions that a lane has in turn."""

    def __post_init__(self) -> None:
        """Check it. Raises ConfigError."""
        if self.kind not in _KINDS:
            raise ConfigError(f"order {self.kind!r} is none of {', '.join(_KINDS)}")
        counts = (self.chunk_samples, self.window_chunks, self.lanes, self.stripe_samples)
        if min(counts) < 1:
            raise ConfigError(f"{self}: counts must be 1 or more")
        if self.window_chunks % self.lanes:
            raise ConfigError(f"{self}: window_chunks must be a multiple of lanes")
        if self.window_samples % (self.lanes * self.stripe_samples):
            raise ConfigError(
                f"{self}: a window of {self.window_samples} samples must be a multiple of"
                " lanes * stripe_samples"
            )

    @property
    def window_samples(self) -> int:
        """How many samples a window has."""
        return self.chunk_samples * self.window_chunks

    def to_json(self) -> dict[str, Any]:
        """For a state: what is not as by default."""
        plain = Order()
        return {
            name: value
            for name, value in asdict(self).items()
            if name == "kind" or value != getattr(plain, name)
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The reverse. Raises ConfigError for what is unknown."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError(f"an order has no {sorted(unknown)[0]!r}")
        return cls(**values)


class Epoch:
    """An order of so many samples in one epoch."""

    def __init__(self, order: Order, samples: int, epoch: int) -> None:
        """Derive what is needed; takes no memory."""
        self.order = order
        self.samples = samples
        self.epoch = epoch
        key = (order.seed, epoch)
        self._full = Permutation(samples, *key, "full")
        self._chunks = Permutation(-(-samples // order.chunk_samples), *key, "chunks")
        self._whole = samples // order.window_samples * order.window_samples
        self._tail = Permutation(samples - self._whole, *key, "tail")
        self._lane_samples = order.window_samples // order.lanes

    def at(self, positions: Numbers) -> Numbers:
        """The samples at some positions."""
        if self.order.kind == "sequential":
            return positions
        if self.order.kind == "full":
            return self._full(positions)
        return self._sample(self._place(positions))

    def edge(self, position: int) -> int:
        """Return the end of a position's window: what is read for it is of no use beyond."""
        if self.order.kind != "window":
            return self.samples
        size = self.order.window_samples
        return self.samples if position >= self._whole else position // size * size + size

    def _place(self, positions: Numbers) -> Numbers:
        """Shuffled within windows: numbers in the sequence of shuffled chunks."""
        places = np.empty_like(positions)
        windows = np.minimum(positions, self._whole) // self.order.window_samples
        for window in set(windows.tolist()):
            start = window * self.order.window_samples
            if start >= self._whole:
                here = positions >= self._whole
                places[here] = self._whole + self._tail(positions[here] - self._whole)
                continue
            here = (positions >= start) & (positions < start + self.order.window_samples)
            places[here] = start + self._within(window, positions[here] - start)
        return places

    def _within(self, window: int, inside: Numbers) -> Numbers:
        order = self.order
        stripe, rest = np.divmod(inside, order.stripe_samples)
        turn, lane = np.divmod(stripe, order.lanes)
        inside = turn * order.stripe_samples + rest
        found = np.empty_like(inside)
        for each in set(lane.tolist()):
            here = lane == each
            key = (order.seed, self.epoch, "window", window, each)
            shuffled = Permutation(self._lane_samples, *key)(inside[here])
            found[here] = each * self._lane_samples + shuffled
        return found

    def _sample(self, places: Numbers) -> Numbers:
        """Chunks are permuted; the last, shorter one is wherever the permutation has it."""
        size, count = self.order.chunk_samples, self._chunks.n
        short = self.samples - (count - 1) * size
        if short == size:
            chunk, inside = np.divmod(places, size)
            return self._chunk_at(chunk) * size + inside
        at = self._place_of_last(count)
        later = places >= at * size + short
        chunk, inside = np.divmod(places + np.where(later, size - short, 0), size)
        return self._chunk_at(chunk) * size + inside

    def _chunk_at(self, places: Numbers) -> Numbers:
        """Samples of a window are of few chunks: each is computed once."""
        if not len(places):
            return places
        low, high = int(places.min()), int(places.max())
        if high - low >= len(places):
            return self._chunks(places)
        return self._chunks(np.arange(low, high + 1))[places - low]

    def _place_of_last(self, count: int) -> int:
        """Return the place of the last chunk in the permutation of chunks."""
        if not hasattr(self, "_last"):
            self._last = self._find_last(count)
        return self._last

    def _find_last(self, count: int) -> int:
        for start in range(0, count, 1 << 16):
            places = np.arange(start, min(count, start + (1 << 16)))
            found = np.flatnonzero(self._chunks(places) == count - 1)
            if len(found):
                return start + int(found[0])
        raise AssertionError("a permutation lacks a number")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Share of each step for one rank, or for one of its workers."""

    batch_size: int
    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1
    """Workers of a rank take its batches in turns."""
    tail: Tail = "uneven"
    """The last step, where too few samples are left for a batch for each rank. ``uneven``: they are dealt
    evenly, each once, and ranks may differ by one sample; ``drop``: they are left out; ``pad``: batches
    are filled up with samples from the epoch's beginning, as ``DistributedSampler`` does."""

    def __post_init__(self) -> None:
        """Check it. Raises ConfigError."""
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}, it must be 1 or more")
        for who, of in (("rank", "world"), ("worker", "workers")):
            if not 0 <= getattr(self, who) < getattr(self, of):
                raise ConfigError(
                    f"{who} {getattr(self, who)} is not below {of} {getattr(self, of)}"
                )
        if self.tail not in _TAILS:
            raise ConfigError(f"tail {self.tail!r} is none of {', '.join(_TAILS)}")

    def steps(self, samples: int, consumed: int) -> Iterator[RankBatch]:
        """The steps of the rest of an epoch; of a worker, those that are its turn."""
        number = 0
        while (step := self._step(samples, consumed)) is not None:
            if number % self.workers == self.worker:
                yield step
            number, consumed = number + 1, step.consumed

    def count(self, samples: int, consumed: int = 0) -> int:
        """How many steps the whole rank has left."""
        whole, rest = divmod(max(0, samples - consumed), self.batch_size * self.world)
        return whole + (rest > 0 and self.tail != "drop")

    def _step(self, samples: int, consumed: int) -> RankBatch | None:
        left, wanted = samples - consumed, self.batch_size * self.world
        if left <= 0 or (left < wanted and self.tail == "drop"):
            return None
        if left >= wanted:
            start = consumed + self.rank * self.batch_size
            return RankBatch(start, start + self.batch_size, consumed + wanted)
        if self.tail == "pad":
            each = -(-left // self.world)
            start = consumed + self.rank * each
            return RankBatch(start, start + each, samples)
        start, stop = (consumed + left * of // self.world for of in (self.rank, self.rank + 1))
        return RankBatch(start, stop, samples)


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One batch of one rank."""

    start: int
    """Its positions; those past the end of the epoch stand for those at its beginning."""
    stop: int
    consumed: int
    """By the whole world, when the step is over."""

    def positions(self, samples: int) -> Numbers:
        """The positions, all of them inside the epoch."""
        return np.arange(self.start, self.stop) % max(1, samples)


class BatchNumbers:
    """Which samples each batch of a rank has: the ``batch_sampler`` of torch's loader, without torch.

    Attributes:
        epoch: Of the next pass; it does not count on by itself.
    """

    def __init__(self, order: Order, share: Share, samples: int, epoch: int = 0) -> None:
        """Of an epoch from its beginning."""
        self.epoch = epoch
        self._order, self._share, self._samples = order, share, samples

    def set_epoch(self, epoch: int) -> None:
        """The next pass is of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches of the rank in an epoch."""
        return self._share.count(self._samples)

    def __iter__(self) -> Iterator[list[int]]:
        """Numbers of samples, batch by batch; empty ones, which ``uneven`` may have, are left out."""
        epoch = Epoch(self._order, self._samples, self.epoch)
        for step in self._share.steps(self._samples, 0):
            if step.stop > step.start:
                yield epoch.at(step.positions(self._samples)).tolist()
