"""What the states of an optimizer cost the SSD that they are on."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.units import format_bytes
from penstock.optim.states import FlashStates


@dataclass(frozen=True, slots=True)
class Wear:
    """What steps write."""

    bytes_per_step: int
    """Written in a step, when every parameter has a gradient and records are as long as last time."""
    tbw_bytes: int | None
    """What the SSD is rated for."""
    planned_steps: int | None

    @property
    def steps_until_tbw(self) -> int | None:
        """How many steps write what the SSD is rated for; None: not known, or nothing is written."""
        if self.tbw_bytes is None or not self.bytes_per_step:
            return None
        return self.tbw_bytes // self.bytes_per_step

    @property
    def is_beyond(self) -> bool:
        """Whether the planned steps write more than that."""
        steps = self.steps_until_tbw
        return steps is not None and self.planned_steps is not None and self.planned_steps > steps

    def __str__(self) -> str:
        if not self.bytes_per_step:
            return "optimizer states: nothing is written in a step, for they fit in its buffers"
        text = f"optimizer states: {format_bytes(self.bytes_per_step)} written in a step"
        if self.steps_until_tbw is not None and self.tbw_bytes is not None:
            text += f", {self.steps_until_tbw} steps until the {self.tbw_bytes / 1e12:g} TB rated"
        if self.is_beyond:
            text += f": the {self.planned_steps} planned write more"
        return text


def wear_of(states: FlashStates) -> Wear:
    """What a step writes: every record but those that stay in memory; with durable steps, every one.

    A record that was not written yet counts as if it was not squeezed.
    """
    config = states.config
    sizes = sorted((states.pipeline.record_bytes(tile) for tile in states.tiles), reverse=True)
    stay = 0 if config.durable else states.pipeline.count
    assert config.tbw is None or isinstance(config.tbw, int)
    return Wear(sum(sizes[stay:]), config.tbw, config.planned_steps)
