"""The temporary directory of a run: made, locked, checked for space, and removed, even after a kill."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError
from penstock.core.files import absolute_path
from penstock.core.fs import FileLock, check_directory, check_space, try_lock
from penstock.core.units import MIB

PREFIX: Final = ".penstock-characterize-"
SLACK_BYTES: Final = 256 * MIB
"""Space beside the checkpoints, for the neighbours' files and the file system's own data."""


@contextmanager
def scratch(directory: str) -> Iterator[Path]:
    """Make a new directory in ``directory`` and remove it afterwards, whatever happens.

    Raises:
        ConfigError: The directory is in memory, or cannot be written to.
    """
    where = absolute_path(directory, "the directory for checkpoints")
    check_directory(where, "the directory for checkpoints")
    _remove_leftovers(where)
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"directory {where!r} cannot be written to: {error.strerror}") from error
    with FileLock(
        fd, f"directory {os.fspath(path)!r}", "another run has just removed it: try again"
    ):
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def check_free_space(folder: Path, nbytes: int) -> None:
    """Raise NoSpaceError unless ``nbytes`` and some slack are free."""
    check_space(
        [(str(folder), nbytes + SLACK_BYTES)],
        "checkpoints of every kind are on disk at the same time: free some space, name another"
        " directory, or choose a smaller scale",
        op="save",
    )


def _remove_leftovers(where: str) -> None:
    """Remove directories of runs that were killed, whose locks are free."""
    for name in os.listdir(where):
        if not name.startswith(PREFIX):
            continue
        path = os.path.join(where, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if try_lock(fd):  # otherwise its run still goes on
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
