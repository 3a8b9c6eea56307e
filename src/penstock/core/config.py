"""What a session is to do: one frozen value, checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from penstock.core import knobs
from penstock.core.errors import ConfigError
from penstock.core.files import given_path, given_paths, parse_toml, read_text
from penstock.core.units import format_bytes, parse_bytes

UNLIMITED: int = 1 << 62
"""Bytes of a memory without a budget."""
_SIZES: Final = ("device_memory", "host_memory", "flash_capacity", "floor", "event_log_size", "tbw")
_CODEC: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\+[a-z0-9]+(-[a-z0-9]+)*)*")
"""What a codec's name, or a chain's, looks like; whether there is such a one is known elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """What to keep where, and where to write. Sizes are bytes, or strings with a unit."""

    device_memory: int | str | None = None
    """Budget for saved tensors in the device's memory; on several devices, of each. On a machine without
    a GPU the device is host memory, and ``None`` is no limit. On CUDA ``None`` is what the rest of a step
    leaves free, where there is somewhere to spill to."""

    host_memory: int | str = 0
    """How much the host tier may hold; 0: there is none. On CUDA also what transfers are staged in,
    unless they are GPU-direct."""

    flash: str | Path | tuple[str | Path, ...] = ()
    """Directories to spill to, best on different SSDs: they make one striped tier. Empty: none."""

    flash_capacity: int | str | None = None
    """How much may be spilled; ``None``: nine tenths of the space that is free."""

    policy: str = "auto"
    """The name of a policy: ``"auto"``, ``"all"``, ``"keep"``, ...; or the path of a plan's ``.json``."""

    recompute: bool = False
    """Whether modules may be run again in backward, where a policy finds that better than to move what
    they save. Each is compared with its first run, once, bit for bit; but what a forward does beside its
    outputs, it does twice (a line that it prints). So it is to be asked for: by this, by
    ``policy="recompute"``, or by a plan that says so."""

    codec: str = "auto"
    """``"auto"``: lossless codecs where they are measured to pay; ``"none"``; or the name of a codec or
    of a chain of them, as ``"zero-value+bfloat16"``: used wherever it accepts the type of the elements,
    whether it pays or not, and even if it loses something."""

    floor: int | str | None = None
    """Storages smaller than this always stay; ``None``: the knob ``PENSTOCK_FLOOR``, 1 MiB."""

    event_log: str | Path | None = None
    """Write every event to this file as JSON lines."""

    event_log_size: int | str = "64MiB"
    """Size at which the file is renamed to ``NAME.1``, one of that name to ``NAME.2``, and so on."""

    event_log_files: int = 8
    """How many files of the log there are at most; the oldest goes first."""

    tbw: int | str | None = None
    """Terabytes written that the SSD is rated for, as ``"600TB"``: the summary tells the share used."""

    sample_rss: bool = False
    """Also record the resident set size of the process, every 10 ms."""

    def __post_init__(self) -> None:
        """Turn sizes into bytes and directories into a tuple of strings; check them together."""
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value, what=name))
        if self.floor is None:
            object.__setattr__(self, "floor", knobs.floor_bytes())
        object.__setattr__(self, "flash", given_paths(self.flash, "flash"))
        if self.event_log is not None:
            given_path(self.event_log, "event_log")
        if type(self.event_log_files) is not int or self.event_log_files < 1:
            raise ConfigError(
                f"event_log_files is {self.event_log_files!r}; it must be a whole number, at least 1"
            )
        for name in _SIZES:
            if getattr(self, name) == 0 and name != "host_memory":
                raise ConfigError(f"{name} must be more than 0 bytes")
        if len(set(self.directories)) != len(self.directories):
            raise ConfigError(f"flash names a directory twice: {list(self.directories)}")
        if self.flash_capacity is not None and not self.directories:
            raise ConfigError("flash_capacity is set, but no flash directory is named")
        self._check_codec()
        if self.device_memory is not None and self.policy == "auto" and not self.has_tier:
            raise ConfigError(
                f"a device budget of {format_bytes(self.device_bytes)} needs somewhere to spill to:"
                " name a flash directory, or give host_memory"
            )
        if self.policy == "all" and not self.has_tier:
            raise ConfigError("policy 'all' needs somewhere to spill to: name a flash directory")

    def _check_codec(self) -> None:
        if not isinstance(self.codec, str) or not _CODEC.fullmatch(self.codec):
            raise ConfigError(
                f"codec is {self.codec!r}; it is 'auto', 'none', a codec's name, as 'zero-value', or a"
                " chain of them, as 'zero-value+bfloat16'"
            )
        if self.codec not in ("auto", "none") and not self.has_tier:
            raise ConfigError(
                f"codec {self.codec!r} is set, but there is nowhere to spill to: name a flash"
                " directory, or give host_memory"
            )

    @property
    def has_tier(self) -> bool:
        """Whether there is anywhere to spill to."""
        return bool(self.directories) or self.host_bytes > 0

    @property
    def device_bytes(self) -> int:
        """``device_memory`` in bytes."""
        return UNLIMITED if self.device_memory is None else _bytes(self.device_memory)

    @property
    def host_bytes(self) -> int:
        """``host_memory`` in bytes."""
        return _bytes(self.host_memory)

    @property
    def floor_bytes(self) -> int:
        """``floor`` in bytes."""
        return _bytes(self.floor)

    @property
    def event_log_bytes(self) -> int:
        """``event_log_size`` in bytes."""
        return _bytes(self.event_log_size)

    @property
    def capacity_bytes(self) -> int | None:
        """``flash_capacity`` in bytes."""
        return None if self.flash_capacity is None else _bytes(self.flash_capacity)

    @property
    def tbw_bytes(self) -> int | None:
        """``tbw`` in bytes."""
        return None if self.tbw is None else _bytes(self.tbw)

    @property
    def directories(self) -> tuple[str, ...]:
        """``flash`` as a tuple of strings."""
        assert isinstance(self.flash, tuple)
        return tuple(str(path) for path in self.flash)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Make one from a parsed file. Raises ConfigError, naming ``source``, for unknown keys."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"{source}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}"
            )
        try:
            plain: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
            }
            return cls(**plain)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read the table ``[offload]`` of a TOML file.

        Raises:
            ConfigError: The file cannot be read or parsed, or a setting makes no sense.
        """
        try:
            document = parse_toml(read_text(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        table = document.get("offload")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: has no table [offload]")
        return cls.from_mapping(table, source=str(path))


def _bytes(value: int | str | None) -> int:
    assert isinstance(value, int)  # made so by __post_init__
    return value
