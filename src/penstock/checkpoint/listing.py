"""Listing of a directory's checkpoints, without reading their data."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.checkpoint.disk import Disk
from penstock.checkpoint.manifest import Manifest
from penstock.checkpoint.reader import OpenCheckpoint
from penstock.checkpoint.staging import SPARE, has_spare, held_bytes
from penstock.checkpoint.values import Json
from penstock.core.errors import CheckpointError, PenstockError, TransferError
from penstock.core.files import absolute_path

_NAME: Final = "step-{:012}"
_PATTERN: Final = re.compile(r"step-([0-9]{12}|[1-9][0-9]{12,17})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """A checkpoint of a directory, as known without reading its data.

    Attributes:
        step: Number of its step.
        path: Its path.
        nbytes: Bytes of its data; 0 if it is damaged.
        facts: Facts in its manifest.
        damage: Description of damage; empty if its manifest is whole and its files exist.
    """

    step: int
    path: str
    nbytes: int = 0
    facts: Mapping[str, Json] = field(default_factory=dict)
    damage: str = ""

    @property
    def ok(self) -> bool:
        """Return whether no damage is known; only ``verify`` reads its data."""
        return not self.damage


def name_of_step(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return _NAME.format(step)


def step_of(path: str) -> int:
    """Return the step of a checkpoint in a directory of a run."""
    match = _PATTERN.fullmatch(os.path.basename(path))
    assert match is not None
    return int(match[1])


def listing(directory: str | os.PathLike[str]) -> list[Info]:
    """List the checkpoints of a directory, the latest step first, without reading their data.

    Raises CheckpointError if there is no such directory, or TransferError.
    """
    found = [info_of(step, path) for step, path in steps_in(directory)]
    return [each for each in found if each.ok or os.path.lexists(each.path)]  # still: others write


def steps_in(directory: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """List a directory's checkpoints: steps, the latest first, and paths."""
    root = absolute_path(directory, "the directory of checkpoints")
    if not os.path.isdir(root):
        raise CheckpointError(f"{root!r} is no directory")
    with Disk().open(root) as opened:
        names = opened.names()
    found = [(int(match[1]), name) for name in names if (match := _PATTERN.fullmatch(name))]
    return [(step, os.path.join(root, name)) for step, name in sorted(found, reverse=True)]


def spare_bytes(directory: str | os.PathLike[str]) -> int:
    """Return the bytes of files beside the checkpoints that the next save overwrites.

    Raises TransferError.
    """
    with Disk().open(absolute_path(directory, "the directory of checkpoints")) as root:
        if not has_spare(root):
            return 0
        try:
            spare = Disk().open_in(root, SPARE)
        except TransferError as error:
            if error.errno == errno.ENOENT:  # a save has taken it just now
                return 0
            raise
        with spare:
            return held_bytes(spare)


def info_of(step: int, path: str) -> Info:
    """Describe one checkpoint."""
    try:
        with OpenCheckpoint(path) as opened:
            manifest: Manifest = opened.manifest
            return Info(step=step, path=path, nbytes=manifest.nbytes, facts=manifest.facts)
    except PenstockError as error:
        return Info(step=step, path=path, damage=str(error))
