"""A batch from some rows of a group: decoded here, in threads, or in processes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, DatasetError, WorkerError
from penstock.data.decode import (
    Column,
    Room,
    columns_of,
    decoder_of,
    raw_columns,
    samples_of,
)
from penstock.data.group import SampleGroup
from penstock.data.index import Index
from penstock.data.sample import Decode, Sample

_OWN_REFERENCES: Final = 2
"""To the memory of a field: a name's, and that of the call that counts them."""
Collate = Callable[[list[Any]], Any]
How = Literal["auto", "raw"] | Decode


class Assembler:
    """Makes values of bytes. Thread-safe.

    Attributes:
        columns: Where batches are arrays, of what; None: samples are decoded one by one.
        alike: Whether any samples make arrays of the same shape.
        room: Where arrays of batches go; new memory each time if not set.
    """

    def __init__(
        self,
        index: Index,
        root: str,
        how: How = "auto",
        *,
        collate: Collate,
        threads: int = 1,
        processes: int = 0,
    ) -> None:
        """Choose how to decode.

        Args:
            index: Of the data set.
            root: Where it is.
            how: ``auto``: as the format has it; ``raw``: bytes; or a function of a :class:`Sample`.
            collate: Makes a batch of decoded samples.
            threads: That decode a batch together.
            processes: That do so in place of threads. The function must be picklable.

        Raises:
            ConfigError: The format has no decoder, or numbers make no sense.
        """
        if threads < 1 or processes < 0:
            raise ConfigError(f"{threads} threads and {processes} processes cannot decode")
        self._index, self._root, self._collate = index, root, collate
        self.columns: Sequence[Column] | None = None
        self._decode: Decode | None = None
        if how == "raw":
            self.columns = raw_columns(index)
        elif how == "auto":
            self.columns = columns_of(index)
            self._decode = None if self.columns is not None else decoder_of(index)
        else:
            self._decode = how
        kinds = [each.kind for each in self.columns or ()]
        self.alike = bool(kinds) and set(kinds) == {"array"} and index.alike
        self.room: Room = _new_room
        self._lanes = processes or threads
        self._remote = processes > 0
        self._pool: Executor | None = None

    def __call__(self, group: SampleGroup, rows: Sequence[int]) -> Any:
        """A batch of some rows of a group, which may be freed then.

        Raises:
            DatasetError: A sample does not decode.
            WorkerError: A decoding process was killed.
        """
        if self.columns is None:
            return self._collate(self.samples(group, rows))
        where: Any = rows
        if isinstance(rows, range):
            where = slice(rows.start, rows.stop)  # views in place of copies
        labels = self._index.labels
        values = {
            column.name: column.batch(group, where, i, self.room)
            for i, column in enumerate(self.columns)
        }
        value = values if len(values) > 1 else next(iter(values.values()))
        if not len(labels):
            return value
        return value, labels[group.samples[where]].astype(np.int64)

    def batches(self, group: SampleGroup, spans: Sequence[range]) -> list[Any]:
        """Several batches, of rows that follow each other, at once; as each by itself would be.

        Where samples are arrays of one length they are copied together: what one of the batches refers
        to is then in memory until none of them is needed.
        """
        if len(spans) == 1 or not self.alike:
            return [self(group, rows) for rows in spans]
        start = spans[0].start
        whole = self(group, range(start, spans[-1].stop))
        return [_part_of(whole, slice(rows.start - start, rows.stop - start)) for rows in spans]

    def samples(self, group: SampleGroup, rows: Sequence[int]) -> list[Any]:
        """Some rows, each by itself."""
        if self.columns is not None:
            return [self._one(group, row) for row in rows]
        assert self._decode is not None, "there are columns, or there is a function"
        if not self._remote and (self._lanes == 1 or len(rows) < 2):
            return _decode_all(self._decode, samples_of(self._index, self._root, group, rows))
        parts = [part.tolist() for part in np.array_split(rows, min(self._lanes, len(rows)))]
        if self._remote:
            return self._in_processes(group, parts)
        futures = [self._executor().submit(self._part, group, part) for part in parts]
        return [value for future in futures for value in future.result()]

    def decoded_bytes(self) -> int:
        """Of a sample, on average; 0 if that is not known before one is decoded."""
        if self.columns is None:
            return 0
        ratio = max(each.loaded.itemsize / each.stored.itemsize for each in self.columns)
        return int(self._index.data_bytes / self._index.samples * ratio)

    def close(self) -> None:
        """End threads and processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _one(self, group: SampleGroup, row: int) -> Any:
        columns = self.columns or ()
        (sample,) = samples_of(self._index, self._root, group, [row])
        values = {}
        for column in columns:
            data = sample.fields[column.name]
            values[column.name] = None if data is None else column.value(data)
        value = values if len(values) > 1 else next(iter(values.values()))
        return value if sample.label is None else (value, sample.label)

    def _part(self, group: SampleGroup, rows: list[int]) -> list[Any]:
        assert self._decode is not None
        return _decode_all(self._decode, samples_of(self._index, self._root, group, rows))

    def _in_processes(self, group: SampleGroup, parts: list[list[int]]) -> list[Any]:
        assert self._decode is not None
        jobs = []
        for rows in parts:
            samples = samples_of(self._index, self._root, group, rows)
            copies = [{n: _copy(v) for n, v in sample.fields.items()} for sample in samples]
            plain = [replace(sample, fields={}) for sample in samples]
            jobs.append(partial(_decode_copies, self._decode, plain, copies))
        try:
            futures = [self._executor().submit(job) for job in jobs]
            return [value for future in futures for value in future.result()]
        except BrokenProcessPool as error:
            raise WorkerError(
                "a process that decodes samples was killed, or ended by itself (out of memory?); its"
                " batch is lost: load the state of before it, and give fewer processes or less memory"
            ) from error

    def _executor(self) -> Executor:
        if self._pool is None:
            if self._remote:
                context = multiprocessing.get_context("spawn")  # this process has threads
                self._pool = ProcessPoolExecutor(self._lanes, mp_context=context)
            else:
                self._pool = ThreadPoolExecutor(self._lanes, thread_name_prefix="penstock-decode")
        return self._pool


def _decode_all(decode: Decode, samples: Sequence[Sample]) -> list[Any]:
    found = []
    for sample in samples:
        found.append(_decode_one(decode, sample))
        _let_go(sample)
    return found


def _decode_one(decode: Decode, sample: Sample) -> Any:
    try:
        return decode(sample)
    except Exception as error:
        error.add_note(f"decoding sample {sample.index} of {sample.path!r}")
        raise


def _let_go(sample: Sample) -> None:
    """The bytes are overwritten soon: whoever still looks at them would see others."""
    for data in sample.fields.values():
        if data is None:
            continue
        memory = data.obj
        data.release()
        if sys.getrefcount(memory) > _OWN_REFERENCES:
            raise DatasetError(
                f"decoding sample {sample.index} of {sample.path!r} gave something that refers to the"
                " sample's bytes, which are overwritten soon: return a copy"
            )


def _new_room(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


def _part_of(value: Any, rows: slice) -> Any:
    if isinstance(value, dict):
        return {name: each[rows] for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_part_of(each, rows) for each in value)
    return value[rows]


def _copy(data: memoryview | None) -> bytes | None:
    return None if data is None else bytes(data)


def _decode_copies(
    decode: Decode, samples: Sequence[Sample], fields: Sequence[dict[str, bytes | None]]
) -> list[Any]:
    """In another process, to which memoryviews do not go."""
    views = [{n: None if v is None else memoryview(v) for n, v in each.items()} for each in fields]
    return [
        _decode_one(decode, replace(sample, fields=each))
        for sample, each in zip(samples, views, strict=True)
    ]
