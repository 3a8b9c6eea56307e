"""The temporary directory of a run: made, locked, checked for space, and removed, even after a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError, NoSpaceError, free_space_bytes
from penstock.core.files import absolute_path
from penstock.core.units import MIB
from penstock.io.files import filesystem_of

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
    system = filesystem_of(where)
    if system.is_memory:
        raise ConfigError(
            f"directory {where!r} is on {system.kind}, which keeps files in memory, so checkpoints there"
            " would say nothing about flash; name a directory on a disk"
        )
    _remove_leftovers(where)
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    except OSError as error:
        raise ConfigError(f"directory {where!r} cannot be written to: {error.strerror}") from error
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise NoSpaceError unless ``nbytes`` and some slack are free."""
    free = free_space_bytes(str(folder))
    if 0 <= free < nbytes + SLACK_BYTES:
        raise NoSpaceError(
            errno=errno.ENOSPC,
            op="save",
            path=str(folder.parent),
            offset_bytes=0,
            nbytes=nbytes + SLACK_BYTES,
            free_bytes=free,
            advice="checkpoints of every kind are on disk at the same time: free some space, name another"
            " directory, or choose a smaller scale",
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
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its run still goes on
        finally:
            os.close(fd)
