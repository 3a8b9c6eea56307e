"""A model's weights to a folder of safetensors files, without more than some pieces in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from penstock.core.errors import ConfigError
from penstock.core.units import parse_bytes
from penstock.homed import HostValues, home_of
from penstock.observe.clients import WEIGHTS
from penstock.store.arena import Arena
from penstock.store.checksums import RunningSum
from penstock.weights.failures import AGAIN
from penstock.weights.homes import Home, flat_bytes
from penstock.weights.importing import CODES, state_of
from penstock.weights.pieces import PieceReader, named_fill, reader_arena
from penstock.weights.sharded import NewTensor, Parts, from_memory, write_folder


def save(model: Module, directory: str | os.PathLike[str], *, shard: int | str = "5GB") -> None:
    """Save a model's parameters and buffers as safetensors, in the layout of Hugging Face.

    Any reader of that format can read them, and so can ``penstock.weights.load``. About 200 MiB are in
    memory at a time beside what the model keeps there, and its largest weight if a session is open. Of
    tied weights only the first name is saved. A file gets its name when all of it is on the device.

    Args:
        model: The model; a session may be open, and no step be running.
        directory: Made if it is missing; must have no safetensors yet.
        shard: Most bytes of values in a file, unless one tensor has more.

    Raises:
        ConfigError: The directory has safetensors already, or is not writable; the model's state has
            something that safetensors have no form for.
        NoSpaceError: There is no room; nothing was written.
        TransferError: A file cannot be written, or a weight not be read.
        ChecksumError: A weight that was read from its home is not what was written there.
    """
    write_folder(
        directory,
        _once(state_of(model)),
        _parts,
        shard_bytes=parse_bytes(shard, what="shard"),
    )


def on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict whose weights can be read in host memory, for whoever saves it in his own way.

    A weight that rests on flash while a device works with it is mapped from its file, or copied if what
    is on the device is newer: no more than the session's ``weights_memory`` in all. Tied weights are one
    tensor. Everything else is as it was. What is mapped changes with the parameter: read it before the
    next update, and change nothing.

    Args:
        state: As from ``model.state_dict()``.

    Raises:
        InPlaceError: A weight was replaced since the state dict was made.
        TransferError: A weight cannot be read.

    Example:
        ``model.save_pretrained(folder, state_dict=penstock.weights.on_host(model.state_dict()))``
    """
    values = HostValues()
    return {name: values.of(each) for name, each in state.items()}


def _once(state: dict[str, Tensor]) -> Iterator[NewTensor]:
    seen: set[int] = set()
    for name, tensor in state.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.is_meta or tensor.dtype not in CODES or tensor.layout != torch.strided:
            raise ConfigError(
                f"{name} is a {tensor.dtype} on {tensor.device}, {tensor.layout}: safetensors have no"
                " form for it"
            )
        yield NewTensor(name, CODES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, tensor)


def _parts(tensors: Sequence[NewTensor]) -> Parts:
    arena = reader_arena(WEIGHTS)
    try:
        yield from _parts_of(tensors, arena)
    finally:
        arena.close()


def _parts_of(tensors: Sequence[NewTensor], arena: Arena) -> Parts:
    for each in tensors:
        tensor: Tensor = each.source
        home = home_of(tensor)
        if not tensor.numel():
            continue
        if isinstance(home, Home) and home.is_direct:
            yield from _parts_of_home(home, arena)
        elif home is not None:
            home.hold()
            try:
                yield tensor.nbytes, from_memory(_values_of(tensor))
            finally:
                home.let_go(changed=False)
        else:
            yield tensor.nbytes, from_memory(_values_of(tensor))


def _parts_of_home(home: Home, arena: Arena) -> Parts:
    """Read a resting weight from its file, not through the page cache."""
    checksum = home.ticket.checksum
    running = RunningSum("off" if checksum is None else checksum[0], home.nbytes)
    for file, offset, nbytes in home.place.ranges(home.nbytes):
        with PieceReader(
            file, offset, offset + nbytes, owner=WEIGHTS, running=running, arena=arena
        ) as reader:
            yield nbytes, named_fill(reader.fill, home.name, AGAIN + home.tier.spec.remedy)
    if checksum is not None and running.result() != checksum:
        raise home.tier.damage(home.ticket, "have another checksum")


def _values_of(tensor: Tensor) -> NDArray[np.uint8]:
    return flat_bytes(tensor.detach().cpu().contiguous())
