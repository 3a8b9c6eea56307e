"""Configuration of a session: one frozen value, checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from penstock.core import knobs
from penstock.core.errors import ConfigError
from penstock.core.files import given_path, given_paths, parse_toml, read_text
from penstock.core.memory import MemoryRequest, parse_memory
from penstock.core.ranks import own_directories
from penstock.core.units import format_bytes, parse_bytes

UNLIMITED: int = 1 << 62
"""Bytes of a memory without a budget."""
_SIZES: Final = (
    *("device_memory", "host_memory", "flash_capacity", "weights_memory", "floor"),
    *("event_log_size", "tbw"),
)
_WEIGHTS: Final = ("keep", "flash", "host", "auto")
_CODEC: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\+[a-z0-9]+(-[a-z0-9]+)*)*")
"""Syntax of the name of a codec or of a chain; its existence is checked elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Settings of a session. Sizes are bytes, or strings with a unit."""

    memory: int | str | None = None
    """Limit of the host memory that all parts of Penstock hold together in this process: saved tensors
    where there is no GPU, host tier, staging, buffers of optimizers, gradients, checkpoints and data
    sets. ``"auto"`` and a share, as ``"60%"``, limit the *process*, with weights and all else that it
    holds: to the memory that is available to it, or to that share of the machine's, or of its control
    group's if that is less; processes that one launcher has started on the machine divide it. Penstock
    gets what the rest leaves. ``None``: no limit but those below."""

    device_memory: int | str | None = None
    """Budget for saved tensors in device memory, per device. On a machine without a GPU the device is
    host memory, and ``None`` means no limit. On CUDA ``None`` means the memory that the rest of a step
    leaves free, if there is a tier to offload to."""

    host_memory: int | str | None = None
    """Capacity of the host tier; 0: no host tier. On CUDA it includes the staging buffers of transfers,
    unless they are GPU-direct. ``None``: 0; on CUDA, with ``memory``, three quarters of that, or half if
    it was found and not given."""

    flash: str | Path | tuple[str | Path, ...] = ()
    """Directories to offload to, best on different SSDs: they form one striped tier. Empty: none."""

    flash_by_rank: bool = False
    """Divide the directories of ``flash`` among the ranks on this machine, by ``LOCAL_RANK``: each has
    its own, in turn. False: all ranks use all directories."""

    flash_capacity: int | str | None = None
    """Capacity of the flash tier of this process; ``None``: nine tenths of the free space, divided by the
    ranks on this machine that use the same file system."""

    policy: str = "auto"
    """Name of a policy: ``"auto"``, ``"all"``, ``"keep"``, ...; or path of a plan's ``.json`` file."""

    recompute: bool = False
    """Opt-in to recomputation: modules may run again in backward if a policy prefers that to moving
    their saved tensors. Each is compared with its first run, once, bit for bit; but side effects of its
    forward, such as printing a line, happen twice. ``policy="recompute"`` and plans that recompute opt in
    as well."""

    codec: str = "auto"
    """``"auto"``: lossless codecs where measurements show that they pay; ``"none"``; or the name of a
    codec or of a chain, as ``"zero-value+bfloat16"``: used wherever it accepts the element type, even if
    it does not pay or is lossy."""

    weights: str = "keep"
    """``"keep"``: weights stay in memory; ``"flash"``: those of at least ``floor`` bytes rest in files in
    the directories of ``flash`` and are in memory while something works with them. With a model on a
    device those rest in host memory instead that fit in the host tier. ``"host"``, on a device: all of
    them rest in host memory, and none of them in a file. ``"auto"``: the first of ``"flash"`` and
    ``"host"`` that the other settings have what it needs for, else ``"keep"``."""

    weights_memory: int | str | None = None
    """Limit of the weights in memory, if they rest elsewhere; ``None``: a part of ``memory``, found once
    a step is known. With a model on a device it is that of the weights in device memory; ``None``: a
    part of what a step leaves there."""

    device: str | None = None
    """With weights that rest on flash or in host memory: device on which the session works with a model
    that is on the host, as ``"cuda"``, and need not fit there; when it is closed, the model is on the
    host again. ``None``: that of the model."""

    floor: int | str | None = None
    """Size below which storages are never offloaded; ``None``: the knob ``PENSTOCK_FLOOR``, 1 MiB."""

    event_log: str | Path | None = None
    """File to which every event is written as JSON lines."""

    event_log_size: int | str = "64MiB"
    """Size at which the log is renamed to ``NAME.1``, an older ``NAME.1`` to ``NAME.2``, and so on."""

    event_log_files: int = 8
    """Largest number of log files; the oldest is deleted first."""

    tbw: int | str | None = None
    """Terabytes written that the SSD is rated for, as ``"600TB"``; the summary shows the share used."""

    sample_rss: bool = False
    """Record the resident set size of the process every 10 ms as well."""

    def __post_init__(self) -> None:
        """Turn sizes into bytes and directories into a tuple of strings; check them together."""
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value, what=name))
        if self.memory is not None:
            given = parse_memory(self.memory)
            object.__setattr__(self, "memory", given.nbytes or self.memory)
        if self.floor is None:
            object.__setattr__(self, "floor", knobs.floor_bytes())
        named = given_paths(self.flash, "flash")
        object.__setattr__(self, "flash", named)
        if self.event_log is not None:
            given_path(self.event_log, "event_log")
        if type(self.event_log_files) is not int or self.event_log_files < 1:
            raise ConfigError(
                f"event_log_files is {self.event_log_files!r}; it must be a whole number, at least 1"
            )
        for name in _SIZES:
            if getattr(self, name) == 0 and name != "host_memory":
                raise ConfigError(f"{name} must be more than 0 bytes")
        if len(set(named)) != len(named):
            raise ConfigError(f"flash names a directory twice: {list(named)}")
        for name, is_set in (
            ("flash_capacity", self.flash_capacity is not None),
            ("flash_by_rank", self.flash_by_rank),
        ):
            if is_set and not self.directories:
                raise ConfigError(f"{name} is set, but no flash directory is named")
        self._check_codec()
        self._check_limits()
        self._check_weights()
        if self.policy == "all" and not self.has_tier:
            raise ConfigError("policy 'all' needs a tier to offload to: name a flash directory")

    def _check_limits(self) -> None:
        if self.policy == "auto" and not self.has_tier:
            limit = ""
            if self.device_memory is not None:
                limit = f"a device budget of {format_bytes(self.device_bytes)}"
            elif (request := self.memory_request) is not None:
                nbytes = request.nbytes
                limit = f"memory={self.memory if nbytes is None else format_bytes(nbytes)}"
            if limit:
                raise ConfigError(
                    f"{limit} needs a tier to offload to: name a flash directory, or give host_memory"
                )
        request = self.memory_request
        if request is not None and request.nbytes is not None and request.nbytes < self.host_bytes:
            raise ConfigError(
                f"host_memory is {format_bytes(self.host_bytes)}, more than memory, which is"
                f" {format_bytes(request.nbytes)} and includes it: lower the former or raise the latter"
            )

    def _check_weights(self) -> None:
        if self.weights not in _WEIGHTS:
            raise ConfigError(
                f"weights is {self.weights!r}; it is 'keep', 'flash', 'host' or 'auto'"
            )
        if self.weights == "keep":
            if self.weights_memory is not None:
                raise ConfigError(
                    "weights_memory is set, but weights is 'keep': set weights='flash' or 'host'"
                )
            if self.device is not None:
                raise ConfigError(
                    "device is set, but weights is 'keep': set weights='flash' or 'host', or move the"
                    " model there"
                )
            return
        if self.weights == "host" and not self.host_bytes and self.memory is None:
            raise ConfigError(
                "weights='host' needs host memory for the weights, and for what else is offloaded there:"
                " host_memory=SIZE, or --host-memory SIZE"
            )
        if self.weights == "flash" and not self.directories:
            raise ConfigError(
                "weights='flash' needs a directory on flash: flash=DIR, or --flash DIR"
            )

    def _check_codec(self) -> None:
        if not isinstance(self.codec, str) or not _CODEC.fullmatch(self.codec):
            raise ConfigError(
                f"codec is {self.codec!r}; it is 'auto', 'none', a codec's name, as 'zero-value', or a"
                " chain of them, as 'zero-value+bfloat16'"
            )
        if self.codec not in ("auto", "none") and not self.has_tier:
            raise ConfigError(
                f"codec {self.codec!r} is set, but there is no tier to offload to: name a flash"
                " directory, or give host_memory"
            )

    @property
    def has_tier(self) -> bool:
        """True if there is a tier to offload to."""
        return bool(self.directories) or self.host_bytes > 0

    def on(self, device: str, *, finds_limits: bool = True) -> Self:
        """Return the settings of a session, with the place of weights that ``"auto"`` means there.

        Args:
            device: Type of the device that the session works on.
            finds_limits: True if it may find limits that are not set.

        Raises:
            ConfigError: There is no place, and ``device`` needs one.
        """
        if self.weights != "auto":
            return self
        place = self._place_on(device, finds_limits)
        if place != "keep":
            return replace(self, weights=place)
        if self.device is not None:
            raise ConfigError(
                "device is set, but weights='auto' finds no place for weights:"
                f" {self.place_missing(device)}"
            )
        return replace(self, weights=place, weights_memory=None)

    def place_missing(self, device: str) -> str:
        """Return what is missing for weights to rest elsewhere, as the end of a sentence."""
        return {
            "cpu": "they would rest on flash with a directory there (flash) and a limit (memory)",
            "cuda": "they would rest elsewhere with host_memory, or with a directory on flash and either"
            " host_memory or memory; with policy='keep', or a plan of your own, with weights_memory too",
        }.get(device, f"on {device} they cannot rest elsewhere")

    def _place_on(self, device: str, finds_limits: bool) -> str:
        if device == "cpu":
            is_limited = self.memory is not None or self.weights_memory is not None
            return "flash" if self.directories and is_limited else "keep"
        # all that leaves a device passes through host memory, of which a session takes a part of memory
        has_host = self.host_bytes > 0 or (self.memory is not None and self.host_memory is None)
        if (
            device != "cuda"
            or not has_host
            or not (finds_limits or self.weights_memory is not None)
        ):
            return "keep"
        return "flash" if self.directories else "host"

    @property
    def device_bytes(self) -> int:
        """``device_memory`` in bytes."""
        return UNLIMITED if self.device_memory is None else _bytes(self.device_memory)

    @property
    def host_bytes(self) -> int:
        """``host_memory`` in bytes."""
        return 0 if self.host_memory is None else _bytes(self.host_memory)

    @property
    def memory_request(self) -> MemoryRequest | None:
        """``memory``, parsed."""
        return None if self.memory is None else parse_memory(self.memory)

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
        """The directories of this process, as strings: ``flash``, or its own of these."""
        assert isinstance(self.flash, tuple)
        return own_directories(self.flash, by_rank=self.flash_by_rank)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Make a configuration from a parsed file. Raises ConfigError naming ``source``."""
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
            ConfigError: The file cannot be read or parsed, or a setting is invalid.
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
    assert isinstance(value, int)  # converted by __post_init__
    return value
