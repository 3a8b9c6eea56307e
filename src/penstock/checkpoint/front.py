"""Save, load, verify: one call each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.reading import Health
from penstock.checkpoint.store import CheckpointStore, Saved
from penstock.checkpoint.unchanged import Place
from penstock.checkpoint.values import Json


def save(
    path: str | os.PathLike[str],
    state: object,
    *,
    facts: Mapping[str, Json] | None = None,
    base: str | os.PathLike[str] | None = None,
    codec: str | None = None,
) -> Saved:
    """Save a state. Returns when it is on the device; until then what was there before is there.

    Bytes go from the tensors through some buffers of 16 MiB in all to new files, past the page cache. No
    tensor may change meanwhile.

    Args:
        path: A directory that is made; an empty one, or a checkpoint, is replaced, at once and when the
            new one is durable. Its parent must exist.
        state: Nested dictionaries, lists and tuples of tensors on any device, NumPy arrays, numbers,
            strings, bytes, None, and of objects with a ``state_dict``. Tensors that share memory are
            saved once. Nothing is pickled.
        facts: What the manifest says of it beside: a dictionary of JSON.
        base: An earlier checkpoint on the same file system: of files that have not changed since, it has
            links, and they are not written. See the note on unchanged blocks in the manual.
        codec: Encode tensors without loss, with ``"exponent"``, ``"zero-value"``,
            ``"zero-value+exponent"`` or ``"narrow"``: fewer bytes on flash, which only this library
            reads. Those that it would not make shorter stay as they are.

    Returns:
        What was done.

    Raises:
        CheckpointError: Something in the state has no form in a checkpoint, named by its keys; or the
            path is that of something else.
        ConfigError: Another writer is saving to this path; or there is no such codec.
        NoSpaceError: There is no room, seen before or met during the save; nothing is left of it.
        TransferError: The device refuses; the same.
    """
    return CheckpointStore().save(path, state, facts=facts, base=base, codec=codec)


def load(path: str | os.PathLike[str], into: object = None, *, partial: bool = False) -> Any:
    """Load a state: anew, or into what is there. Every byte is proven before it is used.

    Args:
        path: A checkpoint.
        into: What was saved, or its like: dictionaries, lists, tensors, and objects with
            ``load_state_dict``. Tensors keep their memory: modules' parameters and buffers, and states of
            an optimizer where it has them already. Lists and dictionaries of plain values become what
            was saved, however long that is. None: everything is made anew, in huge pages.
        partial: Whether the checkpoint may have keys that ``into`` has not.

    Returns:
        ``into``, or a new state.

    Raises:
        MismatchError: The checkpoint is of another state; names the first keys, shapes and dtypes that
            differ. Nothing was changed.
        DamagedError: It is torn or damaged: which file, where, and which tensors. Those that lie before
            have been set already, and are in ``overwritten``: load another checkpoint over them, or
            ``verify`` first.
        CheckpointError: There is none.
        TransferError: The device refuses.
    """
    return CheckpointStore().load(path, into, partial=partial)


def verify(path: str | os.PathLike[str]) -> Health:
    """Read a checkpoint, and say what is damaged. Raises TransferError if the device refuses."""
    return CheckpointStore().verify(path)


def unchanged(path: str | os.PathLike[str], state: object) -> list[Place]:
    """Which tensors of a state are, byte for byte, what a checkpoint has: by its checksums, unread.

    What this returns may be dropped from memory, and be loaded again. A tensor that shares a block of the
    file with one that changed is not among it.

    Args:
        path: A checkpoint of that state.
        state: As for ``save``.

    Raises:
        CheckpointError: As ``save`` and ``load``.
    """
    return CheckpointStore().unchanged(path, state)
