"""A checked request for the plan of a whole training step."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from penstock.cli.plan_network import PlannedNetwork, StepShapes
from penstock.core.errors import NoSpaceError
from penstock.core.units import round_up
from penstock.plan import Machine, policies
from penstock.plan.ranks import Ranks
from penstock.plan.step_plan import StepPlan
from penstock.plan.step_profile import forward_part
from penstock.plan.training_step import ENGINE_BYTES, StepPlanner
from penstock.plan.weights import (
    IN_BACKWARD,
    IN_STEP,
    ModuleWeights,
    forward_only,
    resting_on_host,
    with_records,
)

_STATES: Final = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
}


@dataclass(frozen=True)
class StepRequest:
    """A checked request for the plan of a whole step."""

    subject: PlannedNetwork
    batch_size: int
    shapes: StepShapes
    """The step of this batch."""
    node: Machine
    """The machine as it is given, all of it."""
    ranks: Ranks
    data_bytes_per_s: int
    """Rate at which data loaders of each rank read from flash."""
    device: str
    optimizer: str
    format: str
    policy: str
    memory_bytes: int
    host_bytes: int
    flash_bytes: int | None
    """Room on flash; None: not known, so taken to be enough."""
    tbw_bytes: int | None
    forward_only: bool
    weights_stay: bool
    weights_bytes: int | None = None
    """Memory of weights; None: as much as makes the step shortest. The next is that of saved tensors."""
    saved_bytes: int | None = None
    states: tuple[str, ...] | None = None
    """Names of the optimizer's states, if they are known otherwise than by its name."""
    update: str = IN_BACKWARD
    """When weights are updated: ``IN_BACKWARD`` or ``IN_STEP``."""
    gradient_memory: int | None = None
    """Memory of gradients that wait; None: as much as makes the step shortest."""
    gradients_last: bool = False
    """True if gradients wait in memory only beside all weights."""
    own_optimizer: bool = False
    """True if the optimizer is the script's own, which ``penstock run`` puts on flash as it is."""
    clips: bool = False
    """True if the script clips gradients itself, between backward and ``step()``."""
    weights_on_host: bool | None = False
    """True if all weights rest in host memory; None: as many as fit; False: none."""

    @cached_property
    def machine(self) -> Machine:
        """Machine as one rank has it: its part of what is shared."""
        return of_one_rank(self.node, self.ranks, self.device, self.data_bytes_per_s)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Fields of the machine that are not known, so that their time is not counted."""
        return self.ranks.unknown(self.node)

    @property
    def units(self) -> int:
        """Tokens in the step, or images if there are none."""
        return self.shapes.tokens or self.batch_size

    @property
    def unit(self) -> str:
        """Unit of ``units``: ``"tokens"``, or ``"samples"`` if the inputs are no tokens."""
        return "tokens" if self.shapes.tokens else "samples"

    @property
    def weights(self) -> tuple[ModuleWeights, ...]:
        """Weights with records of the optimizer's format; none for forward alone."""
        return self._resting[0]

    @cached_property
    def _resting(self) -> tuple[tuple[ModuleWeights, ...], int]:
        """Weights, of which some may rest in host memory, and the bytes that they leave of that."""
        weights = self._all_weights()
        if self.weights_on_host is False:
            return weights, self.host_bytes
        found, left = resting_on_host(weights, self.host_bytes)
        needed = sum(one.read_bytes for one in found if one.can_rest)
        if self.weights_on_host and not all(one.on_host for one in found if one.can_rest):
            raise NoSpaceError(
                errno=errno.ENOSPC,
                op="plan of weights",
                path="host memory",
                offset_bytes=0,
                nbytes=needed,
                free_bytes=self.host_bytes,
                advice=f"weights take {needed} bytes, and host memory has {self.host_bytes}: raise"
                " --host-memory, or --weights flash, with which those that fit rest there",
            )
        return found, left

    def _all_weights(self) -> tuple[ModuleWeights, ...]:
        divided = self.ranks.divide(self.shapes.weights)
        if self.forward_only:
            return forward_only(divided)
        on_device = self.device != "cpu"
        needed = record_bytes(
            self.optimizer,
            self.format,
            self.states,
            with_master=not self.own_optimizer or on_device,
            whole_master=on_device,
        )
        states = _STATES[self.optimizer] if self.states is None else self.states
        update_s = (
            getattr(self.node, f"update_{self.format}_s") if states == _STATES["adam"] else 0.0
        )
        return with_records(divided, needed, update_s)

    @cached_property
    def planner(self) -> StepPlanner:
        """Planner of this step; refuses what flash has no room for."""
        auto, profile = self.policy == "auto", self.shapes.profile
        return StepPlanner(
            forward_part(profile) if self.forward_only else profile,
            self.weights,
            self.machine,
            policy=policies.get(self.policy),
            least_policy=policies.get("all") if auto else None,
            ring_bytes=self._ring_bytes if self.device == "cpu" else 0,
            host_bytes=self._resting[1],
            flash_bytes=self.flash_bytes,
            weights_stay=self.weights_stay,
            weights_bytes=self.weights_bytes,
            saved_bytes=self.saved_bytes,
            update=self.update,
            gradient_memory=self.gradient_memory,
            gradients_last=self.gradients_last,
            clips=self.clips and self.update == IN_STEP,
        )

    @property
    def _ring_bytes(self) -> int:
        """Host memory of the buffers of transfers; on an accelerator they are not in its memory."""
        config = importlib.import_module("penstock.optim.config")
        ring: int = config.RING_BYTES * config.TILE
        return ENGINE_BYTES + ring * any(one.state_bytes for one in self.weights)

    def plan(self) -> StepPlan:
        """Return the plan.

        Raises:
            BudgetError: The memory is below the least.
            NoSpaceError: Flash has no room.
        """
        return self.planner.plan(self.memory_bytes)


def of_one_rank(node: Machine, ranks: Ranks, device: str, rate: int) -> Machine:
    """Return what one rank has of a node, less the rate at which its data loaders read."""
    share = ranks.share_of(node, device=device)
    return share.less_read(rate) if rate else share


def record_bytes(
    optimizer: str,
    format_name: str,
    states: Sequence[str] | None = None,
    *,
    with_master: bool = True,
    whole_master: bool = False,
) -> Callable[[int, str], int]:
    """Return a function of (trained parameters, dtype) to the bytes of their records on flash.

    Args:
        optimizer: Value of ``--optimizer``.
        format_name: Format of the records.
        states: Names of the states that it keeps; None: those of ``optimizer``.
        with_master: True if 16-bit parameters have a float32 master in every format, as those of
            ``FlashAdamW``; False if they have none in ``exact``, as of optimizers that are put on flash.
        whole_master: True if every bit of the master is kept, also beside a float32 weight, as it is for
            weights on a device.

    Raises:
        ConfigError: When called: the format is not for this dtype.
    """
    torch = importlib.import_module("torch")
    config = importlib.import_module("penstock.optim.config")
    formats = importlib.import_module("penstock.optim.formats")
    names = _STATES[optimizer] if states is None else states
    has_master = with_master or format_name != "exact"

    def count(elements: int, dtype: str) -> int:
        stepped = formats.stepped_dtype(getattr(torch, dtype), with_master=has_master)
        form = formats.form_of(
            format_name,
            getattr(torch, dtype),
            [formats.State(name, stepped) for name in names],
            with_master=has_master,
            whole_master=whole_master,
            where=f"--format {format_name}",
        )
        tiles, rest = divmod(elements, config.TILE)
        last = form.record_bytes(round_up(rest, formats.UNIT)) if rest else 0
        return int(tiles * form.record_bytes(config.TILE) + last)

    return count
