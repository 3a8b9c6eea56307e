"""Tables of one planned training step, whole: that of one rank if there are several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.core.units import format_bandwidth, format_bytes, format_duration
from penstock.observe.summary_text import add_row, grid, percent
from penstock.plan.machine import Machine
from penstock.plan.ranks import DDP, Ranks
from penstock.plan.step_plan import StepPlan
from penstock.report.plan_table import wear

_BINDS: Final = {
    "compute": "compute",
    "flash": "flash",
    "link": "the link",
    "update": "the arithmetic of updates",
    "network": "the network",
}
_NOT_KNOWN: Final = {
    "network_bytes_per_s": "the bandwidth between nodes is not known (--network-rate)",
    "peer_bytes_per_s": "the bandwidth between the devices of a node is not known (--peer-rate)",
}


@dataclass(frozen=True, slots=True)
class ChangedStep:
    """The step with one thing changed."""

    name: str
    """Name of the change."""
    units: int
    """Tokens or samples in the step."""
    plan: StepPlan | None
    """The plan; None: it is refused."""
    refused: str = ""
    """Reason of the refusal, in a few words."""
    ranks: Ranks = field(default_factory=Ranks)


def whole_step(
    plan: StepPlan,
    *,
    units: int,
    unit: str,
    tbw_bytes: int | None,
    flash_bytes: int | None,
    ranks: Ranks,
    unknown: Sequence[str],
    verbose: bool,
) -> RenderableType:
    """Return everything about one plan.

    Args:
        plan: The plan.
        units: Tokens or samples in the step.
        unit: Which of the two.
        tbw_bytes: Bytes written that each SSD is rated for.
        flash_bytes: Room on flash for each rank.
        ranks: The ranks that train together.
        unknown: Fields of the machine that are not known, so that their time is not counted.
        verbose: Name the modules whose weights stay, too.
    """
    parts: list[RenderableType] = [
        _time(plan),
        Group(_bounds(plan), Text(), Text(verdict(plan, units=units, unit=unit))),
        *(Text(f"{_NOT_KNOWN[name]}, so its time is not counted") for name in unknown),
        _memory(plan),
        Group(_traffic(plan), Text(), Text(_disk(plan, flash_bytes, ranks))),
        Text(_wear(plan, tbw_bytes, ranks)),
    ]
    if verbose:
        parts.append(Text(f"weights that stay: {', '.join(plan.kept) or 'none'}"))
    spaced = [line for part in parts for line in (part, Text())]
    return Group(*spaced[:-1])


def ranks_line(ranks: Ranks, share: Machine) -> str:
    """Return what one rank has of its node, to stand after the machine's name; "" for one rank."""
    if ranks.count == 1:
        return ""
    what = "all weights" if ranks.parallel == DDP else f"one part in {ranks.shards} of the weights"
    nodes = f"{ranks.nodes} nodes" if ranks.nodes > 1 else "one node"
    ssds = f"{ranks.ssds} SSDs" if ranks.ssds > 1 else "one SSD"
    network = share.network_bytes_per_s
    rates = ", ".join(
        f"{name} {format_bandwidth(rate)}"
        for name, rate in (
            ("reads", share.flash_read_bytes_per_s),
            ("writes", share.flash_write_bytes_per_s),
        )
    )
    return (
        f"\none of {ranks.count} ranks on {nodes}, with {what} ({ranks.parallel}); {ssds} for the"
        f" {ranks.per_node} ranks of a node: each {rates}"
        + (f", and {format_bandwidth(network)} of network" if network else "")
    )


def verdict(plan: StepPlan, *, units: int, unit: str) -> str:
    """Say what binds, and from how many tokens or samples a step flash and the network are hidden."""
    text = _verdict(plan, units=units, unit=unit)
    if not plan.network_factor:
        return text
    return f"{text}; the network from {round(plan.network_factor * units)} on"


def _verdict(plan: StepPlan, *, units: int, unit: str) -> str:
    text = f"{_BINDS[plan.bounds.binds]} binds"
    if not plan.read_bytes + plan.written_bytes:
        return f"{text}; nothing moves between memory and flash"
    factor = plan.hidden_factor
    if factor is None:
        return (
            f"{text}; no number of {unit} hides flash behind compute, since saved tensors take longer to"
            " move than to compute"
        )
    hides = (
        f"{text}; flash hides behind compute from {hiding_units(plan, units)} {unit} a step on (T*)"
    )
    return f"{hides}, but not in step()" if plan.in_step else hides


def hiding_units(plan: StepPlan, units: int) -> str:
    """Return the tokens or samples a step that just hide flash behind compute; ``"-"`` if none do."""
    return "-" if plan.hidden_factor is None else f"{round(plan.hidden_factor * units)}"


def changed_steps(steps: Sequence[ChangedStep], *, unit: str) -> Table:
    """Return a table of what changes would do; the first line is the step as it is.

    Bytes are those of each SSD, tokens those of each rank.
    """
    names = ["", "step", f"a 1000\n{unit}", "binds", f"T*,\n{unit}"]
    names += ["written,\neach SSD", "disk,\neach SSD"]
    table = grid("What would change it", names)
    for one in steps:
        if one.plan is None:
            add_row(table, one.name, "-", "-", one.refused, "-", "-", "-")
            continue
        step_s = one.plan.replayed.step_ns / 1e9
        add_row(
            table,
            one.name,
            format_duration(step_s),
            format_duration(step_s / one.units * 1000),
            one.plan.bounds.binds,
            hiding_units(one.plan, one.units),
            format_bytes(one.ranks.of_each_ssd(one.plan.written_bytes)),
            format_bytes(one.ranks.of_each_ssd(one.plan.disk_bytes)),
        )
    return table


def _time(plan: StepPlan) -> Table:
    found = plan.replayed
    table = grid("One step", ("", "time", "of the step"))
    parts = {
        "forward and backward": found.compute_ns,
        "arithmetic of updates": found.update_delay_ns,
        "slowed down by transfers": found.interference_ns,
        "waits for memory": found.room_ns,
        "waits for demand reads": found.demand_ns,
        "waits for late prefetches": found.late_ns,
        "updates in step()" if plan.in_step else "updates after the end of backward": found.tail_ns,
    }
    for name, took_ns in parts.items():
        if took_ns:
            _add_time(table, name, took_ns, found.step_ns)
    _add_time(table, "the whole step", found.step_ns, found.step_ns)
    return table


def _bounds(plan: StepPlan) -> Table:
    bounds, step_ns = plan.bounds, plan.replayed.step_ns
    table = grid("What binds", ("busy", "time", "of the step"))
    flash = "flash, one after the other" if bounds.shared else "flash, both at once"
    for name, took_ns in {
        "compute": bounds.compute,
        "flash reads": bounds.reads,
        "flash writes": bounds.writes,
        flash: bounds.flash,
        "arithmetic of updates": bounds.update,
        "link": bounds.link,
        "network": bounds.network,
    }.items():
        if took_ns:
            _add_time(table, name, took_ns, step_ns)
    return table


def _add_time(table: Table, name: str, took_ns: int, step_ns: int) -> None:
    share = percent(took_ns / step_ns) if step_ns else "-"
    add_row(table, name, format_duration(took_ns / 1e9), share)


def _memory(plan: StepPlan) -> Table:
    table = grid("Memory", ("", "bytes", "of the memory"))
    memory = plan.memory
    for name, nbytes in {
        f"weights that stay, of {len(plan.kept)} modules": memory.kept,
        "weights that come and go, gradients, updates": memory.window,
        "gradients that wait": memory.gradients,
        "optimizer records that stay": memory.cached,
        "buffers of transfers": memory.rings,
        "saved tensors": memory.saved,
        "in all": memory.total,
    }.items():
        if nbytes:
            add_row(table, name, format_bytes(nbytes), percent(nbytes / plan.memory_bytes))
    return table


def _traffic(plan: StepPlan) -> Table:
    moved, found = plan.replayed.moved, plan.replayed
    others = ["host memory"] if moved.host_read or moved.host_written else []
    others += ["network"] if moved.network else []
    title = " and ".join(["Flash", *others]) + " in one step"
    table = grid(title, ("", "read", "written"))
    for name, read, written in (
        ("weights", moved.weights_read, moved.weights_written),
        ("optimizer records", moved.records_read, moved.records_written),
        ("gradients that wait", moved.gradients_read, moved.gradients_written),
        ("saved tensors", found.activations_read, found.activations_written),
        ("in all", plan.read_bytes, plan.written_bytes),
    ):
        if read or written or name == "in all":
            add_row(table, name, format_bytes(read), format_bytes(written))
    if moved.host_read or moved.host_written:
        name = "weights, of host memory"
        add_row(table, name, format_bytes(moved.host_read), format_bytes(moved.host_written))
    if moved.network:
        add_row(table, "from other ranks", format_bytes(moved.network), "-")
    return table


def _disk(plan: StepPlan, flash_bytes: int | None, ranks: Ranks) -> str:
    room = "" if flash_bytes is None else f", of {format_bytes(flash_bytes)}"
    node = plan.disk_bytes * ranks.per_node
    rank = "" if ranks.count == 1 else f" by each rank, {format_bytes(node)} on each node"
    return (
        f"{format_bytes(plan.disk_bytes)} of flash needed{rank}{room}:"
        f" {_weights_on_flash(plan)}all records,"
        f" {'gradients that wait, ' if plan.choice.spilled else ''}and saved tensors"
    )


def _weights_on_flash(plan: StepPlan) -> str:
    if plan.weights_stay or not plan.home_bytes:
        return ""
    return "other weights, " if plan.host_weight_bytes else "all weights, "


def _wear(plan: StepPlan, tbw_bytes: int | None, ranks: Ranks) -> str:
    text = wear(ranks.of_each_ssd(plan.written_bytes), tbw_bytes)
    return text.replace("the SSD", "each SSD") if ranks.ssds * ranks.nodes > 1 else text
