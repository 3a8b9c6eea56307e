"""Checks for the fields of a device."""

from __future__ import annotations

import math

from penstock.core.errors import ConfigError


def whole(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless ``value`` is a whole number, ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more")


def rate(name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a positive whole number."""
    if value == 0:
        raise ConfigError(f"{name} is 0; nothing would ever be transferred")
    whole(name, value, 1)


def real(name: str, value: float, *, positive: bool) -> None:
    """Raise ConfigError unless ``value`` is finite and positive, or zero where that is allowed."""
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        least = "positive" if positive else "zero or more"
        raise ConfigError(f"{name} is {value}; it must be {least}")
