"""Parquet: a sample is a row group, decoded by pyarrow into a table of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.errors import DatasetError
from penstock.data.formats.base import IndexingJob, need
from penstock.data.index import IndexBuilder


def build(job: IndexingJob) -> IndexBuilder:
    """Index ``.parquet`` files: a table for each. A sample is a row group.

    Pages are compressed by column, so less than a row group cannot be read alone.
    """
    need("pyarrow", "an index of Parquet files")
    parquet = need("pyarrow.parquet", "an index of Parquet files")
    builder = IndexBuilder("parquet", ("group",))
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
