"""Arrow IPC, as Hugging Face ``datasets`` saves it: a field is a column, a sample a row.

pyarrow maps the file and tells where its buffers lie; nothing of it is used to read samples. Only what
says where values end is read to build the index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.core.errors import DatasetError
from penstock.core.files import parse_json, read_text
from penstock.data.formats.base import IndexingJob, need
from penstock.data.index import IndexBuilder


def build(job: IndexingJob) -> IndexBuilder:
    """Index ``.arrow`` files, streams or files, not compressed: a run for each record batch.

    Columns of numbers, strings, bytes, lists of numbers, and structs of these, whose fields become
    ``column.field``. Others are left out; their names are in ``meta["left_out"]``.
    """
    pa = need("pyarrow", "an index of Arrow files")
    _check_saved(job)
    builder: IndexBuilder | None = None
    for number, path in enumerate(job.paths()):
        with pa.memory_map(path) as mapped:
            base = mapped.read_buffer(1).address
            mapped.seek(0)
            reader = _reader(pa, mapped, path)
            kinds, left_out = _kinds(pa, reader.schema)
            if builder is None:
                builder = IndexBuilder("arrow", tuple(kinds))
                builder.meta = {"fields": kinds, "left_out": left_out}
            if builder.meta["fields"] != kinds:
                raise DatasetError(f"{path!r} has columns {kinds}, the files before it others")
            for batch in _batches(pa, reader, path):
                place = _Place(base, os.path.getsize(path), path)
                columns = [_column(pa, batch, name, place) for name in kinds if len(batch)]
                builder.mixed(number, batch.num_rows, columns)
    assert builder is not None, "there is a file"
    return builder


def _check_saved(job: IndexingJob) -> None:
    """Check against the list of files that ``datasets`` writes beside them."""
    splits = os.path.join(job.root, "dataset_dict.json")
    if job.whole and os.path.exists(splits):
        raise DatasetError(f"{job.root!r} has several splits (dataset_dict.json): name one of them")
    try:
        state = parse_json(read_text(os.path.join(job.root, "state.json")))
        listed = [str(each["filename"]) for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return  # it is not what datasets saves
    job.check_listed(listed, "the state.json beside it")


class _Place:
    def __init__(self, base: int, size: int, path: str) -> None:
        self.base, self.size, self.path = base, size, path

    def offset(self, buffer: Any) -> int:
        """Return a buffer's offset in the file; any, if it is empty."""
        if buffer is None or not buffer.size:
            return 0
        offset = int(buffer.address) - self.base
        if not 0 <= offset <= self.size - buffer.size:
            raise DatasetError(
                f"{self.path!r} is compressed: a value in it is no range of bytes; write it without"
                " compression"
            )
        return offset


def _reader(pa: Any, mapped: Any, path: str) -> Any:
    try:
        try:
            return pa.ipc.open_stream(mapped)
        except pa.ArrowInvalid:
            mapped.seek(0)
            return pa.ipc.open_file(mapped)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path!r} is no Arrow stream or file: {error}") from error


def _batches(pa: Any, reader: Any, path: str) -> Iterator[Any]:
    try:
        count = getattr(reader, "num_record_batches", None)
        for batch in reader if count is None else map(reader.get_batch, range(count)):
            batch.validate()
            yield batch
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path!r} is damaged or truncated: {error}") from error


def _kinds(pa: Any, schema: Any) -> tuple[dict[str, str], list[str]]:
    found: dict[str, str] = {}
    left_out = []

    def add(name: str, kind: Any) -> None:
        if pa.types.is_struct(kind):
            for inner in kind:
                add(f"{name}.{inner.name}", inner.type)
            return
        text = _kind(pa, kind)
        if text is None:
            left_out.append(f"{name}: {kind}")
        else:
            found[name] = text

    for field in schema:
        add(field.name, field.type)
    if not found:
        raise DatasetError(f"no column of these can be read: {', '.join(left_out)}")
    return found, left_out


def _kind(pa: Any, kind: Any) -> str | None:
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return "str"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes"
    number = _number(pa, kind)
    if number is not None:
        return f"number {number}"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        number = _number(pa, kind.value_type)
        return None if number is None else f"list {number}"
    return None


def _number(pa: Any, kind: Any) -> str | None:
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    return str(np.dtype(kind.to_pandas_dtype()).str)


def _column(pa: Any, batch: Any, name: str, place: _Place) -> Any:
    """Regular (offset, stride, nbytes) where that is so, else arrays (offsets, lengths)."""
    names = batch.schema.names
    top = name if name in names else next(each for each in names if name.startswith(f"{each}."))
    array = batch.column(top)
    absent = _absent(array)
    for part in name[len(top) + 1 :].split(".") if name != top else ():
        array = array.field(part)
        absent = absent | _absent(array)
    if _has_gaps(pa, array):
        raise DatasetError(
            f"{place.path!r}: lists of the column {name!r} have items that are null: their bytes would be"
            " read as numbers; fill them in, or leave the column out"
        )
    offsets, lengths = _values(pa, array, place)
    if absent.any():
        return offsets, np.where(absent, -1, lengths)
    if len(offsets) and (np.diff(offsets) == lengths[0]).all() and (lengths == lengths[0]).all():
        return int(offsets[0]), int(lengths[0]), int(lengths[0])
    return offsets, lengths


def _absent(array: Any) -> Any:
    if not array.null_count:
        return np.zeros(len(array), bool)
    return array.is_null().to_numpy(zero_copy_only=False)


def _has_gaps(pa: Any, array: Any) -> bool:
    """Return whether a list in it has an item that is null."""
    types, kind = pa.types, array.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(array.values.null_count and array.flatten().null_count)


def _values(pa: Any, array: Any, place: _Place) -> tuple[Any, Any]:
    kind, count, first = array.type, len(array), array.offset
    buffers, types = array.buffers(), pa.types
    rows = np.arange(first, first + count)
    if types.is_fixed_size_list(kind):
        width = kind.list_size * kind.value_type.bit_width // 8
        start = place.offset(array.values.buffers()[1]) + array.values.offset * width // max(
            1, kind.list_size
        )
        return start + rows * width, np.full(count, width)
    if types.is_primitive(kind) or types.is_fixed_size_binary(kind):
        width = kind.bit_width // 8
        return place.offset(buffers[1]) + rows * width, np.full(count, width)
    wide = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    ends = np.frombuffer(buffers[1], np.int64 if wide else np.int32)[first : first + count + 1]
    ends = ends.astype(np.int64)
    if len(ends) != count + 1 or (np.diff(ends) < 0).any():
        raise DatasetError(
            f"{place.path!r} is damaged: the offsets of a column's values make no sense"
        )
    if types.is_list(kind) or types.is_large_list(kind):
        width, values = kind.value_type.bit_width // 8, array.values
        data, skip = values.buffers()[1], values.offset
    else:
        width, data, skip = 1, buffers[2], 0
    return place.offset(data) + (ends[:-1] + skip) * width, np.diff(ends) * width
