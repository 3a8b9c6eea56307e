"""The formats that data sets come in: readers that turn files into ranges of bytes, once."""

from __future__ import annotations

from typing import Final

from penstock.data.formats.arrow import Arrow
from penstock.data.formats.base import Format, IndexingJob, Progress
from penstock.data.formats.images import Images
from penstock.data.formats.mds import Mds
from penstock.data.formats.npy import Npy
from penstock.data.formats.packed import Packed
from penstock.data.formats.parquet import Parquet
from penstock.data.formats.safetensors import Safetensors
from penstock.data.formats.tar import Tar
from penstock.data.formats.tokens import Tokens

_all: tuple[Format, ...] = (
    *(Packed(), Npy(), Tokens(), Tar(), Mds()),
    *(Safetensors(), Arrow(), Parquet(), Images()),
)
FORMATS: Final[dict[str, Format]] = {each.name: each for each in _all}

__all__ = ["FORMATS", "Format", "IndexingJob", "Progress"]
