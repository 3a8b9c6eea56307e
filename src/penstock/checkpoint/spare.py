"""A retired checkpoint whose files the next save writes over: their space is there already.

[Note: spare files]
    For a new file a file system looks for space, writes down where it is, and, when bytes have arrived,
    that they have. Bytes for space that a file has had before cost nothing of that. So a ``Checkpointer``
    that retires a checkpoint keeps it as a spare: it gets a name that no checkpoint can have, and the
    next save has its directory for its hidden one, and its files for those of the same names. It waits
    until that name is on the device before anything in it is changed, so that no power cut brings back a
    checkpoint without its manifest, or with bytes of another. After that all is as in a save into new
    files ([Note: a save]).

    A file is written over only if nobody can miss what it held: it has no other name (in another
    checkpoint, whoever linked it), and nobody has it open or mapped, in this process or another, which
    the kernel says by granting a write lease. Any other is let go of, as ever: whoever has it keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Final

from penstock.checkpoint.disk import Directory, Disk, failed
from penstock.checkpoint.manifest import FILE_NAME

SPARE: Final = "..spare.saving"
"""Hidden, and that of no checkpoint: no dot begins those. Removed like what a dead writer left."""
_UNIT_BYTES: Final = 512
"""In which the system counts a file's space."""


def is_there(parent: Directory) -> bool:
    """Return whether a directory has a spare."""
    return os.path.lexists(parent.join(SPARE))


def retire(disk: Disk, parent: Directory, name: str) -> bool:
    """Make the spare of a checkpoint; False: there is one, or it is none. Raises TransferError."""
    path = parent.join(name)
    if (
        is_there(parent)
        or os.path.islink(path)
        or not os.path.isfile(os.path.join(path, FILE_NAME))
    ):
        return False
    disk.rename(parent, name, SPARE)
    return True


def take(disk: Disk, parent: Directory, name: str) -> bool:
    """Call the spare by another name; False: there is none, or something has that name."""
    if not is_there(parent) or os.path.lexists(parent.join(name)):
        return False
    disk.rename(parent, SPARE, name)
    return True


def sort_out(disk: Disk, parent: Directory, hidden: Directory, wanted: Collection[str]) -> None:
    """Leave in what was the spare nothing but files of some names, once its name is on the device.

    Raises TransferError.
    """
    disk.sync(parent)
    for name in hidden.names():
        if name not in wanted:
            disk.drop(hidden, name)


def held_bytes(directory: Directory, needed: Mapping[str, int] | None = None) -> int:
    """The space that files in a directory have.

    Args:
        directory: It.
        needed: What counts of a file at most, by its name; None: all of it.

    Raises:
        TransferError: They cannot be looked at.
    """
    held = 0
    for name in directory.names():
        try:
            facts = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        except FileNotFoundError:
            continue  # its owner is at work
        except OSError as error:
            raise failed("look at", directory.join(name), error) from error
        space = facts.st_blocks * _UNIT_BYTES
        held += space if needed is None else min(space, needed.get(name, 0))
    return held
