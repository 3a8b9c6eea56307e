"""Manifest of a checkpoint. The specification is ``docs/checkpoint-format.md``.

Frozen values that check themselves, before anything is allocated or opened because of them.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from penstock.checkpoint.values import DTYPES, MAX_DEPTH, FormError, Json, items_of, whole
from penstock.core.files import parse_json
from penstock.core.units import KIB, MIB

VERSION: Final = 3
"""Version of the format."""
CODECS: Final = ("exponent", "zero-value", "zero-value+exponent", "narrow")
"""Codecs that a tensor may be encoded with; all are lossless."""
FRAME_BYTES: Final = MIB
"""Bytes of an encoded tensor in each of its frames but the last."""
LEAST_PART: Final = 32
"""A frame is at least as long as its decoded bytes divided by this."""
FILE_NAME: Final = "manifest.json"
MAX_BYTES: Final = 64 * MIB
"""Greatest length of a manifest: some 300 000 tensors, or 3 TB of data."""
BLOCK_BYTES: Final = 2 * MIB
"""Bytes covered by one checksum."""

_MIN_BLOCK_BYTES: Final = 4 * KIB
_MAX_BLOCK_BYTES: Final = 16 * MIB
_MAX_DIMS: Final = 64
_MAX_JSON_DEPTH: Final = 4 * MAX_DEPTH
"""A container takes an array, an object and two arrays at most."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SUM: Final = re.compile(r"[0-9a-f]{32}")
_TAIL: Final = b',"sum":"%s"}\n'
_TAIL_BYTES: Final = len(_TAIL % (b"0" * 32))


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A data file.

    Attributes:
        name: Its name in the checkpoint's directory.
        nbytes: Its exact length.
        sums: XXH3 (128 bits, hexadecimal) of each of its blocks.
    """

    name: str
    nbytes: int
    sums: tuple[str, ...]

    def has(self, index: int, checksum: str) -> bool:
        """Return whether a block, by its number, has this checksum."""
        return index < len(self.sums) and self.sums[index] == checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor: an owner of bytes in a file, or a view of an owner.

    Attributes:
        name: Its name in the header of the file.
        dtype: Torch's name of its element type.
        shape: Its sizes.
        strides: Strides in elements; None: those of a contiguous tensor.
        file: Number of the file; -1 for a view.
        offset_bytes: Its offset in the file.
        owner: Number of the tensor of which it is a view; -1 if it is none.
        skip_bytes: Its offset in the owner's bytes.
        codec: Its codec; empty if it is stored as it is.
        stored_bytes: Its length in the file if it is encoded.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    file: int = -1
    offset_bytes: int = 0
    owner: int = -1
    skip_bytes: int = 0
    codec: str = ""
    stored_bytes: int = 0

    @property
    def file_bytes(self) -> int:
        """Length in its file."""
        return self.stored_bytes if self.codec else self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def extent_bytes(self) -> int:
        """Bytes of memory from its first element to its last."""
        if self.strides is None or not self.nbytes:
            return self.nbytes
        return extent_bytes(self.shape, self.strides, DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Manifest of a checkpoint.

    Attributes:
        files: Its data files.
        tensors: Its tensors, by number.
        state: Its other values, as JSON (:mod:`penstock.checkpoint.values`).
        facts: Facts on the checkpoint: when it was saved, the step, and what the caller adds.
        block_bytes: Length of the blocks, each of which has a checksum.
    """

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    state: Json
    facts: Mapping[str, Json] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        """Raise FormError if it breaks a rule of the format."""
        size = self.block_bytes
        if not _MIN_BLOCK_BYTES <= size <= _MAX_BLOCK_BYTES or size & (size - 1):
            raise FormError(f"blocks of {size} bytes are none of this format")
        names = {each.name.lower() for each in self.files}
        if len(names) < len(self.files) or FILE_NAME in names:
            raise FormError("two files have the same name")
        for file in self.files:
            _check_file(file, size)
        for tensor in self.tensors:
            _check_tensor(tensor, self)
        _check_places(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(each.nbytes for each in self.files)

    def encode(self) -> bytes:
        """Return the content of its file. Raises FormError if that would be too long."""
        document = {
            "penstock_checkpoint": VERSION,
            "block_bytes": self.block_bytes,
            "checksum": "xxh3-128",
            "facts": dict(self.facts),
            "files": [
                {"name": each.name, "nbytes": each.nbytes, "sums": list(each.sums)}
                for each in self.files
            ],
            "tensors": [_tensor_to(each) for each in self.tensors],
            "state": self.state,
        }
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
        data = text.encode("ascii")[:-1]
        data += _TAIL % xxhash.xxh3_128_hexdigest(data).encode("ascii")
        if len(data) > MAX_BYTES:
            raise FormError(
                f"what is no tensor takes {len(data)} bytes of JSON, more than {MAX_BYTES}: make arrays"
                " of long lists of numbers"
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode it. Raises FormError if it is torn, damaged, or breaks a rule of the format."""
        body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
        if tail != _TAIL % xxhash.xxh3_128_hexdigest(body).encode("ascii"):
            raise FormError("it is torn or damaged: its checksum is not that of its bytes")
        document = _parse(data)
        version = whole(document.get("penstock_checkpoint"))
        if version != VERSION:
            raise FormError(f"its version is {version}; this Penstock reads {VERSION}")
        if document.get("checksum") != "xxh3-128":
            raise FormError(f"its checksums are {document.get('checksum')!r}, known are 'xxh3-128'")
        facts = document.get("facts")
        if not isinstance(facts, dict):
            raise FormError("it has no facts")
        _check_depth([facts, document.get("state")])
        return cls(
            files=tuple(_file_from(each) for each in _objects(document, "files")),
            tensors=tuple(_tensor_from(each) for each in _objects(document, "tensors")),
            state=document.get("state"),
            facts=facts,
            block_bytes=whole(document.get("block_bytes")),
        )


def blocks_of(nbytes: int, block_bytes: int) -> range:
    """Return the offsets at which the blocks of a file begin."""
    return range(0, nbytes, block_bytes)


def _check_file(file: FileEntry, block_bytes: int) -> None:
    if not _NAME.fullmatch(file.name):
        raise FormError(
            f"{file.name[:80]!r} is no name of a data file: it could leave the directory"
        )
    if file.nbytes >= 2**63 or len(file.sums) != len(blocks_of(file.nbytes, block_bytes)):
        raise FormError(f"{file.name!r} of {file.nbytes} bytes has {len(file.sums)} checksums")
    for each in file.sums:
        if not _SUM.fullmatch(each):
            raise FormError(f"{each[:40]!r} is no checksum")


def _check_tensor(tensor: TensorEntry, manifest: Manifest) -> None:
    if tensor.dtype not in DTYPES:
        raise FormError(f"{tensor.name!r} is of {tensor.dtype[:40]!r}, which is not known")
    if len(tensor.shape) > _MAX_DIMS or math.prod(filter(None, tensor.shape)) >= 2**63:
        raise FormError(f"{tensor.name!r} has a shape that no tensor has")
    if tensor.strides is not None and (
        len(tensor.strides) != len(tensor.shape) or max(tensor.strides, default=0) >= 2**63
    ):
        raise FormError(f"{tensor.name!r} has strides that no tensor has")
    if tensor.owner < 0:
        if tensor.file >= len(manifest.files) or tensor.file < 0:
            raise FormError(f"{tensor.name!r} is in file {tensor.file}, which there is not")
        if tensor.codec:
            _check_codec(tensor)
        if tensor.offset_bytes + tensor.file_bytes > manifest.files[tensor.file].nbytes:
            raise FormError(f"{tensor.name!r} is longer than its file")
        if tensor.strides is not None and not is_dense(tensor.shape, tensor.strides):
            raise FormError(f"{tensor.name!r} has strides with holes or overlaps")
        return
    owner = manifest.tensors[tensor.owner] if tensor.owner < len(manifest.tensors) else None
    if owner is None or owner.owner >= 0 or owner.strides is not None:
        raise FormError(f"{tensor.name!r} is a view of no owner")
    if tensor.skip_bytes % DTYPES[tensor.dtype].itemsize or (
        tensor.skip_bytes + tensor.extent_bytes > owner.nbytes
    ):
        raise FormError(f"{tensor.name!r} does not lie within {owner.name!r}")


def _check_codec(tensor: TensorEntry) -> None:
    """Check that the memory allocated for a tensor is in proportion to its bytes in the file."""
    if tensor.codec not in CODECS:
        raise FormError(
            f"{tensor.name!r} is encoded with {tensor.codec[:40]!r}, known are {', '.join(CODECS)}"
        )
    if tensor.stored_bytes * LEAST_PART < tensor.nbytes:
        raise FormError(
            f"{tensor.name!r}: {tensor.stored_bytes} bytes cannot stand for {tensor.nbytes}"
        )


def _check_places(manifest: Manifest) -> None:
    """Check that owners do not overlap, so that memory allocated is in proportion to the files."""
    places = sorted(
        (each.file, each.offset_bytes, each.file_bytes, each.name)
        for each in manifest.tensors
        if each.owner < 0 and each.file_bytes
    )
    for one, other in itertools.pairwise(places):
        if one[0] == other[0] and one[1] + one[2] > other[1]:
            raise FormError(f"{one[3]!r} and {other[3]!r} overlap")


def extent_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes of memory from a tensor's first element to its last; no size may be 0."""
    reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return (reach + 1) * itemsize


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements lie in memory without gaps or overlaps, in any order."""
    expected = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def _parse(data: bytes) -> dict[str, Json]:
    try:
        document = parse_json(
            data, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite
        )
    except ValueError as error:
        raise FormError(f"it is no JSON of this format: {str(error)[:80]}") from None
    if not isinstance(document, dict):
        raise FormError("it is no object")
    return document


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise FormError("an object has two members of one name")
    return made


def _check_depth(level: list[Json]) -> None:
    """Refuse nesting deeper than any value's, before recursive functions walk it."""
    for _ in range(_MAX_JSON_DEPTH):
        level = [each for each in level if isinstance(each, dict | list)]
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise FormError(f"values are nested more than {MAX_DEPTH} deep")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise FormError(f"{text[:40]} is no number of 64 bits")
    return number


def _no_constant(text: str) -> Json:
    raise FormError(f"{text} is no JSON")


def _objects(document: Mapping[str, Json], name: str) -> list[dict[str, Json]]:
    found = document.get(name)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise FormError(f"it has no list of {name}")
    return found


def _file_from(entry: Mapping[str, Json]) -> FileEntry:
    return FileEntry(
        name=_text(entry.get("name")),
        nbytes=whole(entry.get("nbytes")),
        sums=tuple(_text(each) for each in items_of(entry.get("sums"))),
    )


def _tensor_to(tensor: TensorEntry) -> dict[str, Json]:
    made: dict[str, Any] = {"name": tensor.name, "dtype": tensor.dtype, "shape": [*tensor.shape]}
    if tensor.strides is not None:
        made["strides"] = [*tensor.strides]
    if tensor.codec:
        made |= {"codec": tensor.codec, "stored": tensor.stored_bytes}
    if tensor.owner < 0:
        return made | {"file": tensor.file, "offset": tensor.offset_bytes}
    return made | {"owner": tensor.owner, "skip": tensor.skip_bytes}


def _tensor_from(entry: Mapping[str, Json]) -> TensorEntry:
    strides = entry.get("strides")
    is_view = "owner" in entry
    is_encoded = "codec" in entry
    if is_encoded and (is_view or not entry["codec"]):
        raise FormError("a tensor is encoded with nothing, or a view is, which only owners are")
    return TensorEntry(
        name=_text(entry.get("name")),
        dtype=_text(entry.get("dtype")),
        shape=tuple(whole(each) for each in items_of(entry.get("shape"))),
        strides=None if strides is None else tuple(whole(each) for each in items_of(strides)),
        file=-1 if is_view else whole(entry.get("file")),
        offset_bytes=0 if is_view else whole(entry.get("offset")),
        owner=whole(entry.get("owner")) if is_view else -1,
        skip_bytes=whole(entry.get("skip")) if is_view else 0,
        codec=_text(entry.get("codec")) if is_encoded else "",
        stored_bytes=whole(entry.get("stored")) if is_encoded else 0,
    )


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise FormError(f"{str(value)[:40]!r} stands where a string must")
    return value
