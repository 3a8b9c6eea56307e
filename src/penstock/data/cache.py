"""Files kept between runs, such as indexes: read only where no other user can have written them."""

from __future__ import annotations

import os
import stat

from penstock.core.errors import DatasetError
from penstock.core.files import open_regular
from penstock.core.fs import write_durably
from penstock.data.files import failed
from penstock.io.traffic_report import written
from penstock.observe.clients import DATA

_PERMISSIONS = 0o644
_DIRECTORY_PERMISSIONS = 0o755


def make_directory(path: str) -> None:
    """Make a directory and those above it. Raises TransferError."""
    try:
        os.makedirs(path, mode=_DIRECTORY_PERMISSIONS, exist_ok=True)
    except OSError as error:
        raise failed("make", path, error) from error


def read_kept(path: str) -> bytearray:
    """Return what was kept.

    Raises:
        FileNotFoundError: There is nothing.
        DatasetError: Another user may have written it.
        TransferError: It is not a regular file, or cannot be read.
    """
    try:
        fd = open_regular(path)
        with open(fd, "rb") as file:
            check_owner(os.path.dirname(path), os.stat(os.path.dirname(path)))
            check_owner(path, os.fstat(fd))
            data = bytearray(file.read())
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return data
    except FileNotFoundError:
        raise
    except OSError as error:
        raise failed("read", path, error) from error


def keep(path: str, data: bytes) -> None:
    """Write it so that it is there whole or not at all.

    Raises:
        DatasetError: Another user may write to the directory.
        TransferError: It cannot be written.
    """
    try:
        check_owner(os.path.dirname(path), os.stat(os.path.dirname(path)))
        with written(DATA, len(data), path):
            write_durably(path, data, permissions=_PERMISSIONS, is_shared=True)
    except OSError as error:
        raise failed("write", path, error) from error


def check_owner(path: str, facts: os.stat_result) -> None:
    """Raise DatasetError if another user than this one and root may have changed it.

    Args:
        path: For the message.
        facts: Of the file, or of its directory: in a sticky one only the owner of a file replaces it.
    """
    mode = facts.st_mode
    if facts.st_uid not in (os.geteuid(), 0):
        why = f"belongs to user {facts.st_uid}"
    elif mode & stat.S_IWOTH and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        why = "may be written by every user"
    else:
        return
    raise DatasetError(
        f"{path!r} {why}, so what it holds is not trusted: name a directory that only you may write to"
        " (PENSTOCK_CACHE, index_dir=... or --index-dir)"
    )
