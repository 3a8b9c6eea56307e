"""Checks of paths in options, before any work is done. Imports neither NumPy nor torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError, TransferError
from penstock.core.files import absolute_path
from penstock.core.fs import check_directory
from penstock.io.files import open_unlinked

_PICTURES: Final = (".svg", ".png", ".pdf")


def spill_directory(name: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory for offloading.

    Raises:
        ConfigError: It is missing, not a directory, not writable, in memory, or takes no file.
    """
    path = absolute_path(name, "the directory to offload to")
    check_directory(path, "flash directory")
    try:
        open_unlinked(path).close()  # a quota, say, is known only then
    except TransferError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"flash directory {path!r} takes no file: {reason}; free some space, or name another"
        ) from error
    return path


def picture_to_write(name: str | os.PathLike[str], option: str) -> str:
    """Return the absolute path of a picture to write. Raises ConfigError naming the option."""
    path = file_to_write(name, option)
    if os.path.splitext(path)[1] not in _PICTURES:
        raise ConfigError(f"{option}: {os.fspath(name)!r} does not end with .svg, .png or .pdf")
    return path


def write_file(path: str, text: str, option: str) -> None:
    """Write a text file. Raises ConfigError naming the option."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path!r}: {error.strerror}") from error


def file_to_write(name: str | os.PathLike[str], option: str) -> str:
    """Return the absolute path of a file to write. Raises ConfigError naming the option."""
    path = absolute_path(name, option)
    folder = os.path.dirname(path)
    if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option}: {path!r} cannot be written; name a file in a writable directory"
        )
    return path
