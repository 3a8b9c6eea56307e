"""Inputs of a plan beside the profile: the measured speeds of a machine, and the budgets."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import ConfigError, PlanError
from penstock.core.files import parse_toml, read_text
from penstock.plan import serial
from penstock.plan.serial import MAY_BE_OMITTED
from penstock.plan.service import Service

VERSION = 2
_PRESETS: Final = "penstock.plan.machines"
_WORK: Final = ("write_work_s", "write_work_s_per_byte", "read_work_s", "read_work_s_per_byte")
_UPDATES: Final = tuple(f"update_{name}_s" for name in ("exact", "split", "bf16", "int8"))
_ALONE: Final = ("flash_write_alone_bytes_per_s", "flash_read_alone_bytes_per_s")
PRODUCT_SIDES: Final = (1, 4, 16, 64, 256, 1024, 4096)
"""Shortest sides of matrix products for which their speed is measured."""
_FEWEST: Final = {"cudnn": 4, "processors": 0}
"""Least values of the whole numbers of ``Compute``."""
_MEMORIES: Final = ("device_bytes", "host_bytes", "flash_bytes")
_NETWORK: Final = ("network_bytes_per_s", "peer_bytes_per_s")
_NOT_NUMBERS: Final = ("name", "compute", "sources", "flash_service")
_TIMES: Final = ("flash_latency_s", *_WORK, *_UPDATES)
_ZERO_OR_MORE: Final = ("interference", *_TIMES, *_MEMORIES, *_ALONE, *_NETWORK)


@dataclass(frozen=True)
class Compute:
    """Arithmetic and memory speeds of a device, for a roofline (Williams et al., CACM 2009).

    An operator takes the longer of its arithmetic and its memory traffic, and at least ``operator_s``.
    """

    float32_flops_per_s: float
    """Peak of 32-bit arithmetic."""
    half_flops_per_s: float
    """Peak of 16-bit arithmetic."""
    efficiency: float
    """Fraction of the peak that convolutions, and matrix products that are not measured by size, reach;
    over 0, at most 1."""
    memory_bytes_per_s: float
    operator_s: float
    """Least time of any operator: its launch."""
    cudnn: int = field(default=4, metadata=MAY_BE_OMITTED)
    """Major version of cuDNN, which determines the convolution algorithms available."""
    processors: int = field(default=0, metadata=MAY_BE_OMITTED)
    """Multiprocessors, each of which computes one tile of a product at a time; 0: not known."""
    product_efficiency: tuple[float, ...] = field(default=(), metadata=MAY_BE_OMITTED)
    """Fraction of the peak that 32-bit matrix products reach whose shortest side is each of
    ``PRODUCT_SIDES``; empty: not measured, ``efficiency`` and ``processors`` tell it, as in 16 bits."""

    def __post_init__(self) -> None:
        for name, fewest in _FEWEST.items():
            if getattr(self, name) < fewest:
                value = getattr(self, name)
                raise ConfigError(f"compute: {name} is {value}, it must be {fewest} or more")
        shares = self.product_efficiency
        if shares and (
            len(shares) != len(PRODUCT_SIDES)
            or not all(0 < one <= 1 for one in shares)
            or any(more < fewer for fewer, more in pairwise(shares))
        ):
            raise ConfigError(
                f"compute: product_efficiency is {list(shares)}; it must be {len(PRODUCT_SIDES)} numbers"
                " over 0 and at most 1, none below the one before, for products whose shortest side is"
                f" {PRODUCT_SIDES}, or left out"
            )
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in _FEWEST or one.name == "product_efficiency":
                continue
            low = value < 0 or (value == 0 and one.name != "operator_s")
            if not math.isfinite(value) or low or (one.name == "efficiency" and value > 1):
                least = {"operator_s": "zero or more", "efficiency": "over 0 and at most 1"}
                raise ConfigError(
                    f"compute: {one.name} is {value}, it must be {least.get(one.name, 'positive')}"
                )


@dataclass(frozen=True)
class Machine:
    """Speeds, as ``penstock bench`` measures them or a specification sheet states them."""

    name: str
    flash_write_bytes_per_s: float
    """Bandwidth of flash while the processor computes, which may slow it down."""
    flash_read_bytes_per_s: float
    flash_latency_s: float
    """Time from requesting a small read to its end."""
    host_write_bytes_per_s: float
    """Bandwidth of copies from the device to the host tier."""
    host_read_bytes_per_s: float
    compute: Compute | None = None
    """Device speeds; None: not known, so operators cannot be timed from their shapes."""
    device_bytes: int = 0
    """Memory of the device; 0: not known. The same holds for the next two."""
    host_bytes: int = 0
    flash_bytes: int = 0
    flash_shared: bool = False
    """True if reads and writes of flash share one bandwidth instead of having one each."""
    flash_over_link: bool = False
    """True if flash shares the link that the host tier uses."""
    interference: float = 0.0
    """Fraction by which compute is slower while bytes move: on a CPU both need memory and cores."""
    write_work_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    """Compute time lost per write to a tier: the runtime's own work, in the training thread and others,
    beyond ``interference``. 0 if the device computes on meanwhile. The same holds for the next three."""
    write_work_s_per_byte: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    """Additional compute time lost per byte written."""
    read_work_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    read_work_s_per_byte: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    update_exact_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    """Compute time of Adam's update of one parameter whose record has the format ``exact``, on the host.
    0: not known, so it is derived from memory traffic. The same holds for the next three."""
    update_split_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    update_bf16_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    update_int8_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    flash_write_alone_bytes_per_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    """Bandwidth of flash while nothing computes; 0: not known, so the same. Likewise for the next."""
    flash_read_alone_bytes_per_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    network_bytes_per_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    """Bandwidth each way between one node and the others, all its adapters together; 0: not known."""
    peer_bytes_per_s: float = field(default=0.0, metadata=MAY_BE_OMITTED)
    """Bandwidth each way between one device and the others of its node; 0: not known."""
    sources: tuple[str, ...] = ()
    """Sources of the figures."""
    flash_service: Service | None = field(default=None, metadata=MAY_BE_OMITTED)
    """Times of flash transfers by their size, from a simulated drive; None: use the bandwidths and the
    latency."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value: Any = getattr(self, one.name)
            if one.name in _NOT_NUMBERS or isinstance(value, bool):
                continue
            is_number = isinstance(value, Real)
            if not is_number:
                raise ConfigError(
                    f"machine {self.name!r}: {one.name} is {value!r}, it must be a number"
                )
            least = "zero or more" if one.name in _ZERO_OR_MORE else "positive"
            low = value < 0 or (least == "positive" and value == 0)
            if low or not abs(value) < math.inf:
                raise ConfigError(
                    f"machine {self.name!r}: {one.name} is {value}, it must be {least}"
                )

    def bytes_per_s(self, tier: str) -> tuple[float, float]:
        """Return the write and read bandwidths of a tier."""
        if tier == "host":
            return self.host_write_bytes_per_s, self.host_read_bytes_per_s
        return self.flash_write_bytes_per_s, self.flash_read_bytes_per_s

    def write_s(self, nbytes: int, tier: str = "flash") -> float:
        """Return the seconds to write ``nbytes`` to an idle tier."""
        if tier == "host":
            return nbytes / self.host_write_bytes_per_s
        return self.flash_latency_s + self.flash_busy_s(nbytes, writing=True)

    def read_s(self, nbytes: int, tier: str = "flash") -> float:
        """Return the seconds to read ``nbytes`` from an idle tier."""
        if tier == "host":
            return nbytes / self.host_read_bytes_per_s
        return self.flash_latency_s + self.flash_busy_s(nbytes, writing=False)

    def computing_for(self, share: float) -> Machine:
        """Return this machine with the bandwidth of flash in a step.

        Args:
            share: Share of the step's time in which the processor computes; from 0 to 1.
        """
        if self.flash_service is not None or not any(getattr(self, name) for name in _ALONE):
            return self
        write, read = (
            share * beside + (1 - share) * max(alone, beside)
            for alone, beside in zip(
                (getattr(self, name) for name in _ALONE), self.bytes_per_s("flash"), strict=True
            )
        )
        return replace(self, flash_write_bytes_per_s=write, flash_read_bytes_per_s=read)

    def with_drives(self, count: float) -> Machine:
        """Return this machine with ``count`` times as many drives as one striped flash tier.

        Below 1 it is the share of one of several that use a drive at the same time.
        """
        names = ("flash_write_bytes_per_s", "flash_read_bytes_per_s", *_ALONE)
        return replace(self, **{name: count * getattr(self, name) for name in names})

    def less_read(self, bytes_per_s: float) -> Machine:
        """Return this machine with flash slowed by another reader of ``bytes_per_s``.

        At least a tenth of the bandwidth remains. If reads and writes share it, writes slow down, too.
        """
        left = max(0.1, 1 - max(0.0, bytes_per_s) / self.flash_read_bytes_per_s)
        writes = left if self.flash_shared else 1.0
        service = self.flash_service
        if service is not None:
            service = Service(
                service.sizes_bytes,
                tuple(each / writes for each in service.write_s),
                tuple(each / left for each in service.read_s),
            )
        return replace(
            self,
            flash_read_bytes_per_s=self.flash_read_bytes_per_s * left,
            flash_write_bytes_per_s=self.flash_write_bytes_per_s * writes,
            flash_read_alone_bytes_per_s=self.flash_read_alone_bytes_per_s * left,
            flash_write_alone_bytes_per_s=self.flash_write_alone_bytes_per_s * writes,
            flash_service=service,
        )

    def flash_busy_s(self, nbytes: int, *, writing: bool) -> float:
        """Return the seconds for which a transfer occupies flash, without its latency."""
        if self.flash_service is not None:
            whole_s = self.flash_service.seconds(nbytes, writing=writing)
            return max(0.0, whole_s - self.flash_latency_s)
        return nbytes / (self.flash_write_bytes_per_s if writing else self.flash_read_bytes_per_s)

    def network_ns(self, nbytes: int) -> int:
        """Return the time in ns to receive ``nbytes`` from other ranks; 0 if that is not known."""
        return round(nbytes / self.network_bytes_per_s * 1e9) if self.network_bytes_per_s else 0

    def write_work_ns(self, nbytes: int) -> int:
        """Return the compute time in ns lost to writing ``nbytes``."""
        return round((self.write_work_s + nbytes * self.write_work_s_per_byte) * 1e9)

    def read_work_ns(self, nbytes: int) -> int:
        """Return the compute time in ns lost to reading ``nbytes``."""
        return round((self.read_work_s + nbytes * self.read_work_s_per_byte) * 1e9)

    def to_json(self) -> str:
        """Return one JSON document."""
        return serial.dump("machine", VERSION, self)

    @staticmethod
    def from_json(text: str, *, source: str = "") -> Machine:
        """Parse ``to_json``'s text. Raises PlanError naming ``source`` and the field at fault."""
        return serial.load(Machine, text, kind="machine", version=VERSION, source=source)

    def to_toml(self) -> str:
        """Return one TOML document, in bytes, seconds and bytes per second."""
        data = {"penstock": "machine", "version": VERSION, **serial.encode_fields(self)}
        tables = {name: data.pop(name) for name in ("compute", "flash_service")}
        lines = [f"{name} = {_toml(value)}" for name, value in data.items()]
        for name, table in tables.items():
            if isinstance(table, dict):
                lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_toml(text: str, *, source: str = "") -> Machine:
        """Parse ``to_toml``'s text; without a table ``compute``, the device's speeds are not known.

        Raises PlanError naming ``source`` and the field at fault.
        """
        try:
            data = parse_toml(text)
        except ValueError as error:
            raise PlanError(f"machine {source!r} is not TOML: {error}") from error
        return Machine.from_json(json.dumps({"compute": None, **data}, default=str), source=source)

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read a machine from a file, TOML or JSON.

        Raises:
            ConfigError: The file cannot be read, or is not a machine; names the file and the field.
        """
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"machine file {str(path)!r} cannot be read: {error}") from error
        parse = Machine.from_json if text.lstrip().startswith("{") else Machine.from_toml
        try:
            return parse(text, source=str(path))
        except PlanError as error:
            raise ConfigError(str(error)) from error

    @staticmethod
    def preset(name: str) -> Machine:
        """Return a machine that comes with Penstock, or raise ConfigError with the known names."""
        if name not in Machine.presets():
            known = ", ".join(Machine.presets())
            raise ConfigError(f"unknown machine {name!r}; known are {known}, or name a file")
        text = (files(_PRESETS) / f"{name}.toml").read_text(encoding="utf-8")
        return Machine.from_toml(text, source=f"{name}.toml")

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Return the names of the machines that come with Penstock."""
        names = (Path(each.name) for each in files(_PRESETS).iterdir())
        return tuple(sorted(name.stem for name in names if name.suffix == ".toml"))


def _toml(value: object) -> str:
    """Format a value as TOML: strings as JSON does, except U+007F, and without surrogates."""
    if isinstance(value, list):
        return "[" + "".join(f"\n    {_toml(item)}," for item in value) + ("\n]" if value else "]")
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{value:_}" if isinstance(value, int) else repr(value)


@dataclass(frozen=True)
class Budgets:
    """Limits in bytes of each memory that a plan may use."""

    device_bytes: int
    """Limit of kept storages, sources of writes in flight and targets of reads together."""
    host_bytes: int = 0
    """Capacity of the host tier; 0 if there is none."""
    flash_bytes: int = 0
    """Capacity of the flash tier; 0 if there is none."""
    staging_bytes: int = field(default=0, metadata=MAY_BE_OMITTED)
    """Pinned host memory through which everything to and from flash passes, as on CUDA; 0: nothing is
    staged. A slot's device memory is free once it is copied there, and the write to flash goes on."""

    def stages(self, nbytes: int) -> bool:
        """Return True if a slot that takes so many bytes in whole pages can pass on its way to flash."""
        return not self.staging_bytes or nbytes <= self.staging_bytes

    def __post_init__(self) -> None:
        for one in fields(self):
            value: Any = getattr(self, one.name)
            if value < 0:
                raise ConfigError(f"{one.name} is {value}; a budget cannot be negative")
