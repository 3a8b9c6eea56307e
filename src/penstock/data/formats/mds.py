"""MosaicML's MDS shards: a sample is its columns, one after another, behind their lengths."""

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


class Mds:
    """``.mds`` files listed in an ``index.json``, not compressed."""

    name: Final = "mds"
    options: Mapping[str, Any] = {}

    def accept(self, name: str) -> bool:
        """By suffix."""
        return name.endswith(".mds")

    def build(self, job: Job) -> IndexBuilder:
        """A table for each shard: what lies between its offsets."""
        known = _shards(job.root)
        job.check_listed(list(known), "the index.json beside it")
        builder = IndexBuilder(self.name, ("sample",))
        for number, path in enumerate(job.paths()):
            facts = known.get(os.path.normpath(job.names[number]))
            if facts is None:
                raise DatasetError(f"{path!r} is not in the index.json beside it")
            columns = {name: facts[f"column_{name}"] for name in ("names", "encodings", "sizes")}
            if builder.meta and builder.meta != columns:
                raise DatasetError(f"{path!r} has columns {columns}, the shards before it others")
            builder.meta = columns
            ends = _ends(path, facts)
            builder.table(number, ends[:-1, None], np.diff(ends)[:, None])
            job.done(number + 1)
        return builder


def _shards(root: str) -> dict[str, Any]:
    path = os.path.join(root, "index.json")
    try:
        document = json.loads(read_range(path, 0, 1 << 30))
        shards = document["shards"]
    except (OSError, ValueError, KeyError) as error:
        raise DatasetError(f"an MDS data set needs its index.json: {path!r}: {error}") from error
    for shard in shards:
        if shard.get("compression") or shard.get("zip_data"):
            raise DatasetError(
                f"{path!r}: shard {shard['raw_data']['basename']!r} is compressed: a sample in it is no"
                " range of bytes; write it without compression, or `penstock data pack` a"
                " decompressed copy"
            )
    return {os.path.normpath(shard["raw_data"]["basename"]): shard for shard in shards}


def _ends(path: str, facts: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    size, needs = os.path.getsize(path), facts["raw_data"]["bytes"]
    if size < needs:
        raise truncated(path, size, needs, "the shard, by its index.json,")
    count = int.from_bytes(read_range(path, 0, 4), "little")
    ends = np.frombuffer(read_range(path, 4, 4 * (count + 1)), "<u4").astype(np.int64)
    if count != facts["samples"] or len(ends) != count + 1 or (np.diff(ends) < 0).any():
        raise DatasetError(
            f"{path!r} is damaged: its offsets do not fit {facts['samples']} samples"
        )
    if int(ends[-1]) > size:
        raise truncated(path, size, int(ends[-1]), "its last sample")
    return ends
