"""The plan of a whole training step as a report for the terminal, and as a JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.step_request import StepRequest
from penstock.core.units import format_bytes
from penstock.plan.ranks import Ranks
from penstock.plan.step_plan import StepPlan
from penstock.report.step_table import ChangedStep, changed_steps, ranks_line, whole_step


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
