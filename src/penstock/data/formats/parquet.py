"""Parquet: a sample is a row group, decoded by pyarrow into a table of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.core.errors import DatasetError
from penstock.data.formats.base import IndexingJob, need
from penstock.data.index import IndexBuilder


class Parquet:
    """``.parquet`` files. Pages are compressed by column: less than a row group cannot be read alone."""

    name: Final = "parquet"
    options: Mapping[str, Any] = {}

    def accept(self, name: str) -> bool:
        """By suffix."""
        return name.endswith(".parquet")

    def build(self, job: IndexingJob) -> IndexBuilder:
        """A table for each file."""
        need("pyarrow", "an index of Parquet files")
        parquet = need("pyarrow.parquet", "an index of Parquet files")
        builder = IndexBuilder(self.name, ("group",))
        for number, path in enumerate(job.paths()):
            try:
                metadata = parquet.read_metadata(path)
            except (OSError, ValueError) as error:
                raise DatasetError(
                    f"{path!r} is no whole Parquet file: {error}; if it is truncated copy it again"
                ) from error
            ranges = [_range(metadata.row_group(i)) for i in range(metadata.num_row_groups)]
            table = np.array(ranges, np.int64).reshape(-1, 2)
            builder.table(number, table[:, :1], table[:, 1:])
            job.done(number + 1)
        return builder


def _range(group: Any) -> tuple[int, int]:
    starts, ends = [], []
    for index in range(group.num_columns):
        column = group.column(index)
        first = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            first = min(first, column.dictionary_page_offset)
        starts.append(first)
        ends.append(first + column.total_compressed_size)
    return min(starts), max(ends) - min(starts)
