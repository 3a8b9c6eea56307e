"""Safetensors of others to a folder of files of another size or type, aligned, without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from penstock.core.errors import ConfigError
from penstock.core.units import MIB, parse_bytes
from penstock.io.files import open_path
from penstock.observe.clients import WEIGHTS
from penstock.weights.failures import SOURCE_ADVICE, named_reads
from penstock.weights.importing import CODES
from penstock.weights.pieces import PieceReader, named_fill, reader_arena
from penstock.weights.safetensors import ITEM_BYTES, StoredTensor, open_source
from penstock.weights.sharded import NewTensor, Parts, from_memory, write_folder

_CAST: Final[Mapping[str, torch.dtype]] = {
    CODES[dtype]: dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""Types that can be cast to each other, by their codes."""
_CAST_ELEMENTS: Final = 4 * MIB
"""Elements that are cast at once."""
_GAP_BYTES: Final = 1 * MIB
"""Most bytes between two tensors that are read, though nobody needs them, so that reads go on."""


def convert(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    directory: str | os.PathLike[str],
    *,
    shard: int | str = "5GB",
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> list[str]:
    """Write the tensors of safetensors files to a folder, in the layout of Hugging Face.

    There tensors of whole pages (4 KiB) begin at pages, so that weights that rest in their files
    (``penstock.weights.load(..., in_place=True)``) are read to where they are used. The source is read
    once, from its start to its end, but for tensors of other lengths, which are last in each new file.
    About 250 MiB are in memory at a time, whatever the size of a tensor. Files get their names when all
    are on the device.

    Args:
        source: A ``.safetensors`` file, a list of them, or a folder as of Hugging Face.
        directory: Made if it is missing; must have no safetensors yet.
        shard: Most bytes of values in a file, unless one tensor has more.
        dtype: Type of all tensors of ``float64``, ``float32``, ``float16`` and ``bfloat16``, which are
            rounded to it as by ``Tensor.to``; None: their own.
        verify: Read each file again, past the page cache, and compare all of it with what was written.

    Returns:
        The paths of the new files.

    Raises:
        ConfigError: There is no such source; the directory has safetensors already, or is not writable;
            ``dtype`` is another type than the four.
        DamagedError: A file of the source is not intact.
        NoSpaceError: There is no room; nothing was written.
        TransferError: A file cannot be read or written.
        ChecksumError: A new file is not what was written.
    """
    code = None if dtype is None else _code_of(dtype)
    made = (
        _converted(file.path, tensor, code)
        for file in open_source(source)
        for tensor in file.tensors
    )
    return write_folder(
        directory,
        made,
        _parts,
        shard_bytes=parse_bytes(shard, what="shard"),
        is_verified=verify,
    )


def bytes_as(tensor: StoredTensor, dtype: torch.dtype | None) -> int:
    """Return the bytes that ``convert`` writes of a tensor. Raises ConfigError as that does."""
    return _converted("", tensor, None if dtype is None else _code_of(dtype)).nbytes


def _code_of(dtype: torch.dtype) -> str:
    code = CODES.get(dtype)
    if code is None or code not in _CAST:
        known = ", ".join(str(each) for each in _CAST.values())
        raise ConfigError(f"weights cannot be cast to {dtype} here, only to {known}")
    return code


def _converted(path: str, tensor: StoredTensor, code: str | None) -> NewTensor:
    if code is None or tensor.code not in _CAST:
        code = tensor.code
    nbytes = tensor.nbytes // ITEM_BYTES[tensor.code] * ITEM_BYTES[code]
    return NewTensor(tensor.name, code, tensor.shape, nbytes, (path, tensor))


def _parts(tensors: Sequence[NewTensor]) -> Parts:
    arena = reader_arena(WEIGHTS)
    try:
        for path, run in _runs(tensors):
            file = open_path(path, "r")
            begin, end = run[0].source[1].begin, run[-1].source[1].begin + run[-1].source[1].nbytes
            try:
                with PieceReader(file, begin, end, owner=WEIGHTS, arena=arena) as reader:
                    for each in run:
                        stored: StoredTensor = each.source[1]
                        reader.skip_to(stored.begin)
                        if each.code == stored.code:
                            yield each.nbytes, named_fill(reader.fill, each.name, SOURCE_ADVICE)
                        else:
                            yield from _cast(reader, stored, each.code)
            finally:
                file.close()
    finally:
        arena.close()


def _runs(tensors: Sequence[NewTensor]) -> Iterator[tuple[str, list[NewTensor]]]:
    """Yield tensors that are read one behind the other, and the file that they are in."""
    run: list[NewTensor] = []
    path, at = "", 0
    for each in tensors:
        if not each.nbytes:
            continue
        file, stored = each.source
        if run and (file != path or not 0 <= stored.begin - at <= _GAP_BYTES):
            yield path, run
            run = []
        run.append(each)
        path, at = file, stored.begin + stored.nbytes
    if run:
        yield path, run


def _cast(reader: PieceReader, stored: StoredTensor, code: str) -> Parts:
    elements = stored.nbytes // ITEM_BYTES[stored.code]
    memory = np.empty(min(elements, _CAST_ELEMENTS) * ITEM_BYTES[stored.code], np.uint8)
    for at in range(0, elements, _CAST_ELEMENTS):
        count = min(_CAST_ELEMENTS, elements - at)
        values = memory[: count * ITEM_BYTES[stored.code]]
        with named_reads(stored.name, SOURCE_ADVICE):
            reader.fill(values)
        cast = torch.from_numpy(values).view(_CAST[stored.code]).to(_CAST[code])
        flat = cast.view(torch.uint8).numpy()
        yield flat.nbytes, from_memory(flat)
