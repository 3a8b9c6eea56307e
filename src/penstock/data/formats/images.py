"""Folders of images, one for each class, as torchvision's ``ImageFolder``; or one without classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.core.errors import DatasetError
from penstock.data.formats.base import IndexingJob
from penstock.data.index import IndexBuilder

_SUFFIXES: Final = (
    *(".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
)


class Images:
    """A sample is a file; its label the number of its first folder, in the order of names."""

    name: Final = "images"
    options: Mapping[str, Any] = {}

    def accept(self, name: str) -> bool:
        """By suffix."""
        return name.lower().endswith(_SUFFIXES)

    def build(self, job: IndexingJob) -> IndexBuilder:
        """One run, in which the file goes up."""
        builder = IndexBuilder(self.name, ("image",))
        sizes = np.array([os.path.getsize(path) for path in job.paths()], np.int64)
        empty = np.flatnonzero(sizes == 0)
        if len(empty):
            raise DatasetError(f"{job.paths()[int(empty[0])]!r} is empty; leave it out")
        builder.table(0, np.zeros((len(sizes), 1), np.int64), sizes[:, None], file_step=1)
        folders = [name.partition(os.sep)[0] if os.sep in name else "" for name in job.names]
        classes = sorted(set(folders))
        if classes != [""]:
            number = {name: label for label, name in enumerate(classes)}
            builder.labels = np.array([number[folder] for folder in folders], np.int32)
            builder.meta = {"classes": classes}
        job.done(len(job.names))
        return builder
