"""What a plan is made for: the measured speeds of a machine, and the bytes it may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.plan import serial

VERSION = 1


@dataclass(frozen=True)
class Machine:
    """Speeds, as ``penstock bench`` measures them or a specification sheet states them."""

    name: str
    flash_write_bytes_per_s: float
    flash_read_bytes_per_s: float
    flash_latency_s: float
    """From asking for a small read to having it."""
    host_write_bytes_per_s: float
    """Copies from the device to the host tier."""
    host_read_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            least = (
                "zero or more"
                if field.name.endswith("_s") and "bytes" not in field.name
                else "positive"
            )
            low = value < 0 or (least == "positive" and value == 0)
            if not math.isfinite(value) or low:
                raise ConfigError(
                    f"machine {self.name!r}: {field.name} is {value}, it must be {least}"
                )

    def bytes_per_s(self, tier: str) -> tuple[float, float]:
        """How fast a tier is written, and how fast it is read."""
        if tier == "host":
            return self.host_write_bytes_per_s, self.host_read_bytes_per_s
        return self.flash_write_bytes_per_s, self.flash_read_bytes_per_s

    def write_s(self, nbytes: int, tier: str = "flash") -> float:
        """Seconds to write ``nbytes`` to a tier that has nothing else to do."""
        if tier == "host":
            return nbytes / self.host_write_bytes_per_s
        return self.flash_latency_s + nbytes / self.flash_write_bytes_per_s

    def read_s(self, nbytes: int, tier: str = "flash") -> float:
        """Seconds to read ``nbytes`` from a tier that has nothing else to do."""
        if tier == "host":
            return nbytes / self.host_read_bytes_per_s
        return self.flash_latency_s + nbytes / self.flash_read_bytes_per_s

    def to_json(self) -> str:
        """One JSON document."""
        return serial.dump("machine", VERSION, self)

    @staticmethod
    def from_json(text: str, *, source: str = "") -> Machine:
        """Parse ``to_json``'s text. Raises PlanError naming ``source`` and the field at fault."""
        return serial.load(Machine, text, kind="machine", version=VERSION, source=source)

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read a machine from a file.

        Raises:
            ConfigError: The file cannot be read.
            PlanError: It is not a machine; names the file and the field at fault.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"machine file {str(path)!r} cannot be read: {error}") from error
        return Machine.from_json(text, source=str(path))


@dataclass(frozen=True)
class Budgets:
    """Bytes that a plan may use of each memory."""

    device_bytes: int
    """Saved storages that stay, sources of writes in flight, and targets of reads, together."""
    host_bytes: int = 0
    """Capacity of the host tier; 0 if there is none."""
    flash_bytes: int = 0
    """Capacity of the flash tier; 0 if there is none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0:
                raise ConfigError(f"{field.name} is {value}; a budget cannot be negative")
