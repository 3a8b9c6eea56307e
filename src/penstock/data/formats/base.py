"""Interface of a format: it recognises its files, and locates the samples in them.

1. ``build_index`` picks a format by name, or the one whose ``accept`` takes the files.
2. It calls :meth:`Format.build` with their names, once; what that returns is saved.
3. From then on only the index is used: a format reads no samples.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

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

    def paths(self) -> list[str]:
        """All files; tells progress file by file as they are taken."""
        return [os.path.join(self.root, name) for name in self.names]

    def done(self, files: int) -> None:
        """So many files are indexed."""
        self.progress(files / max(1, len(self.names)))


class Format(Protocol):
    """A format; see the steps above."""

    @property
    def name(self) -> str:
        """As the user names it."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the user, with defaults."""

    def accept(self, name: str) -> bool:
        """Return whether a file of this name is one of the format's."""

    def build(self, job: IndexingJob) -> IndexBuilder:
        """Find the samples.

        Raises:
            DatasetError: A file is damaged, truncated, or of a kind that cannot be read so.
            ConfigError: An option makes no sense, or a package is missing.
        """


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
