"""The directory of one run: made, locked, big enough, and removed; also what a killed run has left."""

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
"""Beside checkpoints: the neighbours' files and the file system's own."""


@contextmanager
def scratch(directory: str) -> Iterator[Path]:
    """A new directory in ``directory``, removed afterwards whatever happens.

    Raises:
        ConfigError: It is in memory, or nothing can be made there.
    """
    where = absolute_path(directory, "the directory for checkpoints")
    check_directory(where, "the directory for checkpoints")
    _remove_left(where)
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


def check_fits(folder: Path, nbytes: int) -> None:
    """Raise NoSpaceError unless so many bytes, and some slack, are free."""
    check_space(
        [(str(folder), nbytes + SLACK_BYTES)],
        "checkpoints of every kind stand side by side: free some space, name another directory, or take"
        " a smaller scale",
        op="save",
    )


def _remove_left(where: str) -> None:
    """What a run left that was killed: nobody holds its lock."""
    for name in os.listdir(where):
        if not name.startswith(PREFIX):
            continue
        path = os.path.join(where, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if try_lock(fd):  # else it is of a run that goes on
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
