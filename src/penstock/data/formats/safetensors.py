"""safetensors: a sample is row ``i`` of every tensor; all have as many rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.core.errors import DatasetError
from penstock.data.files import read_range
from penstock.data.formats.base import Job, truncated
from penstock.data.index import IndexBuilder

_DTYPES: Final = {
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
    **{f"I{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    "BOOL": "|b1",
    "BF16": "bfloat16",
}
_MOST_HEADER_BYTES: Final = 100 << 20


class Safetensors:
    """``.safetensors`` files with tensors of the same names."""

    name: Final = "safetensors"
    options: Mapping[str, Any] = {}

    def accept(self, name: str) -> bool:
        """By suffix."""
        return name.endswith(".safetensors")

    def build(self, job: Job) -> IndexBuilder:
        """A regular run for each file."""
        builder: IndexBuilder | None = None
        for number, path in enumerate(job.paths()):
            start, tensors = _header(path)
            fields = {name: _facts(path, name, facts) for name, facts in sorted(tensors.items())}
            rows = {facts["shape"][0] for facts in tensors.values()}
            if len(rows) != 1:
                raise DatasetError(
                    f"{path!r}: tensors have {sorted(rows)} rows; a sample is a row of each, so they must"
                    " have as many"
                )
            builder = IndexBuilder(self.name, tuple(fields)) if builder is None else builder
            if builder.meta and builder.meta != {"fields": fields}:
                raise DatasetError(f"{path!r} has tensors {fields}, the files before it others")
            builder.meta = {"fields": fields}
            columns = []
            for name in fields:
                begin, end = tensors[name]["data_offsets"]
                nbytes = (end - begin) // max(1, tensors[name]["shape"][0])
                columns.append((start + begin, nbytes, nbytes))
            builder.regular(number, rows.pop(), *columns)
            job.done(number + 1)
        assert builder is not None, "there is a file"
        return builder


def _header(path: str) -> tuple[int, dict[str, Any]]:
    size = os.path.getsize(path)
    length = int.from_bytes(read_range(path, 0, 8), "little")
    if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
        raise DatasetError(f"{path!r} is no safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(read_range(path, 8, length))
    except ValueError as error:
        raise DatasetError(f"{path!r}: the header is damaged: {error}") from error
    header.pop("__metadata__", None)
    end = max((facts["data_offsets"][1] for facts in header.values()), default=0)
    if 8 + length + end > size:
        raise truncated(path, size, 8 + length + end, "its last tensor")
    if not header:
        raise DatasetError(f"{path!r} has no tensor")
    return 8 + length, header


def _facts(path: str, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    dtype = _DTYPES.get(facts["dtype"])
    if dtype is None or not facts["shape"]:
        why = "numbers of a kind that is not known here" if dtype is None else "no rows"
        raise DatasetError(
            f"{path!r}: {name!r} is a {facts['dtype']} of shape {facts['shape']}: {why}"
        )
    begin, end = facts["data_offsets"]
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if end - begin != size * int(np.prod(facts["shape"], dtype=np.int64)):
        raise DatasetError(f"{path!r}: {name!r} has {end - begin} bytes, not those of its shape")
    return {"dtype": dtype, "shape": facts["shape"][1:]}
