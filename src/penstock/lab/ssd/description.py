"""Devices as TOML files, and the presets of Penstock.

A file has a table for each part of a :class:`.Device`, with every field of it, and a table ``sources``
that gives the source of each field, or of a whole table. A field that is unknown, missing or of another
type is an error that names it.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from penstock.core.errors import ConfigError
from penstock.core.files import parse_toml, read_text
from penstock.lab.ssd.device import Device

VERSION: Final = 1
_PRESETS: Final = "penstock.lab.ssd.devices"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """A device, and the sources of its values."""

    device: Device
    sources: tuple[tuple[str, str], ...]
    """(``table.field``, or ``table`` for all its fields that are not named; its source)."""

    def source_of(self, path: str) -> str:
        """Return the source of ``table.field``; ``""`` if there is none."""
        known = dict(self.sources)
        return known.get(path) or known.get(path.partition(".")[0], "")


def presets() -> tuple[str, ...]:
    """Return the names of the presets."""
    names = (Path(each.name) for each in files(_PRESETS).iterdir())
    return tuple(sorted(name.stem for name in names if name.suffix == ".toml"))


def load(name: str | Path) -> Device:
    """Load a preset by its name, or a device from a file. Raises ConfigError; see :func:`describe`."""
    return describe(name).device


def describe(name: str | Path) -> DeviceDescription:
    """Load a preset by its name, or a device from a file, with its sources.

    Raises:
        ConfigError: There is no such preset (the nearest is named), the file cannot be read, or its
            contents are invalid; the message names the file and the field.
    """
    text = str(name)
    if text in presets():
        content = (files(_PRESETS) / f"{text}.toml").read_text(encoding="utf-8")
        return parse(content, source=f"{text}.toml")
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        near = nearest(text, presets())
        raise ConfigError(
            f"unknown device {text!r}{near}; the presets are {', '.join(presets())}; or name a .toml file"
        )
    try:
        content = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the device file {text!r}: {error}") from error
    return parse(content, source=text)


def parse(text: str, *, source: str) -> DeviceDescription:
    """Parse a device file. Raises ConfigError that names ``source`` and the invalid field."""
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"device {source!r} is not TOML: {error}") from error
    where = f"device {source!r}"
    if data.pop("penstock", None) != "ssd":
        raise ConfigError(f"{where}: not a Penstock SSD; its field 'penstock' must be 'ssd'")
    version = data.pop("version", None)
    if version != VERSION:
        raise ConfigError(f"{where}: field 'version' is {version!r}; this Penstock reads {VERSION}")
    sources = data.pop("sources", {})
    try:
        device = decode(Device, data)
        return DeviceDescription(device, tuple(_sources(sources)))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def leaves(cls: type = Device) -> tuple[str, ...]:
    """Return ``table.field`` of all fields of a device file, except its name."""
    hints = get_type_hints(cls)
    return tuple(
        f"{table.name}.{field.name}"
        for table in fields(cls)
        if is_dataclass(hints[table.name])
        for field in fields(hints[table.name])
    )


def with_field(device: Device, path: str, value: object) -> Device:
    """Copy a device with one field changed.

    Args:
        device: The device, which stays as it is.
        path: ``table.field``.
        value: The value, as from a TOML file.

    Raises:
        ConfigError: There is no such field (the nearest is named), or the value is invalid.
    """
    if path not in leaves():
        raise ConfigError(f"unknown field {path!r}{nearest(path, leaves())}")
    table, _, name = path.partition(".")
    part = getattr(device, table)
    typed = _decode(get_type_hints(type(part))[name], value, path)
    return replace(device, **{table: replace(part, **{name: typed})})


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'optimstore'?"``, or ``""`` if no known word is similar."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def decode(cls: Callable[..., T], data: Mapping[str, object], where: str = "") -> T:
    """Decode a TOML table strictly into a frozen dataclass. Raises ConfigError that names the field."""
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for name in data:
        if name not in names:
            raise ConfigError(f"unknown field {where + name!r}{nearest(name, names)}")
    needed = [each.name for each in fields(cls) if each.default is MISSING]  # type: ignore[arg-type]
    missing = [where + name for name in needed if name not in data]
    if missing:
        raise ConfigError(f"field {missing[0]!r} is missing")
    return cls(**{name: _decode(hints[name], data[name], where + name) for name in data})


def _decode(kind: Any, value: object, where: str) -> object:
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {value!r}, not a table")
        made: object = decode(kind, value, f"{where}.")  # type: ignore[arg-type]
        return made
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {value!r}, not a list")
        return tuple(_decode(get_args(kind)[0], item, where) for item in value)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return _member(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 7.0e9 bytes per second are easier to read than their digits
    if type(value) is not kind:
        raise ConfigError(
            f"{where} is {value!r}, which is {type(value).__name__}, not {kind.__name__}"
        )
    return value


def _member(kind: type[enum.StrEnum], value: object, where: str) -> enum.StrEnum:
    names = [str(member) for member in kind]
    if value not in names:
        near = nearest(str(value), names)
        raise ConfigError(f"{where} is {value!r}; it must be one of {', '.join(names)}{near}")
    return kind(str(value))


def _sources(data: object) -> Iterable[tuple[str, str]]:
    if not isinstance(data, dict):
        raise ConfigError("sources is not a table")
    tables = {leaf.partition(".")[0] for leaf in leaves()}
    for path, text in data.items():
        if path not in tables and path not in leaves():
            raise ConfigError(f"sources names the unknown field {path!r}{nearest(path, leaves())}")
        if not isinstance(text, str) or not text:
            raise ConfigError(f"sources: the source of {path!r} is {text!r}, not a sentence")
        yield path, text
