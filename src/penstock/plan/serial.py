"""Strict conversion of frozen dataclasses to JSON and back: unknown or missing fields are errors.

A field with the metadata ``MAY_BE_OMITTED``, which an older document does not have, gets its default.

It supports ``int``, ``float``, ``bool``, ``str``, string enums, ``X | None``, ``tuple[X, ...]`` and
dataclasses of these. A document carries its kind and version beside its fields.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
from collections.abc import Mapping
from typing import Final, TypeVar, get_args, get_origin, get_type_hints

from penstock.core.errors import PenstockError, PlanError
from penstock.core.files import parse_json

T = TypeVar("T")
MAY_BE_OMITTED: Final[Mapping[str, object]] = {"may be omitted": True}
"""Metadata of a dataclass field, which needs a default."""


def dump(kind: str, version: int, value: object) -> str:
    """Return a JSON document: ``{"penstock": kind, "version": version, ...fields}``."""
    head = {"penstock": kind, "version": version}
    return json.dumps({**head, **encode_fields(value)}, indent=1)


def load(cls: type[T], text: str, *, kind: str, version: int, source: str = "") -> T:
    """Parse a document that ``dump`` wrote.

    Args:
        cls: The dataclass to make.
        text: The document.
        kind: The kind that the document must state.
        version: The only version that is accepted.
        source: Path of the text, for errors.

    Raises:
        PlanError: Not JSON, another kind or version, or a field that is unknown, missing or
            malformed; the message names the source and the field.
    """
    where = f"{kind} {source!r}" if source else kind
    try:
        data = parse_json(text)
    except ValueError as error:
        raise PlanError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("penstock", None) != kind:
        raise PlanError(f"{where}: not a Penstock {kind}; its field 'penstock' must say {kind!r}")
    found = data.pop("version", None)
    if found != version:
        raise PlanError(f"{where}: field 'version' is {found!r}, this Penstock reads {version}")
    try:
        return _decode_fields(cls, data, where)
    except PlanError:
        raise
    except PenstockError as error:  # a check of the value itself: add the source
        raise PlanError(f"{where}: {error}") from error


def encode_fields(value: object) -> dict[str, object]:
    """Convert a dataclass to plain data for ``json``."""
    return {name: _encode(getattr(value, name)) for name in _hints(type(value))}


def _encode(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return encode_fields(value)
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(kind: type, data: object, where: str) -> object:
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise PlanError(f"{where}: {data!r} is not an object")
        return _decode_fields(kind, data, where)
    origin = get_origin(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise PlanError(f"{where}: {data!r} is not a list")
        item = get_args(kind)[0]
        return tuple(_decode(item, value, f"{where}[{i}]") for i, value in enumerate(data))
    if origin is types.UnionType:
        return None if data is None else _decode(get_args(kind)[0], data, where)
    if issubclass(kind, enum.StrEnum):
        names = [str(member) for member in kind]
        if data not in names:
            raise PlanError(f"{where}: {data!r} is none of {', '.join(names)}")
        return kind(data)
    return _decode_scalar(kind, data, where)


def _decode_scalar(kind: type, data: object, where: str) -> object:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        data = _float(data)
    if type(data) is not kind:
        raise PlanError(f"{where}: {data!r} is {type(data).__name__}, not {kind.__name__}")
    if isinstance(data, float) and not math.isfinite(data):
        raise PlanError(f"{where}: {data!r} is not a finite number")
    return data


def _float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _decode_fields(cls: type[T], data: dict[str, object], where: str) -> T:
    hints = _hints(cls)
    for name in data:
        if name not in hints:
            raise PlanError(f"{where}: unknown field {name!r}; known are {', '.join(hints)}")
    for name in hints:
        if name not in data and name not in _omittable[cls]:
            raise PlanError(f"{where}: field {name!r} is missing")
    return cls(**{name: _decode(hints[name], data[name], f"{where}.{name}") for name in data})


def _hints(cls: type) -> dict[str, type]:
    found = _known.get(cls)
    if found is None:
        hints = get_type_hints(cls)
        found = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
        _known[cls] = found
        _omittable[cls] = {
            f.name for f in dataclasses.fields(cls) if MAY_BE_OMITTED.items() <= f.metadata.items()
        }
    return found


_known: dict[type, dict[str, type]] = {}
_omittable: dict[type, set[str]] = {}
