"""WebDataset shards: consecutive members of a tar archive with one key make a sample."""

from __future__ import annotations

import os
import re
import tarfile
from array import array
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from penstock.core.errors import DatasetError
from penstock.core.files import open_regular
from penstock.data.formats.base import IndexingJob, truncated
from penstock.data.index import IndexBuilder

_META: Final = re.compile("__[^/]*__($|/)")
"""Names of what is about the archive."""


def build(job: IndexingJob) -> IndexBuilder:
    """Index uncompressed ``.tar`` files: a table for each shard.

    A field is a name's extension, from the first dot on, in lower case. As WebDataset has it, members
    without an extension, or in a folder such as ``__notes__``, are no samples; nor are hidden ones.
    """
    fields: dict[str, int] = {}
    shards = [_members(path, fields) for path in job.paths()]
    builder = IndexBuilder("webdataset", tuple(fields))
    for number, (samples, which, offsets, sizes) in enumerate(shards):
        count = samples[-1] + 1 if len(samples) else 0
        where = np.zeros((count, len(fields)), np.int64)
        length = np.full((count, len(fields)), -1, np.int64)
        rows = np.frombuffer(samples, np.int64), np.frombuffer(which, np.int64)
        where[rows] = np.frombuffer(offsets, np.int64)
        length[rows] = np.frombuffer(sizes, np.int64)
        builder.table(number, where, length)
    return builder


def _members(path: str, fields: dict[str, int]) -> tuple[Any, Any, Any, Any]:
    """Of each member: number of its sample, number of its field, offset, size."""
    columns = tuple(array("q") for _ in range(4))
    sample, last = -1, None
    seen = set[str]()
    for key, name, offset, size in _walk(path):
        if key != last:
            sample, last, seen = sample + 1, key, set()
        if name in seen:
            raise DatasetError(
                f"{path!r} has two members {key.lstrip('/')!r} with the extension {name!r}, one after the"
                " other: name them apart"
            )
        seen.add(name)
        field = fields.setdefault(name, len(fields))
        for column, value in zip(columns, (sample, field, offset, size), strict=True):
            column.append(value)
    return columns[0], columns[1], columns[2], columns[3]


def _walk(path: str) -> Iterator[tuple[str, str, int, int]]:
    size = os.path.getsize(path)
    try:
        with (
            open(path, "rb", opener=open_regular) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would remember them all
                folder, _, base = member.name.rpartition("/")
                key, dot, extension = base.partition(".")
                if not (member.isreg() and key and dot) or _META.match(member.name):
                    continue
                if member.issparse():
                    raise DatasetError(
                        f"{path!r}: its member {member.name!r} is a sparse file, of which the archive has"
                        " pieces: make the archive without --sparse"
                    )
                end = member.offset_data + member.size
                if end > size:
                    raise truncated(path, size, end, f"its member {member.name!r}")
                yield f"{folder}/{key}", extension.lower(), member.offset_data, member.size
            if archive.offset >= size:
                raise truncated(path, size, size + 1024, "the mark at its end")
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except tarfile.TarError as error:
        raise DatasetError(
            f"{path!r} is no whole, uncompressed tar archive ({error}): if it is truncated copy it again,"
            " if it is compressed decompress it"
        ) from error
