"""Wear of the SSD by an optimizer's states, and by gradients beyond their budget."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.units import format_bytes
from penstock.optim import gradients
from penstock.optim.config import RING
from penstock.optim.states import FlashStates


@dataclass(frozen=True, slots=True)
class StepWear:
    """Bytes written by steps."""

    state_bytes_per_step: int
    """Bytes of states, when every parameter has a gradient and records are as long as last time."""
    gradient_bytes_per_step: int
    """Bytes of gradients, in the last step; before the first one, if every parameter has one, once."""
    tbw_bytes: int | None
    """Bytes that the SSD is rated to endure."""
    planned_steps: int | None

    @property
    def bytes_per_step(self) -> int:
        """Written in a step, in all."""
        return self.state_bytes_per_step + self.gradient_bytes_per_step

    @property
    def steps_until_tbw(self) -> int | None:
        """How many steps write what the SSD is rated for; None: not known, or nothing is written."""
        if self.tbw_bytes is None or not self.bytes_per_step:
            return None
        return self.tbw_bytes // self.bytes_per_step

    @property
    def is_beyond(self) -> bool:
        """Return whether the planned steps write more than that."""
        steps = self.steps_until_tbw
        return steps is not None and self.planned_steps is not None and self.planned_steps > steps

    def __str__(self) -> str:
        if not self.bytes_per_step:
            return "optimizer states: nothing is written in a step, for they fit in its buffers"
        each = (self.state_bytes_per_step, ""), (self.gradient_bytes_per_step, " of gradients")
        told = " and ".join(format_bytes(nbytes) + what for nbytes, what in each if nbytes)
        text = f"optimizer states: {told} written in a step"
        if self.steps_until_tbw is not None and self.tbw_bytes is not None:
            text += f", {self.steps_until_tbw} steps until the {self.tbw_bytes / 1e12:g} TB rated"
        if self.is_beyond:
            text += f": the {self.planned_steps} planned write more"
        return text


def wear_of(states: FlashStates) -> StepWear:
    """Estimate the bytes of a step: every record except those in memory; with durable steps, every one.

    A record that was not written yet counts as if it was not squeezed. Gradients count as they were
    written in the last step.
    """
    config = states.config
    sizes = sorted((states.store.record_bytes(tile) for tile in states.tiles), reverse=True)
    stay = staying_tiles(states, states.pipeline.count)
    assert config.tbw is None or isinstance(config.tbw, int)
    return StepWear(sum(sizes[stay:]), _of_gradients(states), config.tbw, config.planned_steps)


def staying_tiles(states: FlashStates, count: int) -> int:
    """Return the number of tiles that stay from step to step in so many buffers of the pipeline.

    Passes that go one way, as with weights on flash, visit these first.
    """
    if states.config.durable:
        return 0
    tiles = len(states.tiles)
    if count >= tiles or not (states.config.overlap or states.holds.has_homes):
        return count
    return count - min(RING, (tiles - count + 1) // 2)  # passes go one way: these pass through


def _of_gradients(states: FlashStates) -> int:
    mine = states.gradients
    if mine is None:
        return 0
    if mine.written_in_step is not None:
        return mine.written_in_step
    times = states.config.accumulation - 1 if states.config.overlap else 1
    return max(mine.written, times * _beyond_budget(states, mine.budget_bytes))


def _beyond_budget(states: FlashStates, budget_bytes: int) -> int:
    """Return the bytes written by a backward that reaches the last parameter first, as most do."""
    held = beyond = 0
    for param in reversed(states.params):
        nbytes = param.count * param.tensor.element_size()
        if not param.tensor.requires_grad:
            continue
        if nbytes > gradients.LEAST_BYTES and held + nbytes > budget_bytes:
            beyond += nbytes
        else:
            held += nbytes
    return beyond
