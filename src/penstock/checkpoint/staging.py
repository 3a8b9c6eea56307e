"""Staging directories: a checkpoint is written in a hidden directory, which one rename publishes.

[Note: a save]
    Everything is written into a hidden directory beside the final one, ``.NAME.saving``, which its writer
    has locked. The data files, the manifest and the directory are synced. Then one rename gives it its
    name, or swaps it with what has that name; and the parent directory is synced. Whenever the writer is
    killed, that name leads to the earlier checkpoint or to all of the new one. The next save to that
    name, or a ``Checkpointer``, removes what a dead writer left; a living one holds the lock. The remains
    may be what had the name before, and may have it again after a loss of power: so the parent directory
    is synced before anything in them is touched. If the sync of the parent directory fails, the names are
    changed back: no later sync would make the first change safe, but it does make this one.

[Note: spare files]
    For a new file a file system finds space, records its place, and, when bytes have arrived, that they
    have. Overwriting costs none of that. So a ``Checkpointer`` that retires a checkpoint keeps it as a
    spare, under a name that no checkpoint can have. The next save uses its directory as the hidden one,
    and its files for those of the same names. It syncs that name before it changes anything, so that no
    loss of power brings back a checkpoint without its manifest, or with bytes of another. The rest is as
    in a save into new files ([Note: a save]).

    A file is overwritten only if nothing needs its content: it has no other name, and no process has it
    open or mapped, else the kernel would not grant a write lease. Any other file is only unlinked.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from torch import distributed as dist

from penstock.checkpoint.disk import NO_DIRECTORY, Directory, Disk, failed, leads_to, lock
from penstock.checkpoint.manifest import FILE_NAME
from penstock.checkpoint.reader import OpenCheckpoint
from penstock.core import ranks
from penstock.core.errors import (
    CheckpointError,
    ConfigError,
    PenstockError,
    TransferError,
)
from penstock.core.fs import check_space
from penstock.core.units import MIB, round_up

_SAVING: Final = ".{}.saving"
_OURS: Final = re.compile(
    rf"{re.escape(FILE_NAME)}|(data|rank[0-9]{{5,}})-[0-9]{{5,}}\.safetensors"
)
"""Names of the files that are written here; other writers may have others."""
_RANK: Final = "saved_by_rank"
_RANKS: Final = "saved_by_ranks"
_RUN: Final = "saved_by_run"
_SLACK_BYTES: Final = MIB
"""For the manifest's file and the file system's own."""


def hidden_name_of(name: str) -> str:
    """Return the name of a checkpoint while it is being written."""
    return _SAVING.format(name)


def is_hidden(name: str) -> bool:
    """Return whether a name is that of a directory in which something is being saved."""
    return name.startswith(".") and name.endswith(".saving")


@contextmanager
def claim(disk: Disk, parent: Directory, name: str, *, spare: Collection[str] | None = None) -> Any:
    """Make and lock the hidden directory of a checkpoint; remove it if the block raises.

    Args:
        disk: Changes directories.
        parent: Directory of the checkpoint.
        name: Name of the checkpoint.
        spare: Names of files that it may take from the spare ([Note: spare files]); None: it is empty.
    """
    hidden_name = hidden_name_of(name)
    is_spare = is_new = False
    while True:
        is_spare = spare is not None and take_spare(disk, parent, hidden_name)
        is_new = not is_spare and disk.make_directory(parent, hidden_name)
        try:
            hidden = disk.open_in(parent, hidden_name)
        except TransferError as error:
            if error.errno == errno.ENOENT:
                continue  # its writer has finished meanwhile: try again
            raise
        try:
            if not lock(hidden):
                raise ConfigError(
                    f"another process, or another thread, is saving to {parent.join(name)!r} now:"
                    f" give each writer a name of its own{advice_for_ranks()}"
                )
            if leads_to(hidden_name, hidden, parent):
                break
        except BaseException:
            hidden.close()
            raise
        hidden.close()  # its writer has just finished: try again
    with hidden:
        try:
            if is_spare and spare is not None:
                keep_files(disk, parent, hidden, spare)
            elif not is_new:
                disk.sync(parent)
                disk.clear(hidden)
            yield hidden
        except BaseException:
            if leads_to(hidden_name, hidden, parent):
                with suppress(PenstockError):  # the next save removes what is left
                    disk.remove(parent, hidden_name)
            raise


def publish(disk: Disk, parent: Directory, name: str) -> None:
    """Give a hidden directory its name, and remove what had it. Raises CheckpointError, TransferError."""
    hidden_name = hidden_name_of(name)
    with suppress(OSError):  # an empty directory, as mkdtemp makes, gives way
        os.rmdir(name, dir_fd=parent.fd)
    check_replaceable(parent.join(name))  # it may have been made meanwhile
    is_first = not os.path.lexists(parent.join(name))
    if is_first:
        disk.rename(parent, hidden_name, name)
    elif not disk.exchange(parent, hidden_name, name):
        raise CheckpointError(
            f"{parent.join(name)!r} exists, and this file system cannot swap two directories at"
            " once: save under another name"
        )
    try:
        disk.sync(parent)
        if not is_first:
            check_only_ours(parent.join(hidden_name))  # until now something could be put there
    except (TransferError, CheckpointError):
        with suppress(PenstockError):
            if is_first:
                disk.rename(parent, name, hidden_name)
            else:
                disk.exchange(parent, hidden_name, name)
        raise
    if not is_first:
        with suppress(PenstockError):  # the next save removes what is left of the old one
            disk.remove(parent, hidden_name)


def remove_leftovers(disk: Disk, parent: Directory, names: Iterable[str]) -> None:
    """Remove hidden directories whose writers are dead. Raises TransferError."""
    for name in names:
        try:
            hidden = disk.open_in(parent, name)
        except TransferError as error:
            if error.errno not in NO_DIRECTORY:
                raise
            disk.drop(parent, name)  # a link that somebody had made of a checkpoint, say
            continue
        with hidden:
            if lock(hidden) and leads_to(name, hidden, parent):
                disk.remove(parent, name)


def parent_of(path: str) -> str:
    """Return the directory of a checkpoint's path. Raises CheckpointError if there is none."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise CheckpointError(
            f"{parent!r}, in which {path!r} is to be, is no directory: make it first"
        )
    if os.path.basename(path).startswith("."):
        raise CheckpointError(f"{path!r}: the name of a checkpoint must not begin with a dot")
    return parent


def check_replaceable(path: str) -> None:
    """Raise CheckpointError if a path is neither free, nor an empty directory, nor a mere checkpoint."""
    if os.path.lexists(path) and (
        os.path.islink(path)
        or not (os.path.isfile(os.path.join(path, FILE_NAME)) or _is_empty(path))
    ):
        raise CheckpointError(
            f"{path!r} exists and is no checkpoint: it is not replaced; remove it, or name another"
        )
    check_only_ours(path)


def check_only_ours(path: str) -> None:
    """Raise CheckpointError if a checkpoint's directory has files that are not the checkpoint's.

    A link passes, as only the link is ever removed.
    """
    if os.path.islink(path):
        return
    try:
        with os.scandir(path) as entries:
            others = [
                each.name for each in entries if each.is_dir() or not _OURS.fullmatch(each.name)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise failed("list", path, error) from error
    if others:  # or files of another writer, which the manifest names
        with suppress(PenstockError), OpenCheckpoint(path) as opened:
            named = {each.name for each in opened.manifest.files}
            others = [name for name in others if name not in named]
    if others:
        raise CheckpointError(
            f"{path!r} holds {min(others)!r}, which is no part of the checkpoint and would be removed"
            " with it: move that elsewhere, or name another checkpoint"
        )


def rank_facts() -> dict[str, int | str]:
    """Return facts on the rank of this process among several; none in a run of one process."""
    if dist.is_available() and dist.is_initialized():
        number: int | None = dist.get_rank()
        size = dist.get_world_size()
    else:
        number, size = ranks.rank(), ranks.world_size()
    if number is None or size < 2:
        return {}
    return {_RANK: number, _RANKS: size, **ranks.run_facts(_RUN)}


def advice_for_ranks() -> str:
    """Return advice to a rank that shares a path with others; empty in a run of one process."""
    own = rank_facts()
    if not own:
        return ""
    return (
        f"; this is rank {own[_RANK]} of {own[_RANKS]}: if all have the same state, let one of them save"
        " it; if each has a part, use torch.distributed.checkpoint with penstock.checkpoint.dcp, or give"
        " each rank a path of its own"
    )


def check_rank(path: str) -> None:
    """Raise ConfigError if a checkpoint was saved by another rank of the run of this process.

    After a restart of torchrun, and in a run of more or fewer ranks, a process may have another number.
    """
    own = rank_facts()
    if not own or not os.path.lexists(path):
        return
    with suppress(CheckpointError, TransferError), OpenCheckpoint(path) as opened:
        facts = opened.manifest.facts
        is_same_run = all(facts.get(each) == own.get(each) for each in (_RANKS, _RUN))
        if is_same_run and facts.get(_RANK, own[_RANK]) != own[_RANK]:
            raise ConfigError(
                f"{path!r} was saved by rank {facts[_RANK]} of {facts.get(_RANKS)}, and rank"
                f" {own[_RANK]} would replace it{advice_for_ranks()}"
            )


def _is_empty(path: str) -> bool:
    try:
        return not os.listdir(path)
    except OSError:
        return False


def check_fits(parent: Directory, nbytes: int) -> None:
    """Raise NoSpaceError if a checkpoint of so many bytes does not fit where a directory lies."""
    check_space(
        [(parent.path, round_up(nbytes, 4096) + _SLACK_BYTES)],
        "what is there is kept: free some space, keep fewer checkpoints, or name another directory",
    )


SPARE: Final = "..spare.saving"
"""Name of the spare: hidden, and that of no checkpoint. It is removed as a dead writer's remains are."""
_UNIT_BYTES: Final = 512
"""Unit in which the system counts a file's space."""


def has_spare(parent: Directory) -> bool:
    """Return whether a directory has a spare."""
    return os.path.lexists(parent.join(SPARE))


def retire(disk: Disk, parent: Directory, name: str) -> bool:
    """Make a checkpoint the spare; return False if there is one, or it is no checkpoint.

    Raises TransferError.
    """
    path = parent.join(name)
    if (
        has_spare(parent)
        or os.path.islink(path)
        or not os.path.isfile(os.path.join(path, FILE_NAME))
    ):
        return False
    disk.rename(parent, name, SPARE)
    return True


def take_spare(disk: Disk, parent: Directory, name: str) -> bool:
    """Rename the spare; return False if there is none, or if something has that name."""
    if not has_spare(parent) or os.path.lexists(parent.join(name)):
        return False
    disk.rename(parent, SPARE, name)
    return True


def keep_files(disk: Disk, parent: Directory, hidden: Directory, wanted: Collection[str]) -> None:
    """Remove from a former spare all files but those wanted, once its name is durable."""
    disk.sync(parent)
    for name in hidden.names():
        if name not in wanted:
            disk.drop(hidden, name)


def held_bytes(directory: Directory, needed: Mapping[str, int] | None = None) -> int:
    """Return the space of the files in a directory. Raises TransferError.

    Args:
        directory: The directory.
        needed: Most bytes that count of each file, by its name; None: all.
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
