"""MosaicML's MDS shards: a sample is its columns, one after another, behind their lengths."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import DatasetError
from penstock.core.files import parse_json, read_text
from penstock.data.files import read_range
from penstock.data.formats.base import IndexingJob, truncated
from penstock.data.index import MOST_BYTES, IndexBuilder


def build(job: IndexingJob) -> IndexBuilder:
    """Index ``.mds`` files that an ``index.json`` lists, not compressed: a table for each shard."""
    known = _shards(job.root)
    job.check_listed(list(known), "the index.json beside it")
    builder = IndexBuilder("mds", ("sample",))
    for number, path in enumerate(job.paths()):
        facts = known.get(os.path.normpath(job.names[number]))
        if facts is None:
            raise DatasetError(f"{path!r} is not in the index.json beside it")
        if builder.meta and builder.meta != facts.columns:
            raise DatasetError(f"{path!r} has columns {facts.columns}, the shards before it others")
        builder.meta = facts.columns
        ends = _ends(path, facts)
        builder.table(number, ends[:-1, None], np.diff(ends)[:, None])
    return builder


@dataclass(frozen=True, slots=True)
class _Shard:
    """Entry of index.json for a shard."""

    name: str
    nbytes: int
    samples: int
    is_compressed: bool
    columns: dict[str, list[Any]]
    """``names``, ``encodings`` and ``sizes``, each as long as the others."""

    @classmethod
    def of(cls, entry: Any) -> _Shard:
        """Raises KeyError, TypeError, ValueError or AttributeError: the entry is none."""
        columns = {name: list(entry[f"column_{name}"]) for name in ("names", "encodings", "sizes")}
        facts = zip(*columns.values(), strict=True)
        for name, encoding, size in facts:
            if not isinstance(name, str) or not isinstance(encoding, str) or not _is_size(size):
                raise ValueError(f"a column is {name!r}, {encoding!r}, {size!r}")
        raw = entry["raw_data"]
        return cls(
            name=os.path.normpath(raw["basename"]),
            nbytes=int(raw["bytes"]),
            samples=int(entry["samples"]),
            is_compressed=bool(entry.get("compression") or entry.get("zip_data")),
            columns=columns,
        )


def _is_size(size: Any) -> bool:
    return size is None or (type(size) is int and 0 <= size <= MOST_BYTES)


def _shards(root: str) -> dict[str, _Shard]:
    path = os.path.join(root, "index.json")
    try:
        shards = [_Shard.of(each) for each in parse_json(read_text(path))["shards"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"an MDS data set needs its index.json: {path!r} is missing or damaged:"
            f" {type(error).__name__}: {error}"
        ) from error
    for shard in shards:
        if shard.is_compressed:
            raise DatasetError(
                f"{path!r}: shard {shard.name!r} is compressed: a sample in it is no"
                " range of bytes; write it without compression, or `penstock data pack` a"
                " decompressed copy"
            )
    return {shard.name: shard for shard in shards}


def _ends(path: str, facts: _Shard) -> np.ndarray[Any, np.dtype[np.int64]]:
    size, needs = os.path.getsize(path), facts.nbytes
    if size < needs:
        raise truncated(path, size, needs, "the shard, by its index.json,")
    count = int.from_bytes(read_range(path, 0, 4), "little")
    data = read_range(path, 4, 4 * (count + 1)) if 4 * (count + 2) <= size else b""
    ends = np.frombuffer(data, "<u4").astype(np.int64)
    if count != facts.samples or len(ends) != count + 1 or (np.diff(ends) < 0).any():
        raise DatasetError(f"{path!r} is damaged: its offsets do not fit {facts.samples} samples")
    if int(ends[-1]) > size:
        raise truncated(path, size, int(ends[-1]), "its last sample")
    return ends
