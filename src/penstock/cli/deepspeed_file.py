"""The file of a DeepSpeed configuration: its keys and values, checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.cli.deepspeed_keys import AUTO, KEYS, KINDS, SECTIONS
from penstock.core.errors import ConfigError
from penstock.core.files import parse_json, read_text


def read(source: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError naming the file."""
    try:
        found = parse_json(
            read_text(source),
            object_pairs_hook=_without_repetition,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{source}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: is {_kind_of(found)}; a configuration is an object in JSON")
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice in one object; remove one of them")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _finite(digits: str) -> float:
    if abs(value := float(digits)) == float("inf"):
        raise ValueError(f"{digits} is too large for a number")
    return value


def _kind_of(value: Any) -> str:
    named = {dict: "an object", list: "a list", str: f"the string {value!r}", type(None): "null"}
    return named.get(type(value), json.dumps(value))


def entries(found: dict[str, Any], source: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys with their values, those of known sections one by one, checked."""
    for name, value in found.items():
        key = prefix + (json.dumps(name) if "." in name else name)
        _check(key, value, source)
        if value and isinstance(value, dict) and key in SECTIONS:
            yield from entries(value, source, f"{key}.")
        else:
            yield key, value


def _check(key: str, value: Any, source: str) -> None:
    known = KEYS.get(key)
    if known is None or value is None:
        return
    if isinstance(known.kind, tuple):
        right, wanted = value in known.kind, f"one of {', '.join(map(str, known.kind))}"
        right = right and not isinstance(value, bool)
    else:
        test, wanted = KINDS[known.kind]
        right = test(value) or (value == AUTO and known.kind != "object")
    if not right:
        raise ConfigError(f"{source}: {key} is {_kind_of(value)}; it must be {wanted}")
