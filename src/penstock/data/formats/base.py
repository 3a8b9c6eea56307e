"""Interface of a format, which recognises its files and locates the samples in them.

1. ``open_index`` picks a format by name, or the first whose ``accept`` takes one of the files.
2. It calls ``Format.build`` with their names, once; the result is saved.
3. From then on only the index is used: a format reads no samples.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from penstock.core.errors import ConfigError, DatasetError
from penstock.data.index import IndexBuilder

Progress = Callable[[float], None]
"""Told the share that is done, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexingJob:
    """Files to index, and how."""

    root: str
    names: Sequence[str]
    """Files, relative to the root, in order."""
    options: Mapping[str, Any]
    progress: Progress
    whole: bool = False
    """True if the names are all that the root has, and not some that the user chose."""

    def check_listed(self, listed: Sequence[str], where: str) -> None:
        """Raise DatasetError unless every file of a list that lies beside them is there."""
        missing = sorted(set(listed) - set(self.names)) if self.whole else []
        if missing:
            raise DatasetError(
                f"{os.path.join(self.root, missing[0])!r} is missing: {where} lists it ({len(missing)} of"
                f" {len(listed)} files are missing); copy it again, or name the files that you want"
            )

    def paths(self) -> Iterator[str]:
        """Yield each file, and report progress when the next is asked for."""
        for number, name in enumerate(self.names, 1):
            yield os.path.join(self.root, name)
            self.progress(number / len(self.names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format."""

    accept: Callable[[str], bool]
    """Return True if a file of this name is one of the format's."""
    build: Callable[[IndexingJob], IndexBuilder]
    """Find the samples.

    Raises DatasetError if a file is damaged, truncated, or of a kind that cannot be read so, and
    ConfigError if an option makes no sense or a package is missing.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the user, with defaults."""


def truncated(path: str, has: int, needs: int, what: str) -> DatasetError:
    """The error that a file is shorter than it says."""
    return DatasetError(
        f"{path!r} is truncated: it has {has} bytes, and {what} ends at {needs}; copy it again, or leave"
        " it out"
    )


def need(package: str, why: str) -> ModuleType:
    """An optional package. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise ConfigError(
            f"{why} needs {name}, which is not installed: pip install {name}"
        ) from error
