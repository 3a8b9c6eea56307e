"""Byte counts, bandwidths and durations: strict parsing and uniform formatting.

``GB`` is 10**9 bytes and ``GiB`` is 2**30. A number with a bare ``G`` could mean either, so it is an
error. Memory is printed in binary units and bandwidth in decimal ones, as is usual.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from penstock.core.errors import SizeError
from penstock.core.ranks import local_processes

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4

MAX_BYTES: Final = 2**63 - 1
"""Largest size: that of the system's signed 64-bit counts."""
_TOO_LARGE: Final = "a size is less than 2^63 bytes, 8192 PiB"
_MAX_CHARACTERS: Final = 100
"""Length of the longest text that is accepted as a size."""
_PER_NODE: Final = "/node"
"""Suffix of a size that the processes of a launcher on this machine divide between them."""

_UNITS: Final[dict[str, int]] = {
    "B": 1,
    **{prefix + "B": 1000**power for power, prefix in enumerate("kMGTP", start=1)},
    "KB": 1000,
    **{prefix + "iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
_NUMBER: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_BINARY: Final = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_DECIMAL: Final = ((10**12, "TB/s"), (10**9, "GB/s"), (10**6, "MB/s"), (10**3, "kB/s"))


def parse_bytes(value: int | str, *, what: str = "size") -> int:
    """Turn ``"1.5GiB"`` or an integer number of bytes into bytes.

    Args:
        value: An ``int`` (bytes), or a number with a unit: ``B``, ``kB``, ``MB``, ``GB``, ``TB``
            (powers of 1000), ``KiB``, ``MiB``, ``GiB``, ``TiB`` (powers of 1024). After ``"64GiB/node"``
            the result is this process's part: the processes that a launcher has started on this machine
            divide it equally.
        what: Name of the setting; errors begin with it.

    Raises:
        SizeError: Not a size, negative, a fraction of a byte below a KiB (above, it is dropped), or an
            ambiguous unit.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise SizeError(f"{what}: {value!r} is {type(value).__name__}, not an int or a str")
    if isinstance(value, int):
        if value > MAX_BYTES:
            raise SizeError(f"{what}: {_TOO_LARGE}")
        if value < 0:
            raise SizeError(f"{what}: {value} bytes is negative")
        return value
    processes = 1
    if len(value) <= _MAX_CHARACTERS and value.rstrip().endswith(_PER_NODE):
        value, processes = value.rstrip().removesuffix(_PER_NODE), local_processes()
    match = _NUMBER.fullmatch(value) if len(value) <= _MAX_CHARACTERS else None
    if match is None:
        raise SizeError(
            f"{what}: {value[:_MAX_CHARACTERS]!r} is not a size; write a number and a unit, as in"
            " '1.5GiB'"
        )
    number, unit = match.groups()
    if unit not in _UNITS:
        raise SizeError(f"{what}: {value!r} {_unit_advice(number, unit)}")
    size = Fraction(number) * _UNITS[unit]
    if size > MAX_BYTES:
        raise SizeError(f"{what}: {value!r} is too large: {_TOO_LARGE}")
    if size.denominator != 1 and size < KIB:  # above, as in 4.7GiB, the fraction is dropped
        raise SizeError(f"{what}: {value!r} is {float(size)} bytes, which is not a whole number")
    return int(size) // processes


def parse_bandwidth(value: int | str, *, what: str = "bandwidth") -> int:
    """Turn ``"3.5GB/s"`` or an integer into bytes per second. Raises SizeError as ``parse_bytes``."""
    if isinstance(value, str):
        if not value.rstrip().endswith("/s") or _PER_NODE in value:
            raise SizeError(f"{what}: {value!r} is not a bandwidth; write it as in '3.5GB/s'")
        value = value.rstrip().removesuffix("/s")
    bandwidth = parse_bytes(value, what=what)
    if bandwidth == 0:
        raise SizeError(f"{what}: 0 bytes/s would never finish")
    return bandwidth


def format_bytes(size_bytes: float) -> str:
    """Format a size: ``1610612736`` -> ``"1.50 GiB"``."""
    for scale, unit in _BINARY:
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_bandwidth(bytes_per_s: float) -> str:
    """Format a bandwidth: ``3.5e9`` -> ``"3.50 GB/s"``."""
    for scale, unit in _DECIMAL:
        if abs(bytes_per_s) >= scale:
            return f"{bytes_per_s / scale:.2f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def format_duration(seconds: float) -> str:
    """Format a duration: ``0.0123`` -> ``"12.3 ms"``."""
    if abs(seconds) >= 120:
        return f"{int(seconds) // 60} min {seconds % 60:.0f} s"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} µs"


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """Return the greatest multiple of ``multiple`` that is not above ``value``."""
    return value // multiple * multiple


def _unit_advice(number: str, unit: str) -> str:
    if not unit:
        return (
            f"has no unit; write '{number}GiB', '{number}MB', ... or the integer {number} for bytes"
        )
    if unit in ("k", "K", "M", "G", "T", "P"):
        binary = f"{number}{unit.upper()}iB"
        return f"is ambiguous; write '{binary}' (powers of 1024) or '{number}{unit}B' (of 1000)"
    return f"has the unknown unit {unit!r}; known are {', '.join(_UNITS)}"
