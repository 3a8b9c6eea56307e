"""A weight update, and the bytes that it moves in each place; nothing here takes time.

A *unit* is the part that a die updates at once: as many parameters as FP32 words fit in a page,
``k = S / 4``, with one page of each state in a plane of its own. Symbols are those of docs/ssd.md.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.device import WORD_BYTES, Device
from penstock.lab.ssd.optimizers import Optimizer, optimizer

_BYTES: Final = (1, 2, 4)
"""Possible sizes of a value."""


class Gradient(enum.StrEnum):
    """Place where a gradient waits for its unit."""

    REGISTER = "register"
    """The cache register of its plane, or the controller's memory: it is never programmed."""
    PROGRAMMED = "programmed"
    """A page of its own, which is programmed when the gradient comes and read when it is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One step of an optimizer over all parameters."""

    parameters: int
    optimizer: str
    state_bytes: tuple[int, ...] = ()
    """Bytes of each state, the weight first; empty for 4 each."""
    gradient_bytes: int = 4
    """Bytes of a gradient as the host sends it."""
    weight_bytes: int = 2
    """Bytes of the new weight as the host gets it."""
    gradient: Gradient = Gradient.REGISTER
    write_amplification: float = 1.0
    """Pages programmed for each page that the update writes; 1 if it writes in sequence."""

    def __post_init__(self) -> None:
        if self.parameters < 1:
            raise ConfigError(f"parameters is {self.parameters}; it must be 1 or more")
        states = len(self.rule.states)
        if self.state_bytes and len(self.state_bytes) != states:
            raise ConfigError(
                f"state_bytes has {len(self.state_bytes)} values, but {self.optimizer} has {states}"
                f" states: {', '.join(self.rule.states)}"
            )
        sizes = {
            "state_bytes": self.state_bytes,
            "gradient_bytes": (self.gradient_bytes,),
            "weight_bytes": (self.weight_bytes,),
        }
        for name, values in sizes.items():
            if not set(values) <= set(_BYTES):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; each value must have one of {_BYTES} bytes"
                )
        if not 1 <= self.write_amplification < 1000:
            raise ConfigError(
                f"write_amplification is {self.write_amplification}; it must be at least 1 and below 1000"
            )

    @property
    def rule(self) -> Optimizer:
        """States and passes of the optimizer."""
        return optimizer(self.optimizer)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each state for a parameter."""
        return self.state_bytes or (WORD_BYTES,) * len(self.rule.states)

    @property
    def states_bytes(self) -> int:
        """Bytes b of all states for a parameter."""
        return sum(self.sizes)

    @property
    def returned_bytes(self) -> int:
        """Bytes that go to the host for each parameter."""
        return self.weight_bytes

    def units(self, device: Device) -> float:
        """Return U = P / k; the last unit may be partial."""
        return self.parameters / (device.geometry.page_bytes // WORD_BYTES)


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """Bytes that a whole step moves, by place."""

    flash_read: int
    flash_written: int
    """Bytes programmed, with write amplification."""
    channel: int
    """Bytes over all channels, in both directions."""
    link_up: int
    link_down: int
    host_dram: int
    """Bytes in both directions: a transfer touches memory once, the update on a processor once more."""


def host_bytes(update: Update) -> UpdateBytes:
    """Count the bytes of a step on the host: it reads states and gradient, and writes the states.

    The gradient was written when backward made it, which is not part of the step.
    """
    count, b, wa = update.parameters, update.states_bytes, update.write_amplification
    read = (b + update.gradient_bytes) * count
    written = b * count
    # garbage collection reads and programs within the drive, over its channels
    moved = round(written * (wa - 1))
    return UpdateBytes(
        flash_read=read + moved,
        flash_written=written + moved,
        channel=read + written + 2 * moved,
        link_up=read,
        link_down=written,
        host_dram=2 * (read + written),
    )


def drive_bytes(update: Update, *, on_die: float) -> UpdateBytes:
    """Count the bytes of a step in the drive: the gradient comes, the new weight goes.

    Args:
        update: The step.
        on_die: Share of the units that dies update; the controller updates the others.
    """
    count, b, wa = update.parameters, update.states_bytes, update.write_amplification
    gradient = update.gradient_bytes * count
    spilled = gradient if update.gradient is Gradient.PROGRAMMED else 0
    read = b * count + spilled + round((b * count + spilled) * (wa - 1))
    written = round((b * count + spilled) * wa)
    returned = update.returned_bytes * count
    by_die = gradient + returned
    by_controller = b * count + 2 * spilled + round(b * count * wa)
    return UpdateBytes(
        flash_read=read,
        flash_written=written,
        channel=round(on_die * by_die + (1 - on_die) * by_controller),
        link_up=returned,
        link_down=gradient,
        host_dram=gradient + returned,
    )
