"""The formats that data sets come in: readers that turn files into ranges of bytes, once."""

from __future__ import annotations

from typing import Final

from penstock.data.formats import (
    arrow,
    images,
    mds,
    npy,
    packed,
    parquet,
    safetensors,
    tar,
    tokens,
)
from penstock.data.formats.base import Format, IndexingJob, Progress

FORMATS: Final = {
    "packed": Format(accept=lambda name: name.endswith(packed.SUFFIX), build=packed.build),
    "npy": Format(accept=lambda name: name.endswith(".npy"), build=npy.build),
    "tokens": Format(
        accept=lambda name: name.endswith((".bin", ".tok", ".tokens")),
        build=tokens.build,
        options=tokens.OPTIONS,
    ),
    "webdataset": Format(accept=lambda name: name.endswith(".tar"), build=tar.build),
    "mds": Format(accept=lambda name: name.endswith(".mds"), build=mds.build),
    "safetensors": Format(
        accept=lambda name: name.endswith(".safetensors"), build=safetensors.build
    ),
    "arrow": Format(
        # without what `datasets` caches of its own operations
        accept=lambda name: name.endswith(".arrow") and not name.startswith("cache-"),
        build=arrow.build,
    ),
    "parquet": Format(accept=lambda name: name.endswith(".parquet"), build=parquet.build),
    "images": Format(
        accept=lambda name: name.lower().endswith(images.SUFFIXES), build=images.build
    ),
}
"""By name; the first that accepts a file is used if none is named."""

__all__ = ["FORMATS", "Format", "IndexingJob", "Progress"]
