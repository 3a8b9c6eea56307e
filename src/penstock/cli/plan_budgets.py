"""Answers of ``penstock plan --script``: what budgets cost a recorded step, in text, JSON and a plot."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import IO, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.output import print_result, say
from penstock.cli.plan_codecs import CodecUse, codec_uses, encoding_plan, would_try
from penstock.cli.plan_network import PlannedNetwork
from penstock.cli.plan_request import bytes_of, data_rate, machine_of
from penstock.cli.plan_step import states_on_flash
from penstock.cli.recorded_step import MOST_PASSES, RecordedStep
from penstock.cli.step_request import StepRequest
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.memory import physical_bytes
from penstock.core.units import (
    MIB,
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_bytes,
    round_up,
)
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Action, Plan
from penstock.plan.profile import Profile
from penstock.plan.ranks import Ranks
from penstock.plan.replay import replay
from penstock.plan.weights import IN_STEP
from penstock.report.budget_plot import plot_budgets
from penstock.report.budget_table import (
    BudgetCost,
    FlashCost,
    budget_costs,
    flash_costs,
    mib,
)
from penstock.report.outcome import PolicyOutcome
from penstock.runtime.policy_request import PolicyRequest

_SHARES: Final = (("3/4", 0.75), ("1/2", 0.5), ("1/4", 0.25), ("1/8", 0.125))
_AMPLE_BYTES: Final = 1 << 60
_CHEAP: Final = 1.1
"""Slowdown up to which a budget is recommended."""
_PLACES: Final = {True: "states of the optimizer", False: "weights and states"}


@dataclass(frozen=True)
class BudgetRequest:
    """A recorded step, and what is to be planned for it."""

    name: str
    """The script and its arguments."""
    step: RecordedStep
    given: Machine
    """Machine as it was named or measured."""
    budgets: Budgets
    """Tiers; the device budget is replaced by each that is tried."""
    policy: str
    memory_bytes: tuple[int, ...]
    """Budgets that the user names; none: shares of what is saved."""
    data_bytes_per_s: int
    tbw_bytes: int | None
    has_tried_codecs: bool = False
    """True if lossless codecs were tried on what the step saved."""

    @cached_property
    def machine(self) -> Machine:
        """Machine whose flash is reduced by the reads of data loaders."""
        rate = self.data_bytes_per_s
        return self.given.less_read(rate) if rate else self.given

    @property
    def setting(self) -> str:
        """Option of ``penstock run`` that sets the budget."""
        return "--memory" if self.step.is_cpu else "--device-memory"

    @cached_property
    def least_bytes(self) -> int | None:
        """Least budget, in whole MiB; None if it is not known."""
        found = self._question(_AMPLE_BYTES).min_budget_bytes()
        return None if found is None else round_up(found, MIB)

    @cached_property
    def whole(self) -> BudgetCost:
        """The step without a budget."""
        return self._cost("all", self.step.kinds.peak_saved_bytes, policy="keep")

    @cached_property
    def costs(self) -> tuple[BudgetCost, ...]:
        """The step without a budget, and within each budget; the largest first."""
        return (self.whole, *self._smaller())

    def _smaller(self) -> Iterator[BudgetCost]:
        if self.memory_bytes:
            for nbytes in sorted(self.memory_bytes, reverse=True):
                yield self._cost("given", nbytes)
            return
        saved, least = self.step.kinds.peak_saved_bytes, self.least_bytes
        if least is None or least >= saved:
            return
        for name, share in _SHARES:
            nbytes = round_up(round(saved * share), MIB)
            if least < nbytes < saved:
                yield self._cost(name, nbytes)
        yield self._cost("least", least)

    @cached_property
    def with_codecs(self) -> tuple[tuple[BudgetCost, tuple[CodecUse, ...]], ...]:
        """Budgets within which codecs make a step shorter, and what they encode; none if not tried."""
        found = []
        for one in self.costs[1:] if self.has_tried_codecs else ():
            if self.would_try_codecs(one):
                made = encoding_plan(self._question(one.budget_bytes, profile=self.step.kinds))
                if made is not None:
                    cost = self._replayed(one.name, one.budget_bytes, *made)
                    # their scratch memory may cost more than they save
                    if cost.fits and not (one.fits and cost.step_ns >= one.step_ns):
                        found.append((cost, codec_uses(*made)))
        return tuple(found)

    def would_try_codecs(self, one: BudgetCost) -> bool:
        """Return whether a session tries codecs within a budget."""
        return would_try(self._question(one.budget_bytes), one.outcome.plan)

    @cached_property
    def _as_it_is(self) -> Profile:
        return self.step.kinds.without_codecs()

    def _question(self, device_bytes: int, *, profile: Profile | None = None) -> PolicyRequest:
        """Return the question that a session answers with a plan, for a budget; without codecs."""
        step = self.step
        return PolicyRequest(
            policy=self.policy,
            profile=profile or self._as_it_is,
            machine=self.machine,
            budgets=replace(self.budgets, device_bytes=device_bytes),
            slack_bytes=self._slack_bytes(device_bytes),
            peak_slack_bytes=self._slack_bytes(step.kinds.peak_saved_bytes),
        )

    def _slack_bytes(self, device_bytes: int) -> int:
        if not self.step.is_cpu:
            return 0
        movers: Any = importlib.import_module("penstock.runtime.movers")  # loads torch
        return int(movers.page_slack_bytes(device_bytes))

    def _cost(self, name: str, device_bytes: int, *, policy: str = "") -> BudgetCost:
        question = self._question(device_bytes)
        plan = replace(question, policy=policy or self.policy).plan()
        return self._replayed(name, device_bytes, question, plan)

    def _replayed(
        self, name: str, device_bytes: int, question: PolicyRequest, plan: Plan
    ) -> BudgetCost:
        found = replay(question.profile, plan, question.machine, trace=True)
        assert found.trace is not None
        step, per_step = self.step, self.step.per_step
        saved = step.kinds.peak_saved_bytes
        held = step.process_peak_bytes + step.state_bytes - saved + min(saved, device_bytes)
        return BudgetCost(
            name=name,
            budget_bytes=device_bytes,
            outcome=PolicyOutcome(plan, found, found.trace, None),
            step_ns=per_step(found.step_ns),
            slowdown=found.slowdown,
            stall_ns=per_step(found.stall_ns),
            spilled_bytes=per_step(_spilled_bytes(step, plan)),
            written_bytes=per_step(found.flash.written_bytes),
            held_bytes=held if step.is_cpu and step.process_peak_bytes else None,
        )

    @property
    def advised(self) -> BudgetCost | None:
        """The smallest budget that costs little, or else the one that costs least; None: none fits."""
        encoded = {one.budget_bytes: one for one, _ in self.with_codecs if one.fits}
        costs = (encoded.get(one.budget_bytes, one) for one in self.costs[1:])
        fitting = [one for one in costs if one.fits]
        cheap = [one for one in fitting if one.slowdown <= _CHEAP]
        return min(cheap, key=lambda one: one.budget_bytes) if cheap else next(iter(fitting), None)

    # -- states and weights on flash ----------------------------------------------------------------

    @cached_property
    def on_flash(self) -> tuple[tuple[FlashCost, ...], tuple[str, ...]]:
        """The step with states, and with weights and states, on flash; and why one is missing."""
        found, notes = [], []
        for weights_stay, name in _PLACES.items():
            try:
                made = self._on_flash(name, weights_stay=weights_stay)
            except PenstockError as error:
                notes.append(f"{name} on flash: {error}")
                continue
            if made is not None:
                found.append(made)
        return tuple(found), tuple(dict.fromkeys(notes))

    def _on_flash(self, name: str, *, weights_stay: bool) -> FlashCost | None:
        step, states = self.step, states_on_flash(self.step)
        if weights_stay and not states:
            return None
        if not step.weights:
            raise ConfigError("no module with parameters ran")
        request = StepRequest(
            subject=PlannedNetwork(self.name, None),
            batch_size=step.units,
            shapes=step,
            node=self.given,
            ranks=Ranks(),
            data_bytes_per_s=self.data_bytes_per_s,
            device=step.device,
            optimizer=step.optimizer,
            format="exact",
            policy=self.policy,
            memory_bytes=_AMPLE_BYTES,
            host_bytes=self.budgets.host_bytes,
            flash_bytes=self.budgets.flash_bytes,
            tbw_bytes=self.tbw_bytes,
            forward_only=False,
            weights_stay=weights_stay,
            states=states,
            update=IN_STEP,
            own_optimizer=True,
            clips=step.clips,
            gradient_memory=_AMPLE_BYTES if weights_stay else 0,
        )
        least = request.planner.least.total
        plan = replace(request, memory_bytes=least).plan()
        factor = plan.hidden_factor
        return FlashCost(
            name=name,
            least_bytes=least,
            step_ns=plan.replayed.step_ns,
            binds=plan.bounds.binds,
            hiding_units=None if factor is None else round(factor * step.units),
            written_bytes=plan.written_bytes,
            disk_bytes=plan.disk_bytes,
        )


def _spilled_bytes(step: RecordedStep, plan: Plan) -> int:
    """Return the bytes of the slots that leave memory, in one pass of each kind."""
    moved = {one.key.match_key for one in plan.decisions if one.action is Action.OFFLOAD}
    return sum(slot.key.nbytes for slot in step.kinds.slots if slot.key.match_key in moved)


def requested(options: argparse.Namespace, step: RecordedStep, name: str) -> BudgetRequest:
    """Return what the options ask for. Raises ConfigError if one is invalid."""
    machine = machine_of(options, step)
    flash = bytes_of(options, "flash_memory", machine.flash_bytes or _AMPLE_BYTES)
    host = bytes_of(options, "host_memory", 0 if step.is_cpu else machine.host_bytes)
    texts = [] if options.memory is None else str(options.memory).split(",")
    sizes = (int(text) if text.isdigit() else text for text in texts)
    return BudgetRequest(
        name=name,
        step=step,
        given=machine,
        budgets=Budgets(device_bytes=1, host_bytes=host, flash_bytes=flash),
        policy=options.policy,
        memory_bytes=tuple(parse_bytes(size, what="--memory") for size in sizes),
        data_bytes_per_s=data_rate(options.data_rate, machine),
        tbw_bytes=None if options.tbw is None else bytes_of(options, "tbw", 0, least=1),
        has_tried_codecs=options.codec == "auto",
    )


def print_budgets(options: argparse.Namespace, step: RecordedStep, name: str, file: IO[str]) -> int:
    """Plan for a recorded step, print and draw; return 1 if no budget that the user names fits.

    Raises:
        ConfigError: An option is invalid, or a picture cannot be drawn.
    """
    request = requested(options, step, name)
    if options.plot is not None:
        plot_budgets(request.costs, options.plot, title=name, setting=request.setting)
    print_result(options.json, lambda: document(request), lambda: text(request), file)
    planned = [*request.costs[1:], *(one for one, _ in request.with_codecs)]
    fits = any(one.fits for one in planned) or not request.memory_bytes
    if not fits:
        say(f"error: no budget fits; {_least(request)}")
    return 0 if fits else 1


def _least(request: BudgetRequest) -> str:
    least = request.least_bytes
    return (
        "the least is not known" if least is None else f"the least is {mib(least)} ({least} bytes)"
    )


# -- text ---------------------------------------------------------------------------------------------


def text(request: BudgetRequest) -> RenderableType:
    """Render a report for the terminal."""
    costs, notes = request.on_flash
    parts: list[RenderableType] = [
        _head(request),
        Text(),
        budget_costs(request.costs, setting=request.setting, tbw_bytes=request.tbw_bytes),
        Text(),
        Text(_advice(request)),
        *_codecs(request),
    ]
    if costs:
        unit = _unit(request.step)
        parts += [Text(), flash_costs(costs, unit=unit, tbw_bytes=request.tbw_bytes)]
        parts += [Text(), Text(_meaning_of_units(request.step))]
    return Group(*parts, *(Text(f"note: {note}") for note in notes))


def _head(request: BudgetRequest) -> Text:
    step, machine = request.step, request.machine
    line = Text(request.name, style="bold")
    which = "the first step" if step.number == 1 else f"step {step.number}"
    passes = (
        "one forward and backward" if step.passes == 1 else f"{step.passes} forwards and backwards"
    )
    units = f" of {step.units} {_unit(step)}" if step.tokens or step.samples else ""
    states = (
        "states that are not known"
        if step.states_unknown
        else f"states of {step.optimizer} {format_bytes(step.state_bytes)}"
    )
    held = "this process" if step.is_cpu else "torch on this device"
    small = step.kinds.small_bytes
    line.append(
        f"\n{which}, {passes}{units}: {format_duration(request.whole.step_ns / 1e9)} of computing"
        f"\nsaved for backward: {format_bytes(step.saved_bytes)} in {step.slots} tensors;"
        f" {format_bytes(step.kinds.peak_saved_bytes)} at once"
        + (f", of which {format_bytes(small)} in small ones that stay" if small else "")
        + f"\nweights {format_bytes(step.weight_bytes)}, gradients {format_bytes(step.gradient_bytes)},"
        f" {states}; {held} held {format_bytes(step.process_peak_bytes)} at most, before the first"
        " update"
        f"\nflash of {machine.name}: writes {format_bandwidth(machine.flash_write_bytes_per_s)}, reads"
        f" {format_bandwidth(machine.flash_read_bytes_per_s)}" + _measured(request),
        style="not bold",
    )
    return line


def _measured(request: BudgetRequest) -> str:
    """Return the rest of the line about flash, and on a GPU a line about the link."""
    machine = request.machine
    if request.step.is_cpu:
        return "" if machine.compute else "; measured, without what transfers cost computing"
    measured = "" if machine.compute else "; both were measured now"
    out, back = (format_bandwidth(rate) for rate in machine.bytes_per_s("host"))
    return f"\nlink of {machine.name}: from the device {out}, to it {back}{measured}"


def _unit(step: RecordedStep) -> str:
    return "tokens" if step.tokens else "samples" if step.samples else "passes"


def _meaning_of_units(step: RecordedStep) -> str:
    more = (
        f" These two are of the first {MOST_PASSES} of its {step.passes} passes."
        if step.passes > MOST_PASSES
        else ""
    )
    return (
        f"T*: from so many {_unit(step)} a step on, flash hides behind compute; this step has"
        f" {step.units}.{more}"
    )


def _advice(request: BudgetRequest) -> str:
    """Say in a sentence how much a budget helps this script."""
    one, saved = request.advised, request.step.kinds.peak_saved_bytes
    if one is None:
        least = _least(request)
        return f"A smaller budget does not help this script: {least}, and it saves {mib(saved)}."
    less = format_bytes(max(0, saved - one.budget_bytes))
    return (
        f"With {request.setting} {mib(one.budget_bytes)} a step holds {less} less, and its forward and"
        f" backward take {one.slowdown:.2f} times as long:\n"
        f"penstock run {request.setting} {mib(one.budget_bytes)}{_host_memory(request, one)} --flash DIR"
        f" {request.name}"
    )


def _host_memory(request: BudgetRequest, one: BudgetCost) -> str:
    """Return the option for host memory, without which there is no way out of a GPU."""
    if request.step.is_cpu:
        return ""
    accelerator: Any = importlib.import_module("penstock.runtime.cuda.accelerator")
    wanted = accelerator.host_memory_for(one.outcome.replayed.host.peak_bytes)
    nbytes = min(wanted, physical_bytes())
    return f" --host-memory {mib(nbytes)}"


def _codecs(request: BudgetRequest) -> Iterator[RenderableType]:
    """Say what lossless codecs change, or where a session would try them."""
    tried = [mib(one.budget_bytes) for one in request.costs[1:] if request.would_try_codecs(one)]
    if not request.has_tried_codecs:
        if tried:
            yield Text(
                f"note: within {', '.join(tried)} the tiers bind, so a session tries lossless codecs, and"
                " may write less; --codec auto tries them on this step"
            )
        return
    yield Text()
    if not request.with_codecs:
        why = "none pays" if tried else "within no budget do the tiers bind"
        yield Text(f"Lossless codecs change nothing: {why}.")
        return
    yield budget_costs(
        [one for one, _ in request.with_codecs],
        setting=request.setting,
        tbw_bytes=request.tbw_bytes,
        title="With lossless codecs, where a session uses them",
    )
    yield Text()
    for one, uses in request.with_codecs:
        yield Text(f"{mib(one.budget_bytes)}: {', '.join(map(str, uses))}")


# -- JSON ---------------------------------------------------------------------------------------------


def document(request: BudgetRequest) -> dict[str, Any]:
    """Return the JSON document. Times are in nanoseconds."""
    step, machine = request.step, request.machine
    flash, notes = request.on_flash
    return {
        "schema": 1,
        "penstock": __version__,
        "script": request.name,
        "step": step.number,
        "passes": step.passes,
        "tokens": step.tokens or None,
        "samples": step.samples or None,
        "device": step.kinds.device,
        "machine": machine.name,
        "flash_read_bytes_per_s": machine.flash_read_bytes_per_s,
        "flash_write_bytes_per_s": machine.flash_write_bytes_per_s,
        "link_read_bytes_per_s": None if step.is_cpu else machine.host_read_bytes_per_s,
        "link_write_bytes_per_s": None if step.is_cpu else machine.host_write_bytes_per_s,
        "data_bytes_per_s": request.data_bytes_per_s,
        "tbw_bytes": request.tbw_bytes,
        "saved": {
            "slots": step.slots,
            "bytes": step.saved_bytes,
            "peak_bytes": step.kinds.peak_saved_bytes,
            "small_bytes": step.kinds.small_bytes,
            "small_count": step.kinds.small_count,
        },
        "weight_bytes": step.weight_bytes,
        "gradient_bytes": step.gradient_bytes,
        "optimizer": step.optimizer,
        "states": list(step.states),
        "state_bytes": step.state_bytes,
        "peak_bytes": step.process_peak_bytes,
        "setting": request.setting,
        "least_bytes": request.least_bytes,
        "budgets": [_facts(one, request.tbw_bytes) for one in request.costs],
        "try_codecs": [
            one.budget_bytes for one in request.costs[1:] if request.would_try_codecs(one)
        ],
        "with_codecs": [
            {**_facts(one, request.tbw_bytes), "codecs": [asdict(each) for each in uses]}
            for one, uses in request.with_codecs
        ]
        if request.has_tried_codecs
        else None,
        "on_flash": [
            {**asdict(one), "steps_to_wear_out": _steps(one.written_bytes, request.tbw_bytes)}
            for one in flash
        ],
        "notes": list(notes),
    }


def _facts(one: BudgetCost, tbw_bytes: int | None) -> dict[str, Any]:
    replayed = one.outcome.replayed
    return {
        "name": one.name,
        "budget_bytes": one.budget_bytes,
        "fits": one.fits,
        "step_ns": one.step_ns,
        "slowdown": one.slowdown,
        "stall_ns": one.stall_ns,
        "spilled_bytes": one.spilled_bytes,
        "written_bytes": one.written_bytes,
        "device_peak_bytes": replayed.peak_bytes,
        "flash_peak_bytes": replayed.flash.peak_bytes,
        "process_bytes": one.held_bytes,
        "steps_to_wear_out": _steps(one.written_bytes, tbw_bytes),
    }


def _steps(written_bytes: int, tbw_bytes: int | None) -> int | None:
    return tbw_bytes // written_bytes if tbw_bytes and written_bytes else None
