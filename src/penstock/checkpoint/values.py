"""Values other than tensors as JSON, without loss. Element types and their names.

[Note: values in JSON]
    ``null``, ``true``, ``false``, strings, whole numbers below 2**53 and finite floats stand for
    themselves, arrays for lists, and objects for dictionaries whose keys are strings that do not begin
    with ``$``. Everything else is an object of one member, whose name says what it is: ``$int`` (decimal
    digits), ``$float`` (infinite or not a number: its 8 bytes, big-endian, in hexadecimal), ``$bytes``
    (base64), ``$tuple`` (an array), ``$dict`` (an array of pairs: other keys), ``$tensor`` (a number:
    that tensor of the manifest), ``$array`` (the same, as a NumPy array), ``$scalar`` (a NumPy scalar:
    its dtype's string and its bytes in base64), ``$size`` (a torch.Size: an array), ``$dtype`` (a torch
    dtype's name) and ``$device``. Version 3 of the format has four more: ``$set`` and ``$frozenset``
    (arrays), ``$complex`` (its two parts) and ``$path`` (a string: a pathlib path). Nothing of it names
    a class or a function: reading it runs no code.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import json
import random
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Kind:
    """An element type.

    Attributes:
        dtype: Type in torch.
        code: Code in safetensors of the stored parts.
        parts: Number of parts of an element: 1, or 2 for a complex number.
    """

    dtype: torch.dtype
    code: str
    parts: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


_CODES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    # readers know no code for these, or only of late: parts of an element are one more dimension
    "complex64": "F32",
    "complex128": "F64",
    "float8_e4m3fnuz": "U8",
    "float8_e5m2fnuz": "U8",
    "float8_e8m0fnu": "U8",
}

DTYPES: Final = {
    name: Kind(getattr(torch, name), code, 2 if name.startswith("complex") else 1)
    for name, code in _CODES.items()
    if hasattr(torch, name)
}
"""Element types by torch's name."""


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of an element type, without the module."""
    return str(dtype).removeprefix("torch.")


_ADVICE: Final[tuple[tuple[Any, str], ...]] = (
    (enum.Enum, "give its .value, and make it anew of that"),
    (torch.Generator, "give its get_state(), and set_state() after the load"),
    (np.random.Generator, "give its bit_generator.state, and set that after the load"),
    (np.random.RandomState, "give list(its get_state()), and set_state() after the load"),
    (random.Random, "give its getstate(), and setstate() after the load"),
    (argparse.Namespace, "give vars(it)"),
    ((datetime.date, datetime.time), "give its isoformat()"),
    (datetime.timedelta, "give its total_seconds()"),
    (
        (decimal.Decimal, fractions.Fraction, np.datetime64, np.timedelta64, PurePath),
        "give str(it)",
    ),
    ((range, slice), "give its start, stop and step"),
    ((bytes, bytearray, memoryview), "give bytes(it)"),
    (deque, "give list(it)"),
    (Mapping, "give dict(it)"),
    (list, "give list(it)"),
    (Set, "give set(it)"),
    (str, "give str(it)"),
    (int, "give int(it)"),
    (float, "give float(it)"),
)


def advice_on(value: object) -> str:
    """Return advice, in a few words, on a value that has no form in JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "give dataclasses.asdict(it), and make it anew of that"
    if isinstance(value, tuple):
        return "give it._asdict()" if hasattr(value, "_asdict") else "give tuple(it)"
    for kind, advice in _ADVICE:
        if isinstance(value, kind):
            return advice
    if callable(value):
        return "leave it out: code is no state"
    return "give its state_dict(), convert it, or leave it out"


Json: TypeAlias = Any
Path: TypeAlias = tuple[str, ...]
"""Keys on the way to a value."""

MAX_DEPTH: Final = 64
"""Most containers within one another, in a state and in its JSON."""
_EXACT: Final = 2**53
"""Whole numbers below this are exact in any reader of JSON."""
_MAX_DIGITS: Final = 4000
_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_SCALAR_KINDS: Final = "biufcSU"
_SETS: Final = {set: "$set", frozenset: "$frozenset"}
_OTHERS: Final = frozenset({*_SETS.values(), "$complex", "$path"})
"""Tags of sets, complex numbers and paths."""
_KEYS: Final = (
    str,
    int,
    float,
    bool,
    type(None),
    tuple,
    bytes,
    complex,
    frozenset,
    type(FilePath()),
)
_SCALAR: Final = re.compile(rf"[<>|=]?[{_SCALAR_KINDS}]\d{{1,5}}", re.ASCII)
_INT: Final = re.compile(rf"-?[0-9]{{1,{_MAX_DIGITS}}}")
_FLOAT: Final = re.compile(r"[0-9a-fA-F]{16}")
_WIDE: Final = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"


class FormError(ValueError):
    """JSON that is not in this format. The caller knows the file, and names it."""


def shown(path: Path) -> str:
    """Return a path of keys as it is written in errors and names of tensors."""
    return ".".join(path) or "the state"


def encode(
    value: object,
    add: Callable[[Path, torch.Tensor | NDArray[Any]], int],
    path: Path = (),
) -> Json:
    """Return a state as JSON.

    Args:
        value: The state: nested dictionaries, lists and tuples of values as in [Note: values in JSON].
        add: Called with each tensor or array; returns the number that stands for it.
        path: Keys on the way to it.

    Raises:
        CheckpointError: Something in it has no such form; names its path of keys.
    """
    if len(path) > MAX_DEPTH:
        raise CheckpointError(
            f"{shown(path[:4])}... is nested more than {MAX_DEPTH} deep; flatten it, or leave it out"
        )
    if isinstance(value, torch.Tensor):
        return {"$tensor": add(path, value)}
    if isinstance(value, np.ndarray):
        return {"$array": add(path, value)}
    kind = type(value)
    if kind is list or kind is tuple or isinstance(value, torch.Size):
        items: Any = value
        made = [encode(each, add, (*path, str(i))) for i, each in enumerate(items)]
        if kind is list:
            return made
        return {"$tuple" if kind is tuple else "$size": made}
    if kind in _DICTS:
        return _dict(value, add, path)  # type: ignore[arg-type]
    return _plain(value, path)


def _dict(
    value: Mapping[Any, Any],
    add: Callable[[Path, torch.Tensor | NDArray[Any]], int],
    path: Path,
) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(each, add, (*path, key)) for key, each in value.items()}
    pairs = []
    for key, each in value.items():
        here = (*path, str(key))
        pairs.append([_key(key, here, "as a dictionary's key"), encode(each, add, here)])
    return {"$dict": pairs}


def _set(value: set[Any] | frozenset[Any], path: Path) -> Json:
    made = [_key(each, path, "in a set") for each in value]
    return {_SETS[type(value)]: sorted(made, key=json.dumps)}  # the same for the same set


def _key(key: object, path: Path, how: str) -> Json:
    """Encode a key, which is found by its hash."""
    if type(key) not in _KEYS:
        raise _refused(key, path, how)
    made = encode(key, _no_tensor, path)
    try:
        key_of(made, len(path))
    except FormError as error:
        raise CheckpointError(f"{shown(path)}: {error}; make it simpler, or leave it out") from None
    return made


def _no_tensor(path: Path, _: object) -> int:
    raise CheckpointError(f"{shown(path)}: a tensor cannot be part of a key, or in a set")


def _plain(value: object, path: Path) -> Json:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int or kind is float:
        return _number(value, path)  # type: ignore[arg-type]
    made = _tagged(value, path)
    if made is None:
        raise _refused(value, path, "as a value")
    return made


def _tagged(value: object, path: Path) -> Json:
    """Encode a value as one JSON object; return None if there is no form for it."""
    kind = type(value)
    made: Json = None
    if isinstance(value, bytes) and kind is bytes:
        made = {"$bytes": base64.b64encode(value).decode("ascii")}
    elif isinstance(value, complex) and kind is complex:
        made = {"$complex": [_number(value.real, path), _number(value.imag, path)]}
    elif isinstance(value, set | frozenset) and kind in _SETS:
        made = _set(value, path)
    elif isinstance(value, FilePath):
        made = {"$path": str(value)}
    elif isinstance(value, torch.dtype) and name_of(value) in DTYPES:
        made = {"$dtype": name_of(value)}
    elif isinstance(value, torch.device):
        made = {"$device": str(value)}
    elif isinstance(value, np.generic) and value.dtype.kind in _SCALAR_KINDS:
        made = {"$scalar": [value.dtype.str, base64.b64encode(_bytes_of(value)).decode("ascii")]}
    return made


def _bytes_of(value: np.generic) -> bytes:
    """Return the bytes of a NumPy scalar; an empty string has none, though NumPy returns some."""
    return value.tobytes()[: value.dtype.itemsize]


def _number(value: int | float, path: Path) -> Json:
    if isinstance(value, int):
        return value if abs(value) < _EXACT else {"$int": _digits(value, path)}
    if value - value == 0.0:  # neither infinite nor not a number
        return value
    return {"$float": struct.pack(">d", value).hex()}


def _digits(value: int, path: Path) -> str:
    if value.bit_length() > 3 * _MAX_DIGITS:
        raise CheckpointError(
            f"{shown(path)}: a whole number of {value.bit_length()} bits is too long"
        )
    return str(value)


def _refused(value: object, path: Path, how: str) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"{shown(path)}: {kind.__module__}.{kind.__qualname__} {how} has no form in a checkpoint, which"
        " holds tensors, arrays, numbers, strings, bytes, paths, None, and lists, tuples, sets and"
        f" dictionaries of them (nothing is pickled): {advice_on(value)}"
    )


def decode(
    document: Json, tensor: Callable[[int], Any], array: Callable[[int], Any], depth: int = 0
) -> Any:
    """Rebuild the argument of ``encode``.

    Args:
        document: Its JSON.
        tensor: Returns the tensor of a number.
        array: Returns the array of a number.
        depth: Number of containers around it.

    Raises:
        FormError: It is not in this format.
    """
    if depth > MAX_DEPTH + 1:
        raise FormError(f"values are nested more than {MAX_DEPTH} deep")
    if isinstance(document, list):
        return [decode(each, tensor, array, depth + 1) for each in document]
    if not isinstance(document, dict):
        return document
    tag = tag_of(document)
    if tag is None:
        return {key: decode(each, tensor, array, depth + 1) for key, each in document.items()}
    return _decode_tagged(tag, document[tag], tensor, array, depth)


def _decode_tagged(
    tag: str, body: Json, tensor: Callable[[int], Any], array: Callable[[int], Any], depth: int
) -> Any:
    if tag in ("$tensor", "$array"):
        return (tensor if tag == "$tensor" else array)(whole(body))
    if tag in ("$tuple", "$size"):
        if tag == "$size":
            return torch.Size([_length(each) for each in items_of(body)])
        return tuple(decode(each, tensor, array, depth + 1) for each in items_of(body))
    if tag == "$dict":
        made = {
            key_of(key, depth + 1): decode(each, tensor, array, depth + 1)
            for key, each in pairs_of(body)
        }
        if len(made) < len(body):
            raise FormError("a dictionary has two entries of one key")
        return made
    return _other(tag, body, depth) if tag in _OTHERS else _atom(tag, body)


def has_tensors(document: Json) -> bool:
    """Return whether JSON refers to tensors or arrays."""
    if isinstance(document, list):
        return any(map(has_tensors, document))
    if not isinstance(document, dict):
        return False
    return "$tensor" in document or "$array" in document or any(map(has_tensors, document.values()))


def tensor_of(document: Json) -> int | None:
    """Return the number of the tensor or array that JSON refers to; None if it is something else."""
    if isinstance(document, dict) and len(document) == 1:
        for tag in ("$tensor", "$array"):
            if type(document.get(tag)) is int and document[tag] >= 0:
                return int(document[tag])
    return None


def members_of(document: Json) -> dict[Any, Json] | None:
    """Return the members of an encoded dictionary by key; None if it is something else."""
    if not isinstance(document, dict):
        return None
    try:
        tag = tag_of(document)
        if tag is None:
            return document
        if tag == "$dict":
            return {key_of(key): each for key, each in pairs_of(document[tag])}
    except FormError:
        pass
    return None


def list_of(document: Json, kind: type) -> list[Json] | None:
    """Return the items of an encoded list or tuple; None if it is something else."""
    if kind is list:
        return document if isinstance(document, list) else None
    try:
        return items_of(document["$tuple"]) if isinstance(document, dict) else None
    except (FormError, KeyError):
        return None


def tag_of(document: Mapping[str, Json]) -> str | None:
    """Return the tag of a tagged value; None for a dictionary of strings. Raises FormError."""
    for key in document:
        if key.startswith("$"):
            if len(document) != 1:
                raise FormError(f"an object has {key!r} beside other members")
            return key
    return None


def items_of(body: Json) -> list[Json]:
    """Return an array. Raises FormError if it is none."""
    if not isinstance(body, list):
        raise FormError(f"{str(body)[:40]!r} stands where an array must")
    return body


def pairs_of(body: Json) -> list[tuple[Json, Json]]:
    """Return an array of pairs. Raises FormError if it is none."""
    found = []
    for pair in items_of(body):
        if len(items_of(pair)) != 2:
            raise FormError("a dictionary's entry is no pair")
        found.append((pair[0], pair[1]))
    return found


def key_of(document: Json, depth: int = 0) -> Any:
    """Decode a dictionary's key. Raises FormError."""
    key = decode(document, _no_number, _no_number, depth)
    try:
        hash(key)
    except TypeError:
        raise FormError(f"{str(document)[:40]!r} cannot be a dictionary's key") from None
    return key


def whole(body: Json) -> int:
    """Return a whole number that is not negative. Raises FormError if it is none."""
    if type(body) is not int or body < 0:
        raise FormError(f"{str(body)[:40]!r} stands where a whole number must")
    return body


def _length(body: Json) -> int:
    if whole(body) >= 2**63:
        raise FormError(f"{str(body)[:40]!r} is no length of a tensor")
    return int(body)


def _no_number(_: int) -> Any:
    raise FormError("a tensor stands in a dictionary's key")


def _atom(tag: str, body: Json) -> Any:
    try:
        match tag:
            case "$int" if isinstance(body, str) and _INT.fullmatch(body):
                return int(body)
            case "$float" if isinstance(body, str) and _FLOAT.fullmatch(body):
                return struct.unpack(">d", bytes.fromhex(body))[0]
            case "$bytes" if isinstance(body, str):
                return base64.b64decode(body, validate=True)
            case "$dtype" if isinstance(body, str):
                return DTYPES[body].dtype
            case "$device" if isinstance(body, str):
                return torch.device(body)
            case "$scalar" if isinstance(body, list) and len(body) == 2:
                return _scalar(body)
    except (ValueError, KeyError, TypeError, RuntimeError, binascii.Error):
        pass
    raise FormError(f"{tag!r} of {str(body)[:40]!r} is not known")


def _other(tag: str, body: Json, depth: int) -> Any:
    if tag == "$complex":
        parts = [_part(each) for each in items_of(body)]
        if len(parts) != 2:
            raise FormError(f"a complex number has {len(parts)} parts")
        return complex(*parts)
    if tag == "$path":
        if not isinstance(body, str) or "\0" in body:
            raise FormError(f"{str(body)[:40]!r} is no path")
        return FilePath(body)
    members = [key_of(each, depth + 1) for each in items_of(body)]
    found = set(members) if tag == "$set" else frozenset(members)
    if len(found) < len(members):
        raise FormError("a set has a member twice")
    return found


def _part(body: Json) -> float:
    part = decode(body, _no_number, _no_number, MAX_DEPTH)
    if type(part) is not float:
        raise FormError(f"{str(body)[:40]!r} is no part of a complex number")
    return part


def _scalar(body: list[Json]) -> Any:
    name, data = body
    if not isinstance(name, str) or not _SCALAR.fullmatch(name):  # NumPy would take much more
        raise FormError(f"a scalar of {str(name)[:40]!r} is not known")
    dtype, plain = np.dtype(name), base64.b64decode(data, validate=True)
    if dtype.itemsize > 2**16:
        raise FormError(f"a scalar of {dtype} is not known")
    if dtype.kind == "S":  # an array of NumPy would drop zeros at the end
        return np.bytes_(plain[: dtype.itemsize])
    if dtype.kind == "U":
        return np.str_(plain[: dtype.itemsize].decode(_WIDE, "surrogatepass"))
    return np.frombuffer(plain, dtype, 1)[0]
