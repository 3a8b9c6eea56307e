"""``penstock plan --weights flash``, ``host``, and ``--ranks``: one whole training step, of one rank.

Weights and optimizer records rest on flash, or with several ranks only the records, as far as memory
does not hold them.
"""

from __future__ import annotations

import argparse
import errno
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import IO, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.output import print_result
from penstock.cli.plan_network import (
    FORMATS,
    OF_GRADIENTS,
    OF_RANKS,
    PlannedNetwork,
    StepShapes,
    TrainingSetup,
    parse_settings,
    several_batches,
    subject,
)
from penstock.cli.plan_request import bytes_of, data_rate, device_of, machine_of
from penstock.cli.recorded_step import RecordedStep
from penstock.core.errors import BudgetError, ConfigError, NoSpaceError, PenstockError
from penstock.core.units import format_bytes, parse_bandwidth, round_up
from penstock.plan import Machine, policies
from penstock.plan.ranks import PARALLEL, Ranks
from penstock.plan.training_step import ENGINE_BYTES, StepPlan, StepPlanner, forward_part
from penstock.plan.weights import (
    IN_BACKWARD,
    IN_STEP,
    ModuleWeights,
    forward_only,
    resting_on_host,
    with_records,
)
from penstock.report.step_table import ChangedStep, changed_steps, ranks_line, whole_step

_STATES: Final = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
_UNUSED: Final = {
    "device_memory": "use --memory, which is for weights, gradients, buffers and saved tensors together",
    "plot": "there is no plot of a whole step",
    "save_plan": "a plan file has no weights yet",
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
    own_optimizer: bool = False
    """True if the optimizer is the script's own, which ``penstock run`` puts on flash as it is."""
    clips: bool = False
    """True if the script clips gradients itself, between backward and ``step()``."""
    weights_on_host: bool | None = False
    """True if all weights rest in host memory; None: as many as fit; False: none."""

    @cached_property
    def machine(self) -> Machine:
        """Machine as one rank has it: its part of what is shared."""
        return _of_one_rank(self.node, self.ranks, self.device, self.data_bytes_per_s)

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
            whole_master=self.own_optimizer and on_device,
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


def _of_one_rank(node: Machine, ranks: Ranks, device: str, rate: int) -> Machine:
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


def check_step_options(options: argparse.Namespace) -> None:
    """Check what needs neither the machine nor the network. Raises ConfigError."""
    for name, why in _UNUSED.items():
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with --weights flash or --ranks: {why}"
            )
    if options.policy == "all":
        raise ConfigError(
            "--policy all does not go with --weights flash or --ranks; name one policy"
        )
    policies.get(options.policy)
    _check_gradients(options)


def _check_gradients(options: argparse.Namespace) -> None:
    """Check the options that say when gradients are made and used. Raises ConfigError."""
    given = [name for name in OF_GRADIENTS if getattr(options, name) is not None]
    for name in (*given, *(["clip"] if options.clip else [])):
        option = f"--{name.replace('_', '-')}"
        if options.forward_only and name != "parts":
            raise ConfigError(f"{option} does not go with --forward-only, which has no update")
        if options.ranks not in {None, 1} and (name, options.update) != ("update", IN_BACKWARD):
            raise ConfigError(
                f"{option} is for one process; with --ranks there is one backward, which updates"
            )
    for name in ("accumulate", "parts"):
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name} is {count}; it must be 1 or more")
    if options.clip and options.update == IN_BACKWARD:
        raise ConfigError(
            "--clip does not go with --update backward: the norm is known after backward (overlap=True"
            " clips by the norm of the step before, which moves nothing)"
        )


def check_step(
    options: argparse.Namespace, recorded: RecordedStep | None = None, *, name: str = ""
) -> StepRequest:
    """Check every option before any work is done; then make the profile.

    Args:
        options: The parsed command line.
        recorded: A step of the user's script, in place of a network.
        name: The script.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
    """
    check_step_options(options)
    node = machine_of(options, recorded)
    device = options.device or (device_of(node) if recorded is None else recorded.device)
    ranks, node = _ranks(options, node)
    machine = ranks.share_of(node, device=device)
    memory_bytes = bytes_of(options, "memory", machine.device_bytes, least=1)
    host_bytes = bytes_of(options, "host_memory", machine.host_bytes if device == "cuda" else 0)
    flash_bytes: int | None = bytes_of(options, "flash_memory", machine.flash_bytes)
    if options.flash_memory is None and not machine.flash_bytes:
        flash_bytes = None
    tbw_bytes = None if options.tbw is None else bytes_of(options, "tbw", 0, least=1)
    rate = data_rate(options.data_rate, machine)
    shapes: StepShapes
    if recorded is not None:
        found = PlannedNetwork(name, None)
        batch_size, shapes = recorded.samples or recorded.passes, recorded
        states: tuple[str, ...] | None = states_on_flash(recorded)
    else:
        machine = _of_one_rank(node, ranks, device, rate)
        # states are on flash, so that none are in device memory
        training = TrainingSetup(machine, device, "sgd", options.autocast)
        found = subject(options.network, training, parse_settings(options.set))
        if found.step_of is None:
            raise ConfigError(
                f"{found.name!r}: a profile does not say what the weights are; name the network, of the"
                " zoo or file.py:function"
            )
        one_of = functools.cache(found.step_of)
        batch_size, states = _batch_size(options, one_of), None
        accumulate, parts = options.accumulate or 1, options.parts or 1
        step_of = several_batches(one_of, accumulate=accumulate, parts=parts)
        found = replace(found, step_of=step_of)
        shapes = step_of(batch_size)
    return StepRequest(
        subject=found,
        batch_size=batch_size,
        shapes=shapes,
        node=node,
        ranks=ranks,
        data_bytes_per_s=rate,
        device=device,
        optimizer=options.optimizer or ("sgd" if recorded is None else recorded.optimizer),
        format=options.format or "exact",
        policy=options.policy,
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
        flash_bytes=flash_bytes,
        tbw_bytes=tbw_bytes,
        forward_only=options.forward_only,
        weights_stay=options.weights == "keep",
        weights_bytes=_part(options, "weights_memory"),
        saved_bytes=_part(options, "saved_memory"),
        states=states,
        update=options.update or _update_of(options, recorded),
        own_optimizer=recorded is not None,
        clips=recorded is not None and recorded.clips,
        gradient_memory=None
        if options.gradient_memory is None
        else bytes_of(options, "gradient_memory", 0),
        weights_on_host=_weights_on_host(options, device),
    )


def _update_of(options: argparse.Namespace, recorded: RecordedStep | None) -> str:
    """Return when weights are updated, where no option says it."""
    is_script = recorded is not None and options.ranks in {None, 1}
    return IN_STEP if options.clip or is_script else IN_BACKWARD


def _weights_on_host(options: argparse.Namespace, device: str) -> bool | None:
    """Return a value of ``StepRequest.weights_on_host``. Raises ConfigError if they are there already."""
    if options.weights != "host":
        is_given = options.weights == "flash" and options.host_memory is not None
        return None if is_given and device != "cpu" else False
    if device == "cpu":
        raise ConfigError(
            "--weights host is for a GPU: on a CPU weights are in host memory already"
        )
    return True


def _part(options: argparse.Namespace, name: str) -> int | None:
    return None if getattr(options, name) is None else bytes_of(options, name, 0, least=1)


def states_on_flash(recorded: RecordedStep) -> tuple[str, ...]:
    """Return the states of a recorded optimizer. Raises ConfigError if they cannot be on flash."""
    if recorded.states_unknown:
        raise ConfigError(
            f"the states of {recorded.optimizer} cannot be planned for on flash:"
            f" {recorded.states_unknown}"
        )
    return recorded.states


def _ranks(options: argparse.Namespace, node: Machine) -> tuple[Ranks, Machine]:
    """Return the ranks, and the machine with the bandwidths of its network that are given."""
    given = {
        name: getattr(options, name) for name in OF_RANKS if getattr(options, name) is not None
    }
    if options.ranks is None:
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} needs --ranks")
        return Ranks(), node
    for name in ("network", "peer"):
        if f"{name}_rate" in given:
            rate = parse_bandwidth(given.pop(f"{name}_rate"), what=f"--{name}-rate")
            changed: dict[str, Any] = {f"{name}_bytes_per_s": float(rate)}
            node = replace(node, **changed)
    ranks = Ranks(options.ranks, **given)
    if node.flash_service is not None and ranks.ssds != ranks.per_node:
        raise ConfigError(
            f"--ssds is {ranks.ssds} for {ranks.per_node} ranks on a node, and the times of a simulated"
            f" drive ({node.name!r}) are those of one rank: give as many SSDs as ranks"
        )
    return ranks, node


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
    print_step(check_step(options), options)
    return 0


def print_step(
    request: StepRequest, options: argparse.Namespace, file: IO[str] | None = None
) -> None:
    """Plan a step, and print the plan, on standard output if no file is given.

    Raises:
        BudgetError: The memory is below the least.
        NoSpaceError: Flash has no room.
    """
    plan = request.plan()
    changes = list(_changes(request, plan))
    print_result(
        options.json,
        lambda: document(request, plan, changes),
        lambda: text(request, plan, changes, verbose=options.verbose),
        file,
    )


def _changes(request: StepRequest, plan: StepPlan) -> Iterator[ChangedStep]:
    """Plan the step again, with one thing changed at a time."""
    ranks = request.ranks
    if request.node.flash_service is None:
        two = replace(ranks, ssds=2 * ranks.ssds)
        room = None if request.flash_bytes is None else 2 * request.flash_bytes
        name = "a second SSD" if ranks.ssds == 1 else f"twice the SSDs, {two.ssds} on a node"
        yield _changed(name, replace(request, ranks=two, flash_bytes=room))
    if ranks.count > 1:
        more_nodes = replace(ranks, count=2 * ranks.count, nodes=2 * ranks.nodes)
        yield _changed(f"twice the nodes, {more_nodes.nodes}", replace(request, ranks=more_nodes))
        other = next(one for one in PARALLEL if one != ranks.parallel)
        yield _changed(other, replace(request, ranks=replace(ranks, parallel=other)))
    if plan.in_step:
        yield _changed("updates in backward", replace(request, update=IN_BACKWARD))
    more = replace(request, memory_bytes=2 * request.memory_bytes)
    is_given = request.weights_bytes is not None and request.saved_bytes is not None
    if (plan.read_bytes or plan.written_bytes) and not is_given:
        yield _changed(f"twice the memory, {format_bytes(more.memory_bytes)}", more)
    step_of, batch = request.subject.step_of, 2 * request.batch_size
    if step_of is not None:
        twice = replace(request, batch_size=batch, shapes=step_of(batch))
        yield _changed(f"twice the {request.unit}, {twice.units}", twice)
    if plan.parameters:
        for name in FORMATS:
            if name != request.format:
                yield _changed(f"format {name}", replace(request, format=name))


def _changed(name: str, request: StepRequest) -> ChangedStep:
    try:
        return ChangedStep(name, request.units, request.plan(), ranks=request.ranks)
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
        f" format {request.format}{', updated in step()' if plan.in_step else ''}"
    )
    where = "in memory" if request.weights_stay else "on flash"
    if plan.host_weight_bytes:
        where = f"on flash, {format_bytes(plan.host_weight_bytes)} of them in host memory"
        where = where if plan.home_bytes else "in host memory"
    head.append(
        f"{tokens} on {request.node.name}{ranks_line(request.ranks, request.machine)}"
        f"\n{format_bytes(plan.weight_bytes)} of weights {where}; {trained}"
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
        ranks=request.ranks,
        unknown=request.unknown,
        verbose=verbose,
    )
    now = ChangedStep("as asked for", request.units, plan, ranks=request.ranks)
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
        "machine": request.node.name,
        "device": request.device,
        "optimizer": request.optimizer,
        "format": request.format,
        "forward_only": request.forward_only,
        "policy": request.policy,
        "update": request.update,
        "clips": request.clips,
        "memory_bytes": request.memory_bytes,
        "flash_bytes": request.flash_bytes,
        "tbw_bytes": request.tbw_bytes,
        "ranks": _ranks_facts(request, plan),
        "step": facts(plan, request.units, request.tbw_bytes, request.ranks),
        "changes": [
            {
                "change": one.name,
                "units": one.units,
                "refused": one.refused or None,
                "step": None
                if one.plan is None
                else facts(one.plan, one.units, request.tbw_bytes, one.ranks),
            }
            for one in changes
        ],
    }


def _ranks_facts(request: StepRequest, plan: StepPlan) -> dict[str, Any]:
    """Return what belongs to all ranks together, and what one has of its node, as JSON."""
    ranks, share = request.ranks, request.machine
    return {
        **asdict(ranks),
        "per_node": ranks.per_node,
        "units": request.units * ranks.count,
        "flash_read_bytes_per_s": share.flash_read_bytes_per_s,
        "flash_write_bytes_per_s": share.flash_write_bytes_per_s,
        "network_bytes_per_s": share.network_bytes_per_s or None,
        "not_known": list(request.unknown),
        "disk_bytes_per_node": plan.disk_bytes * ranks.per_node,
        "disk_bytes_per_ssd": ranks.of_each_ssd(plan.disk_bytes),
        "written_bytes_per_ssd": ranks.of_each_ssd(plan.written_bytes),
    }


def facts(plan: StepPlan, units: int, tbw_bytes: int | None, ranks: Ranks) -> dict[str, Any]:
    """Return a plan as JSON, with the bytes of one rank. Times are in nanoseconds."""
    factor, replayed = plan.hidden_factor, plan.replayed
    return {
        **asdict(replayed),
        "stall_ns": replayed.stall_ns,
        "bounds": {**asdict(plan.bounds), "flash": plan.bounds.flash, "binds": plan.bounds.binds},
        "hiding_units": None if factor is None else round(factor * units),
        "network_hiding_units": round(plan.network_factor * units),
        "memory": {**asdict(plan.memory), "total": plan.memory.total},
        "least_bytes": plan.least_bytes,
        "parameters": plan.parameters,
        "weight_bytes": plan.weight_bytes,
        "host_weight_bytes": plan.host_weight_bytes,
        "disk_bytes": plan.disk_bytes,
        "read_bytes": plan.read_bytes,
        "written_bytes": plan.written_bytes,
        "steps_to_wear_out": None
        if tbw_bytes is None
        else ranks.steps_until(tbw_bytes, plan.written_bytes),
        "kept": list(plan.kept),
        "cached": list(plan.cached),
        "order": list(plan.order),
    }
