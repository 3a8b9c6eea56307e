"""``penstock plan --weights flash``: one training step with weights and optimizer records on flash."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.output import print_result
from penstock.cli.plan_network import (
    PlannedNetwork,
    StepShapes,
    TrainingSetup,
    parse_settings,
    subject,
)
from penstock.cli.plan_request import bytes_of, data_rate, device_of
from penstock.core.errors import BudgetError, ConfigError, NoSpaceError, PenstockError
from penstock.core.units import format_bytes, round_up
from penstock.plan import Machine, machines, policies
from penstock.plan.training_step import ENGINE_BYTES, StepPlan, StepPlanner, forward_part
from penstock.plan.weights import ModuleWeights, forward_only, with_records
from penstock.report.step_table import ChangedStep, changed_steps, whole_step

FORMATS: Final = ("exact", "split", "bf16", "int8")
"""Formats of the optimizer's records: those of ``penstock.optim.formats``, which loads torch."""
_STATES: Final = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
_UNUSED: Final = {
    "device_memory": "use --memory, which is for weights, gradients, buffers and saved tensors together",
    "plot": "there is no plot of a step with weights on flash",
    "save_plan": "a plan file has no weights yet",
}


@dataclass(frozen=True)
class StepRequest:
    """A checked request for the plan of a step with weights on flash."""

    subject: PlannedNetwork
    batch_size: int
    shapes: StepShapes
    """The step of this batch."""
    machine: Machine
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

    @property
    def units(self) -> int:
        """Tokens in the step, or images if there are none."""
        return self.shapes.tokens or self.batch_size

    @property
    def unit(self) -> str:
        """Unit of ``units``: ``"tokens"``, or ``"samples"`` if the inputs are no tokens."""
        return "tokens" if self.shapes.tokens else "samples"

    @cached_property
    def weights(self) -> tuple[ModuleWeights, ...]:
        """Weights with records of the optimizer's format; none for forward alone."""
        if self.forward_only:
            return forward_only(self.shapes.weights)
        return with_records(self.shapes.weights, record_bytes(self.optimizer, self.format))

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
            host_bytes=self.host_bytes,
            flash_bytes=self.flash_bytes,
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


def record_bytes(optimizer: str, format_name: str) -> Callable[[int, str], int]:
    """Return a function of (trained parameters, dtype) to the bytes of their records on flash.

    Raises:
        ConfigError: When called: the format is not for this dtype.
    """
    torch = importlib.import_module("torch")
    config = importlib.import_module("penstock.optim.config")
    formats = importlib.import_module("penstock.optim.formats")
    states = [formats.State(name, torch.float32) for name in _STATES[optimizer]]

    def count(elements: int, dtype: str) -> int:
        form = formats.form_of(
            format_name,
            getattr(torch, dtype),
            states,
            with_master=True,
            whole_master=False,
            where=f"--format {format_name}",
        )
        tiles, rest = divmod(elements, config.TILE)
        last = form.record_bytes(round_up(rest, formats.UNIT)) if rest else 0
        return int(tiles * form.record_bytes(config.TILE) + last)

    return count


def check_step(options: argparse.Namespace) -> StepRequest:
    """Check every option before any work is done; then make the profile.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
    """
    for name, why in _UNUSED.items():
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --weights flash: {why}")
    if options.policy == "all":
        raise ConfigError("--policy all does not go with --weights flash; name one policy")
    policies.get(options.policy)
    machine = machines.find(options.machine)
    device = options.device or device_of(machine)
    memory_bytes = bytes_of(options, "memory", machine.device_bytes, least=1)
    host_bytes = bytes_of(options, "host_memory", machine.host_bytes if device == "cuda" else 0)
    flash_bytes: int | None = bytes_of(options, "flash_memory", machine.flash_bytes)
    if options.flash_memory is None and not machine.flash_bytes:
        flash_bytes = None
    tbw_bytes = None if options.tbw is None else bytes_of(options, "tbw", 0, least=1)
    rate = data_rate(options.data_rate, machine)
    machine = machine.less_read(rate) if rate else machine
    # states are on flash, so that none are in device memory
    training = TrainingSetup(machine, device, "sgd", options.autocast)
    found = subject(options.network, training, parse_settings(options.set))
    if found.step_of is None:
        raise ConfigError(
            f"{found.name!r}: a profile does not say what the weights are; name the network, of the zoo"
            " or file.py:function"
        )
    step_of = functools.cache(found.step_of)
    found = replace(found, step_of=step_of)
    batch_size = _batch_size(options, step_of)
    return StepRequest(
        subject=found,
        batch_size=batch_size,
        shapes=step_of(batch_size),
        machine=machine,
        device=device,
        optimizer=options.optimizer,
        format=options.format or "exact",
        policy=options.policy,
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
        flash_bytes=flash_bytes,
        tbw_bytes=tbw_bytes,
        forward_only=options.forward_only,
    )


def _batch_size(options: argparse.Namespace, step_of: Callable[[int], StepShapes]) -> int:
    """Return the batch, given as such or by its tokens."""
    batch, tokens = options.batch, options.tokens
    if (batch is None) == (tokens is None):
        both = "both are given" if batch is not None else "neither is given"
        raise ConfigError(f"a step has --batch N or --tokens N; {both}")
    if tokens is None:
        if batch < 1:
            raise ConfigError(f"--batch is {batch}; it must be 1 or more images or sequences")
        return int(batch)
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; it must be 1 or more")
    each = step_of(1).tokens
    if not each:
        raise ConfigError(
            "--tokens is for networks whose first input is sequences of integers; give --batch"
        )
    if tokens % each:
        raise ConfigError(
            f"--tokens is {tokens}, and a sequence has {each}; give a multiple, or shorter sequences"
            " (--set sequence_length=...)"
        )
    return int(tokens // each)


def execute_step(options: argparse.Namespace) -> int:
    """Plan a step with weights on flash, and print it.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
        BudgetError: The memory is below the least.
        NoSpaceError: Flash has no room.
    """
    request = check_step(options)
    plan = request.plan()
    changes = list(_changes(request, plan))
    print_result(
        options.json,
        lambda: document(request, plan, changes),
        lambda: text(request, plan, changes, verbose=options.verbose),
    )
    return 0


def _changes(request: StepRequest, plan: StepPlan) -> Iterator[ChangedStep]:
    """Plan the step again, with one thing changed at a time."""
    machine = request.machine
    if machine.flash_service is None:
        two = machine.with_drives(2)
        room = None if request.flash_bytes is None else 2 * request.flash_bytes
        yield _changed("a second SSD", replace(request, machine=two, flash_bytes=room))
    more = replace(request, memory_bytes=2 * request.memory_bytes)
    if plan.read_bytes or plan.written_bytes:
        yield _changed(f"twice the memory, {format_bytes(more.memory_bytes)}", more)
    step_of, batch = request.subject.step_of, 2 * request.batch_size
    assert step_of is not None
    twice = replace(request, batch_size=batch, shapes=step_of(batch))
    yield _changed(f"twice the {request.unit}, {twice.units}", twice)
    if plan.parameters:
        for name in FORMATS:
            if name != request.format:
                yield _changed(f"format {name}", replace(request, format=name))


def _changed(name: str, request: StepRequest) -> ChangedStep:
    try:
        return ChangedStep(name, request.units, request.plan())
    except BudgetError as error:
        return ChangedStep(name, request.units, None, f"needs {format_bytes(error.least_bytes)}")
    except NoSpaceError:
        return ChangedStep(name, request.units, None, "no room on flash")
    except ConfigError:
        return ChangedStep(name, request.units, None, "not for these parameters")
    except PenstockError as error:
        return ChangedStep(name, request.units, None, str(error).partition(";")[0])


def text(
    request: StepRequest, plan: StepPlan, changes: list[ChangedStep], *, verbose: bool
) -> RenderableType:
    """Render a report for the terminal."""
    head = Text(f"{request.subject.name}, batch {request.batch_size}", style="bold")
    tokens = f" ({request.units} tokens)" if request.unit == "tokens" else ""
    trained = (
        "forward only"
        if request.forward_only
        else f"{plan.parameters / 1e6:.4g} M trained parameters, with records of {request.optimizer} in"
        f" format {request.format}"
    )
    head.append(
        f"{tokens} on {request.machine.name}\n{format_bytes(plan.weight_bytes)} of weights on flash;"
        f" {trained}"
        f"\n{format_bytes(request.memory_bytes)} of memory for everything, of which at least"
        f" {format_bytes(plan.least_bytes)} ({plan.least_bytes} bytes) are needed",
        style="not bold",
    )
    body = whole_step(
        plan,
        units=request.units,
        unit=request.unit,
        tbw_bytes=request.tbw_bytes,
        flash_bytes=request.flash_bytes,
        verbose=verbose,
    )
    now = ChangedStep("as asked for", request.units, plan)
    return Group(head, Text(), body, Text(), changed_steps([now, *changes], unit=request.unit))


def document(request: StepRequest, plan: StepPlan, changes: list[ChangedStep]) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "schema": 1,
        "penstock": __version__,
        "network": request.subject.name,
        "batch_size": request.batch_size,
        "units": request.units,
        "unit": request.unit,
        "machine": request.machine.name,
        "device": request.device,
        "optimizer": request.optimizer,
        "format": request.format,
        "forward_only": request.forward_only,
        "policy": request.policy,
        "memory_bytes": request.memory_bytes,
        "flash_bytes": request.flash_bytes,
        "tbw_bytes": request.tbw_bytes,
        "step": facts(plan, request.units, request.tbw_bytes),
        "changes": [
            {
                "change": one.name,
                "units": one.units,
                "refused": one.refused or None,
                "step": None if one.plan is None else facts(one.plan, one.units, request.tbw_bytes),
            }
            for one in changes
        ],
    }


def facts(plan: StepPlan, units: int, tbw_bytes: int | None) -> dict[str, Any]:
    """Return a plan as JSON. Times are in nanoseconds."""
    factor, replayed = plan.hidden_factor, plan.replayed
    return {
        **asdict(replayed),
        "stall_ns": replayed.stall_ns,
        "bounds": {**asdict(plan.bounds), "flash": plan.bounds.flash, "binds": plan.bounds.binds},
        "hiding_units": None if factor is None else round(factor * units),
        "memory": {**asdict(plan.memory), "total": plan.memory.total},
        "least_bytes": plan.least_bytes,
        "parameters": plan.parameters,
        "weight_bytes": plan.weight_bytes,
        "disk_bytes": plan.disk_bytes,
        "read_bytes": plan.read_bytes,
        "written_bytes": plan.written_bytes,
        "steps_to_wear_out": None if tbw_bytes is None else plan.steps_until(tbw_bytes),
        "kept": list(plan.kept),
        "cached": list(plan.cached),
        "order": list(plan.order),
    }
