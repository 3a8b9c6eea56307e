"""What the fields of a device are held against."""

from __future__ import annotations

import math

from penstock.core.errors import ConfigError


def whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number, ``least`` or more. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}, it must be a whole number, {least} or more")


def rate(name: str, value: object) -> None:
    """Refuse a rate of zero, or what is no whole number. Raises ConfigError."""
    if value == 0:
        raise ConfigError(f"{name} is 0: nothing would ever get through")
    whole(name, value, 1)


def real(name: str, value: float, *, positive: bool) -> None:
    """Refuse what is not finite, or negative, or zero where that is none. Raises ConfigError."""
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        least = "positive" if positive else "zero or more"
        raise ConfigError(f"{name} is {value}, it must be {least}")
