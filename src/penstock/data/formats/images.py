"""Folders of images, one for each class, as torchvision's ``ImageFolder``; or one without classes."""

from __future__ import annotations

import os
from typing import Final

import numpy as np

from penstock.core.errors import DatasetError
from penstock.data.formats.base import IndexingJob
from penstock.data.index import IndexBuilder

SUFFIXES: Final = (
    *(".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
)


def build(job: IndexingJob) -> IndexBuilder:
    """Index files of images; a label is the number of the first folder, in the order of names."""
    builder = IndexBuilder("images", ("image",))
    paths = list(job.paths())
    sizes = np.array([os.path.getsize(path) for path in paths], np.int64)
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise DatasetError(f"{paths[int(empty[0])]!r} is empty; leave it out")
    builder.table(0, np.zeros((len(sizes), 1), np.int64), sizes[:, None], file_step=1)
    folders = [name.partition(os.sep)[0] if os.sep in name else "" for name in job.names]
    classes = sorted(set(folders))
    if classes != [""]:
        number = {name: label for label, name in enumerate(classes)}
        builder.labels = np.array([number[folder] for folder in folders], np.int32)
        builder.meta = {"classes": classes}
    return builder
