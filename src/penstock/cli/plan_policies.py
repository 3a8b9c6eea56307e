"""``penstock plan`` for what autograd saves: one policy, or all of them side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.output import print_result, say
from penstock.cli.paths import write_file
from penstock.cli.plan_request import PlanRequest, check
from penstock.core.units import format_bandwidth, format_bytes, format_duration
from penstock.plan.plan import INFEASIBLE
from penstock.plan.serial import encode_fields
from penstock.report.outcome import PolicyOutcome, best_first, outcome
from penstock.report.plan_plot import plot_plan
from penstock.report.plan_table import LargestFit, all_policies, one_policy


def execute_policies(options: argparse.Namespace) -> int:
    """Plan, print, draw, save; return 1 if nothing fits.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
        PlanError: The file has no valid profile.
    """
    request = check(options)
    largest = _largest(request)
    outcomes = best_first(
        outcome(name, request.profile, request.machine, request.budgets)
        for name in request.policies
    )
    best = outcomes[0]
    if options.plot is not None:
        plot_plan(best, options.plot, title=_title(request, best))
    if options.save_plan is not None:
        write_file(options.save_plan, best.plan.to_json() + "\n", "--save-plan")
    print_result(
        options.json,
        lambda: document(request, outcomes, largest),
        lambda: text(request, outcomes, largest, verbose=options.verbose),
    )
    if not best.fits:
        say(f"error: {_why_not(outcomes)}")
    return 0 if best.fits else 1


def _largest(request: PlanRequest) -> dict[str, LargestFit]:
    """Return the largest batch of each policy; `auto` comes last, and starts from those of the others."""
    if request.search is None:
        return {}
    order = sorted(request.policies, key=lambda name: name == "auto")
    return {name: request.search.of(name) for name in order}


def _why_not(outcomes: Sequence[PolicyOutcome]) -> str:
    """Explain why the best of the plans does not fit, and which memory would suffice."""
    best = outcomes[0]
    whose = f"policy {best.policy}" if len(outcomes) == 1 else f"no policy fits; {best.policy}"
    if best.least_bytes is None:
        budgets = best.plan.budgets
        return (
            f"{whose}: the tiers have too little room, {format_bytes(budgets.host_bytes)} of host"
            f" memory and {format_bytes(budgets.flash_bytes)} of flash, and no device memory was"
            " found that makes up for it; give more of these"
        )
    notes = (note for note in best.plan.notes if note.startswith(INFEASIBLE))
    why = next(notes, "the device budget cannot be kept")
    more = f"; --device-memory {best.least_bytes} would do"
    return f"{whose}: {why}{more * (f'at least {best.least_bytes} bytes' not in why)}"


def _head(request: PlanRequest) -> Text:
    profile, budgets = request.profile, request.budgets
    batch = f", batch {request.batch_size}" if request.batch_size else ""
    line = Text(f"{request.subject.name}{batch}", style="bold")
    line.append(f" on {request.machine.name}", style="not bold")
    counted = "of all device memory" if request.whole_device else "of what autograd saves"
    line.append(
        f"\na step saves {format_bytes(profile.saved_bytes)} in {len(profile.slots)} slots; if all of it"
        f" stayed, the peak {counted} would be {format_bytes(profile.peak_saved_bytes)}"
        f"\nbudget {format_bytes(budgets.device_bytes)} {counted}; tiers: host"
        f" {format_bytes(budgets.host_bytes)}, flash {format_bytes(budgets.flash_bytes)}",
        style="not bold",
    )
    if request.data_bytes_per_s:
        left = format_bandwidth(request.machine.flash_read_bytes_per_s)
        line.append(
            f"\ndata loaders read {format_bandwidth(request.data_bytes_per_s)} of flash all the time,"
            f" which leaves reads of {left}",
            style="not bold",
        )
    if request.whole_device and request.search is not None:
        line.append(
            f"\nparameters, gradients and the state of {request.training.optimizer}:"
            f" {format_bytes(profile.fixed_bytes)}",
            style="not bold",
        )
    return line


def text(
    request: PlanRequest,
    outcomes: Sequence[PolicyOutcome],
    largest: Mapping[str, LargestFit],
    *,
    verbose: bool,
) -> RenderableType:
    """Render a report for the terminal."""
    head, best = _head(request), outcomes[0]
    if len(outcomes) == 1:
        body = one_policy(
            best,
            largest=largest.get(best.policy),
            tbw_bytes=request.tbw_bytes,
            verbose=verbose,
        )
        return Group(head, Text(), body)
    oracle = format_duration(best.replayed.ideal_ns / 1e9)
    foot = f"The oracle, a step with memory without end, takes {oracle}."
    return Group(head, Text(), all_policies(outcomes, largest=largest), Text(), Text(foot))


def document(
    request: PlanRequest, outcomes: Sequence[PolicyOutcome], largest: Mapping[str, LargestFit]
) -> dict[str, Any]:
    """Return the JSON document."""
    profile = request.profile
    return {
        "schema": 1,
        "penstock": __version__,
        "network": request.subject.name,
        "batch_size": request.batch_size,
        "machine": request.machine.name,
        "device": profile.device,
        "whole_device": request.whole_device,
        "budgets": asdict(request.budgets),
        "tbw_bytes": request.tbw_bytes,
        "data_bytes_per_s": request.data_bytes_per_s,
        "flash_read_bytes_per_s": request.machine.flash_read_bytes_per_s,
        "flash_write_bytes_per_s": request.machine.flash_write_bytes_per_s,
        "profile": {
            "slots": len(profile.slots),
            "saved_bytes": profile.saved_bytes,
            "peak_bytes": profile.peak_saved_bytes,
            "fixed_bytes": profile.fixed_bytes,
        },
        "policies": [_facts(one, largest.get(one.policy), request.tbw_bytes) for one in outcomes],
    }


def _facts(one: PolicyOutcome, largest: LargestFit | None, tbw_bytes: int | None) -> dict[str, Any]:
    found = asdict(one.replayed)
    del found["trace"], found["feasible"]
    for tier in ("host", "flash"):
        found[tier]["average_bytes"] = one.average_bytes(tier)
    written = one.replayed.flash.written_bytes
    return {
        "policy": one.policy,
        "fits": one.fits,
        "least_device_bytes": one.least_bytes,
        "largest_batch": None if largest is None else asdict(largest),
        **found,
        "stall_ns": one.replayed.stall_ns,
        "slowdown": one.replayed.slowdown,
        "first_fit": {**asdict(one.first_fit), "fragmentation": one.first_fit.fragmentation},
        "two_ended": {**asdict(one.two_ended), "fragmentation": one.two_ended.fragmentation},
        "moved_bytes": one.moved_bytes,
        "tbw_share": None if tbw_bytes is None else written / tbw_bytes,
        "steps_to_wear_out": None if not (tbw_bytes and written) else tbw_bytes // written,
        "plan": encode_fields(one.plan),
    }


def _title(request: PlanRequest, best: PolicyOutcome) -> str:
    batch = f", batch {request.batch_size}" if request.batch_size else ""
    return f"{request.subject.name}{batch}, policy {best.policy}, on {request.machine.name}"
