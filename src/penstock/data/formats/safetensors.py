"""safetensors: a sample is row ``i`` of every tensor; all have as many rows."""

from __future__ import annotations

import math
import os
from typing import Any, Final

import numpy as np

from penstock.core.errors import DatasetError
from penstock.core.files import parse_json
from penstock.core.units import MAX_BYTES
from penstock.data.files import read_range
from penstock.data.formats.base import IndexingJob, truncated
from penstock.data.index import IndexBuilder

_DTYPES: Final = {
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
    **{f"I{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    "BOOL": "|b1",
    "BF16": "bfloat16",
}
_MOST_HEADER_BYTES: Final = 100 << 20
_Tensor = tuple[dict[str, Any], int, tuple[int, int]]
"""Facts for decoding; rows; begin and end of its bytes in the file, behind the header."""


def build(job: IndexingJob) -> IndexBuilder:
    """Index ``.safetensors`` files with tensors of the same names: a regular run for each."""
    builder: IndexBuilder | None = None
    for number, path in enumerate(job.paths()):
        start, tensors = _header(path)
        fields = {name: facts for name, (facts, *_) in tensors.items()}
        rows = {count for _, count, _ in tensors.values()}
        if len(rows) != 1:
            raise DatasetError(
                f"{path!r}: tensors have {sorted(rows)} rows; a sample is a row of each, so they must"
                " have as many"
            )
        builder = IndexBuilder("safetensors", tuple(fields)) if builder is None else builder
        if builder.meta and builder.meta != {"fields": fields}:
            raise DatasetError(f"{path!r} has tensors {fields}, the files before it others")
        builder.meta = {"fields": fields}
        columns = []
        for name in fields:
            _, count, (begin, end) = tensors[name]
            nbytes = (end - begin) // max(1, count)
            columns.append((start + begin, nbytes, nbytes))
        builder.regular(number, rows.pop(), *columns)
    assert builder is not None, "there is a file"
    return builder


def _header(path: str) -> tuple[int, dict[str, _Tensor]]:
    """Return the offset of the values, and the tensors by name."""
    size = os.path.getsize(path)
    length = int.from_bytes(read_range(path, 0, 8), "little")
    if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
        raise DatasetError(f"{path!r} is no safetensors file: its header would have {length} bytes")
    try:
        header = parse_json(read_range(path, 8, length))
    except ValueError as error:
        raise DatasetError(f"{path!r}: the header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise DatasetError(f"{path!r}: the header is damaged: it is no object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, facts) for name, facts in sorted(header.items())}
    end = max((span[1] for *_, span in tensors.values()), default=0)
    if 8 + length + end > size:
        raise truncated(path, size, 8 + length + end, "its last tensor")
    if not header:
        raise DatasetError(f"{path!r} has no tensor")
    return 8 + length, tensors


def _tensor(path: str, name: str, facts: Any) -> _Tensor:
    facts = facts if isinstance(facts, dict) else {}
    code, shape, span = (facts.get(each) for each in ("dtype", "shape", "data_offsets"))
    if not _wholes(shape) or not _wholes(span) or len(span) != 2:
        raise DatasetError(
            f"{path!r}: the header is damaged: {name!r} has shape {shape!r} and data_offsets {span!r}"
        )
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None or not shape:
        why = "numbers of a kind that is not known here" if dtype is None else "no rows"
        raise DatasetError(f"{path!r}: {name!r} is a {code} of shape {shape}: {why}")
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if span[1] - span[0] != size * math.prod(shape):
        raise DatasetError(
            f"{path!r}: {name!r} has {span[1] - span[0]} bytes, not those of its shape"
        )
    return {"dtype": dtype, "shape": shape[1:]}, shape[0], (span[0], span[1])


def _wholes(value: Any) -> bool:
    """Return whether it is a list of whole numbers, zero or more."""
    return isinstance(value, list) and all(
        type(each) is int and 0 <= each <= MAX_BYTES for each in value
    )
