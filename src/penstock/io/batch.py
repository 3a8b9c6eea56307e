"""Batches of many short reads, through the asynchronous engine.

A single request costs the interpreter some 15 µs, too much for a device with a hundred thousand random
reads per second. Here the kernel's control blocks are rows of a NumPy array, and a whole slice of entries
is processed at once: 1 µs each.

[Note: slices]
    A batch waits in the engine's queue among the requests, by priority. Its pieces are *slices* of up to
    64 entries and 4 MiB, and a slice takes one of the engine's places, as a piece of a request does; so a
    demand read waits for no more than the slices in flight. An entry that was refused, failed or came
    back short is read again as a separate request, which can continue and reports errors.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.locks import Lock
from penstock.io.context import Context
from penstock.io.engine import Op, Priority, ReadBatch, Transfer
from penstock.io.transfer_jobs import TransferJob, TransferPiece

SLICE_ENTRIES: Final = 64
SLICE_BYTES: Final = 4 << 20
"""Longest slice, unless a single entry is longer: a demand waits for all slices in flight."""
_EVENTS_PER_WAKEUP: Final = 16
"""Number of events to wait for, up to ``_MAX_WAIT_NS``, so that the thread wakes up less often."""
_MAX_WAIT_NS: Final = 200_000
_RING_BELL: Final = 1
_IOCB: Final = np.dtype(
    [
        *(("token", "u8"), ("key", "u4"), ("flags", "u4"), ("opcode", "u2"), ("priority", "i2")),
        *(
            ("file", "u4"),
            ("address", "u8"),
            ("nbytes", "u8"),
            ("offset", "i8"),
            ("reserved", "u8"),
        ),
        *(("options", "u4"), ("bell", "u4")),
    ]
)
"""``struct iocb`` of linux/aio_abi.h for a read: opcode 0."""
_EVENT: Final = np.dtype([("token", "u8"), ("block", "u8"), ("result", "i8"), ("second", "i8")])


class BatchJob(TransferJob):
    """A batch in the queue; its sizes count entries, those of other jobs bytes."""

    is_listed = False  # it refers to its memory

    __slots__ = ("_holds", "_lock", "batch")

    def __init__(
        self,
        batch: ReadBatch,
        piece_bytes: int,
        *,
        promote: Callable[[TransferJob, Priority], None],
    ) -> None:
        """Create a job that is cut into slices of at most ``piece_bytes``, or of one entry."""
        self.op: Op = "read"
        self.batch = batch
        self.keep_alive = batch.keep_alive
        self.priority = batch.priority
        self.nbytes = len(batch)
        fit = min(piece_bytes, SLICE_BYTES) // int(batch.nbytes.max())
        self.piece_bytes = min(SLICE_ENTRIES, max(1, fit))
        self.next_bytes = self.running = 0
        self.error: BaseException | None = None
        self._lock = Lock()
        self._holds = 1
        self.transfer = Transfer(
            int(batch.nbytes.sum()), promote=lambda _, priority: promote(self, priority)
        )

    def hold(self) -> None:
        """Note that an entry is read again."""
        with self._lock:
            self._holds += 1

    def release(self, entry: int, error: BaseException | None) -> None:
        """Note that an entry that was read again is done."""
        if error is not None:
            self.batch.errors[entry] = error
        self._remove_hold()

    def settle(self, error: BaseException | None) -> None:
        """End the job: every slice is done or, with an error (it was cancelled), none was begun."""
        if error is not None:
            self.batch.errors.update((entry, error) for entry in range(self.nbytes))
        self._remove_hold()

    def _remove_hold(self) -> None:
        with self._lock:
            self._holds -= 1
            last = not self._holds
        if last:
            self.keep_alive = None
            self.transfer.settle()


class BatchFlight:
    """A slice in flight."""

    __slots__ = ("job", "left", "piece")

    def __init__(self, piece: TransferPiece, job: BatchJob) -> None:
        """Start with nothing done."""
        self.piece = piece
        self.job = job
        self.left = piece.nbytes


class BatchContext:
    """Kernel context and control blocks for slices. Used by one thread."""

    def __init__(self, slices: int, bell: int) -> None:
        """Set up a context for ``slices`` slices at once. Raises ConfigError if it is not available."""
        depth = slices * SLICE_ENTRIES
        self._blocks = np.zeros(depth, _IOCB)
        self._blocks["token"] = np.arange(depth)
        self._blocks["options"] = _RING_BELL
        self._blocks["bell"] = bell
        start = self._blocks.ctypes.data
        self._pointers = start + np.arange(depth, dtype=np.uint64) * np.uint64(_IOCB.itemsize)
        self._events = np.zeros(depth, _EVENT)
        self._entry = np.zeros(depth, np.int64)
        self._least = np.zeros(depth, np.int64)
        self._timeout = ctypes.create_string_buffer(struct.pack("qq", 0, _MAX_WAIT_NS))
        self._context = Context(depth)
        self._depth = depth
        self.flying = 0

    def submit(self, token: int, flight: BatchFlight) -> list[int]:
        """Submit a slice, and return the entries that the kernel did not take."""
        batch, (_, start, count) = flight.job.batch, flight.piece
        rows, at = slice(start, start + count), token * SLICE_ENTRIES
        here = slice(at, at + count)
        try:
            descriptors = np.array([file.fd for file in batch.files], np.uint32)
            blocks = self._blocks[here]
            blocks["file"] = descriptors[batch.which[rows]]
            blocks["address"], blocks["nbytes"] = batch.address[rows], batch.nbytes[rows]
            blocks["offset"] = batch.offset_bytes[rows]
            self._least[here] = batch.least_bytes[rows]
            self._entry[here] = np.arange(start, start + count)
            taken = self._hand_over(at, count)
        except Exception:  # noqa: BLE001  (a file is closed: each entry will report it)
            taken = 0
        self.flying += taken
        flight.left = taken
        return list(range(start + taken, start + count))

    def collect(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (token, number of entries done, entries that must be read again) of each slice."""
        if not self.flying:
            return
        least = min(_EVENTS_PER_WAKEUP, self.flying)
        events, timeout = self._events.ctypes.data, ctypes.addressof(self._timeout)
        found = max(0, self._context.events(least, self._depth, events, timeout))
        self.flying -= found
        done = self._events[:found]
        tokens = done["token"].astype(np.int64)
        slices = tokens // SLICE_ENTRIES
        bad = done["result"] < self._least[tokens]
        counts = np.bincount(slices) if found else np.zeros(0, np.int64)
        for token in np.flatnonzero(counts).tolist():
            again: list[int] = []
            if bad.any():
                again = self._entry[tokens[bad & (slices == token)]].tolist()
            yield token, int(counts[token]), again

    def close(self) -> None:
        """Close the context. No slice may be in flight."""
        self._context.close()

    def _hand_over(self, at: int, count: int) -> int:
        taken = 0
        while taken < count:
            more = self._context.submit(count - taken, self._pointers[at + taken :].ctypes.data)
            if more < 0:
                break
            taken += more
        return taken


def check_batch(batch: ReadBatch) -> None:
    """Raise ConfigError if a batch is empty or not aligned to the files' granule."""
    if not len(batch):
        raise ConfigError("a batch has no reads; submit at least one")
    granule = max(file.granule_bytes for file in batch.files)
    columns: dict[str, NDArray[np.int64]] = {
        name: getattr(batch, name) for name in ("offset_bytes", "address", "nbytes")
    }
    for name, values in columns.items():
        wrong = np.flatnonzero((values < 0) | (values % granule != 0))
        if not len(wrong) and name != "offset_bytes":
            wrong = np.flatnonzero(values == 0)
        if len(wrong):
            entry = int(wrong[0])
            raise ConfigError(
                f"entry {entry} of a batch of {len(batch)} reads,"
                f" {batch.files[int(batch.which[entry])].path!r}: {name}={int(values[entry])} must be a"
                f" positive multiple of the granule of {granule} bytes"
            )
