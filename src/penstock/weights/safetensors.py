"""The format of safetensors, and folders of such files in the layout of Hugging Face, or of accelerate.

A file is the length of its header (8 bytes), the header in JSON, and the values: of each tensor in a
range that the header names, one behind the other, without holes. A folder that accelerate's disk offload
made has a file for each tensor, of its values alone, and an index of types and shapes. Headers and
indexes come from anywhere: nothing that one says is believed before it was compared with the file.
Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.core.errors import ConfigError, DamagedError, TransferError, transfer_error
from penstock.core.files import given_paths, open_regular, parse_json
from penstock.core.units import MIB, round_up

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
ALIGNMENT_BYTES: Final = 4096
"""Multiple at which tensors that are written here begin, as far as the format allows."""
OFFLOAD_NAME: Final = "index.json"
"""Name of the index that accelerate's disk offload makes."""
PART_SUFFIX: Final = ".safetensors.part"
"""End of the names of files that are being written here, until all are complete."""
_SUFFIX: Final = ".safetensors"
_MOST_HEADER_BYTES: Final = 100 * MIB
_LENGTH_BYTES: Final = 8
ITEM_BYTES: Final = {
    **{f"{kind}{8 * size}": size for kind in "IU" for size in (1, 2, 4, 8)},
    **{"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "BOOL": 1, "C64": 8},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}
"""Bytes of an element, by the code of its type."""
_OFFLOAD_CODES: Final = {
    **{
        f"{kind}{size}": f"{kind[0].upper()}{size}"
        for kind in ("int", "uint")
        for size in (8, 16, 32, 64)
    },
    **{f"float{size}": f"F{size}" for size in (16, 32, 64)},
    **{"bfloat16": "BF16", "bool": "BOOL", "complex64": "C64"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
}
"""Codes of types, by their names in accelerate's index."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: Its name.
        code: Code of its type.
        shape: Its shape.
        begin: Offset of its first byte in the file.
        nbytes: Length of its values.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file whose header was checked.

    Attributes:
        path: Its path.
        size_bytes: Its length.
        tensors: Its tensors, in the order of the file.
    """

    path: str
    size_bytes: int
    tensors: tuple[StoredTensor, ...]


def open_source(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[WeightFile]:
    """Read the headers of a file, of several, or of a folder as of Hugging Face.

    Args:
        source: A ``.safetensors`` file; a list of them; or a folder, which has an index
            (``model.safetensors.index.json``), or ``model.safetensors``, or else any files of that
            suffix, or else those of accelerate's disk offload (``index.json``).

    Returns:
        The files; no name is in two of them.

    Raises:
        ConfigError: There are none, or a name is in two.
        DamagedError: A header is damaged, a file does not have what the index says, or a save into the
            folder was not completed.
        TransferError: A file cannot be read.
    """
    paths = given_paths(source, "source of weights")
    folder = offload_folder(source)
    if folder is not None:
        return read_offloaded(folder, _read_json(os.path.join(folder, OFFLOAD_NAME)))
    expected: Mapping[str, str] | None = None
    if len(paths) == 1 and os.path.isdir(paths[0]):
        folder = paths[0]
        names = os.listdir(folder)
        part = next((name for name in sorted(names) if name.endswith(PART_SUFFIX)), None)
        if part is not None:
            raise DamagedError(
                f"{folder!r}: a save there was not completed, or is not yet; {part!r} is of it. If its"
                " process has ended, delete the folder and save again",
                path=folder,
            )
        if INDEX_NAME in names:
            expected = _read_index(folder, names)
            found = sorted(set(expected.values()))
        elif SINGLE_NAME in names:
            found = [SINGLE_NAME]
        else:
            found = sorted(name for name in names if name.endswith(_SUFFIX))
        paths = tuple(os.path.join(folder, name) for name in found)
        if not paths:
            raise ConfigError(
                f"{folder!r} has no {SINGLE_NAME}, no index and no other {_SUFFIX} file"
            )
    files = [read_header(path) for path in paths]
    places: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in places:
                raise ConfigError(
                    f"{tensor.name!r} is in {places[tensor.name]!r} and in {file.path!r}"
                )
            places[tensor.name] = file.path
    for name, base in (expected or {}).items():
        if name not in places or os.path.basename(places[name]) != base:
            raise DamagedError(
                f"{paths[0]!r}: the index says that {name!r} is in {base!r}, and it is not: the folder is"
                " incomplete, or of two models; fetch it again",
                path=os.path.dirname(paths[0]),
            )
    return files


def offload_folder(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> str | None:
    """Return the path of a source if it is a folder that accelerate's disk offload made, else None."""
    paths = given_paths(source, "source of weights")
    if len(paths) != 1 or not os.path.isdir(paths[0]):
        return None
    names = os.listdir(paths[0])
    is_other = any(name.endswith((_SUFFIX, PART_SUFFIX, INDEX_NAME)) for name in names)
    return paths[0] if OFFLOAD_NAME in names and not is_other else None


def read_offloaded(folder: str, index: Any) -> list[WeightFile]:
    """Return the files of tensors that accelerate has offloaded.

    Args:
        folder: Where those without a safetensors file are.
        index: Facts of each tensor, by its name: ``dtype`` and ``shape``, or ``safetensors_file`` and
            ``weight_name``.

    Raises:
        ConfigError: A type is not known here.
        DamagedError: A file does not have what the index says.
        TransferError: A file cannot be read.
    """
    if not isinstance(index, dict):
        raise DamagedError(f"the index of {folder!r} is no object", path=folder)
    found: list[WeightFile] = []
    names: dict[str, dict[str, str]] = {}
    for name, said in index.items():
        facts = said if isinstance(said, dict) else {}
        source = facts.get("safetensors_file")
        if isinstance(source, str):
            names.setdefault(source, {})[str(facts.get("weight_name", name))] = name
        else:
            found.append(_offloaded(folder, name, facts))
    for path, those in names.items():
        file = read_header(path)
        tensors = tuple(
            replace(each, name=those[each.name]) for each in file.tensors if each.name in those
        )
        found.append(replace(file, tensors=tensors))
        if len(tensors) < len(those):
            raise DamagedError(f"{path!r} has not all that the index says", path=path)
    return found


def _offloaded(folder: str, name: str, facts: Mapping[str, Any]) -> WeightFile:
    path = os.path.join(folder, f"{name}.dat")
    if os.path.basename(path) != f"{name}.dat":
        raise DamagedError(
            f"the index of {folder!r} names {name!r}, which is elsewhere", path=folder
        )
    shape, kind = facts.get("shape"), facts.get("dtype")
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise DamagedError(
            f"the index of {folder!r} says that {name!r} has shape {shape!r}", path=folder
        )
    code = _OFFLOAD_CODES.get(kind) if isinstance(kind, str) else None
    if code is None:
        raise ConfigError(f"{path!r} is of type {kind!r}, which is not known here")
    try:
        fd = open_regular(path, os.O_RDONLY, 0)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
    except TransferError:
        raise
    except OSError as error:
        raise _unread(path, error) from error
    nbytes = ITEM_BYTES[code] * math.prod(shape)
    if size != nbytes:
        raise DamagedError(
            f"{path!r} has {size} bytes, and by the index {nbytes}: offload the model again",
            path=path,
        )
    return WeightFile(path, size, (StoredTensor(name, code, tuple(shape), 0, nbytes),))


def read_header(path: str) -> WeightFile:
    """Read and check the header of a file.

    Raises:
        DamagedError: It does not fit the file, or breaks a rule of the format.
        TransferError: The file cannot be read.
    """
    try:
        fd = open_regular(path, os.O_RDONLY, 0)
        try:
            size = os.fstat(fd).st_size
            length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
            if size < _LENGTH_BYTES or not 2 <= length <= min(
                _MOST_HEADER_BYTES, size - _LENGTH_BYTES
            ):
                raise _damaged(path, f"it has {size} bytes, and its header would have {length}")
            text = os.pread(fd, length, _LENGTH_BYTES)
        finally:
            os.close(fd)
    except TransferError:
        raise
    except OSError as error:
        raise transfer_error(
            errno=error.errno or 0, op="read", path=path, offset_bytes=0, nbytes=_LENGTH_BYTES
        ) from error
    try:
        header = parse_json(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise _damaged(path, f"its header does not parse: {error}") from error
    if not isinstance(header, dict) or len(text) != length:
        raise _damaged(path, "its header is no object")
    said = header.pop("__metadata__", None)
    said = {} if said is None else said
    if not isinstance(said, dict) or not all(isinstance(each, str) for each in said.values()):
        raise _damaged(path, "its metadata is no object of strings")
    start = _LENGTH_BYTES + length
    tensors = [_tensor(path, name, facts, start) for name, facts in header.items()]
    tensors.sort(key=lambda each: (each.begin, each.nbytes))
    at = start
    for tensor in tensors:
        if tensor.begin != at:
            raise _damaged(
                path,
                f"{tensor.name!r} begins at {tensor.begin}, and what is before it ends at {at}",
            )
        at += tensor.nbytes
    if at != size:
        raise _damaged(path, f"its values end at {at}, and the file at {size}")
    return WeightFile(path, size, tuple(tensors))


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{name!r} is there twice")
        made[name] = value
    return made


def _tensor(path: str, name: str, facts: Any, start: int) -> StoredTensor:
    facts = facts if isinstance(facts, dict) else {}
    code, shape, span = (facts.get(each) for each in ("dtype", "shape", "data_offsets"))
    if not isinstance(shape, list) or not isinstance(span, list) or len(span) != 2:
        raise _damaged(path, f"{name!r} has shape {shape!r} and data_offsets {span!r}")
    if not all(type(each) is int and 0 <= each < 2**63 for each in (*shape, *span)):
        raise _damaged(path, f"{name!r} has shape {shape!r} and data_offsets {span!r}")
    if not isinstance(code, str) or code not in ITEM_BYTES:
        raise ConfigError(
            f"{path!r}: {name!r} is of type {code!r}, which is not known here; known are"
            f" {', '.join(ITEM_BYTES)}"
        )
    nbytes = ITEM_BYTES[code] * math.prod(shape)
    if span[1] - span[0] != nbytes:
        raise _damaged(path, f"{name!r} has {span[1] - span[0]} bytes, and {nbytes} by its shape")
    return StoredTensor(name, code, tuple(shape), start + span[0], nbytes)


def _damaged(path: str, why: str) -> DamagedError:
    return DamagedError(f"{path!r} is no intact safetensors file: {why}; fetch it again", path=path)


def _unread(path: str, error: OSError) -> TransferError:
    return transfer_error(errno=error.errno or 0, op="read", path=path, offset_bytes=0, nbytes=0)


def _read_json(path: str) -> Any:
    try:
        with open(path, "rb", opener=open_regular) as file:
            return parse_json(file.read(), object_pairs_hook=_unique)  # bytes: UTF-16 is JSON, too
    except TransferError:
        raise
    except OSError as error:
        raise _unread(path, error) from error
    except ValueError as error:
        raise DamagedError(f"{path!r} does not parse: {error}", path=path) from error


def _read_index(folder: str, names: Iterable[str]) -> dict[str, str]:
    """Return the name of the file of each tensor; all are among the names in the folder."""
    path = os.path.join(folder, INDEX_NAME)
    found = _read_json(path)
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files:
        raise DamagedError(f"{path!r} has no weight_map", path=path)
    for name in files.values():
        if (
            not isinstance(name, str)
            or os.path.basename(name) != name
            or not name.endswith(_SUFFIX)
        ):
            raise DamagedError(
                f"{path!r} names the file {name!r}, and not one of its folder", path=path
            )
    missing = sorted(set(files.values()) - set(names))
    if missing:
        raise DamagedError(
            f"{folder!r} has no {missing[0]!r}, which its index names"
            + (f", nor {len(missing) - 1} more" if len(missing) > 1 else "")
            + ": the folder is incomplete; fetch it again",
            path=folder,
        )
    return files


def header_of(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """Return the beginning of a file, up to a multiple of 4 KiB, where the values begin.

    Args:
        tensors: Name, code of the type and shape of each, in the order of the file.
    """
    made: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, code, shape in tensors:
        end = at + ITEM_BYTES[code] * math.prod(shape)
        made[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(made, separators=(",", ":")).encode()
    length = round_up(_LENGTH_BYTES + len(text), ALIGNMENT_BYTES) - _LENGTH_BYTES
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
