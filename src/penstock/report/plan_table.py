"""Tables of predicted plans: one policy in detail, or all policies side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.core.units import format_bytes, format_duration
from penstock.observe.summary_text import add_row, grid, percent
from penstock.plan.plan import Action, Decision
from penstock.plan.replay import TierUse
from penstock.report.outcome import PolicyOutcome
from penstock.report.style import unit_of

TOP_REASONS: Final = 8
"""Number of lines about slots; the rest is added up in one line."""
_TB: Final = 10**12
_CHANNELS: Final = {
    "link_out": "link, out",
    "link_in": "link, back",
    "flash_write": "flash, written",
    "flash_read": "flash, read",
    "codec": "codecs",
}


@dataclass(frozen=True)
class LargestFit:
    """The largest batch that fits."""

    batch_size: int
    """Size of the batch; 0 if not even a batch of one fits."""
    bounded: bool = True
    """False if it is the largest that was tried, so that a larger one may fit."""

    def __str__(self) -> str:
        if not self.batch_size:
            return "none"
        return f"{self.batch_size}" if self.bounded else f"≥{self.batch_size}"


def one_policy(
    one: PolicyOutcome, *, largest: LargestFit | None, tbw_bytes: int | None, verbose: bool
) -> RenderableType:
    """Return everything about one policy; with ``verbose`` also a line for every slot."""
    parts: list[RenderableType] = [_verdict(one, largest), _step(one), _memory(one)]
    if one.moved_bytes:
        parts.append(_traffic(one, tbw_bytes))
    parts.append(_slots(one) if verbose else _places(one))
    spaced = [line for part in parts for line in (part, Text())]
    return Group(*spaced, *_notes(one))


def all_policies(
    outcomes: Sequence[PolicyOutcome], *, largest: Mapping[str, LargestFit]
) -> RenderableType:
    """Return a table with a line for each policy, in the given order. All sizes have one unit."""
    needs = [one.least_bytes or one.replayed.peak_bytes for one in outcomes]
    scale, unit = unit_of(max(needs, default=0))
    names = ["policy", "fits", "largest\nbatch", "step", "vs oracle", "device peak"]
    names += ["device average", "host peak", "flash peak", "moved", "to flash"]
    table = grid(f"Policies, best first; sizes in {unit}", names)
    for column in table.columns[:3]:
        column.no_wrap = True
    for one in outcomes:
        tried = str(largest.get(one.policy, "-"))
        add_row(table, one.policy, _fits(one, scale), tried, *_figures(one, scale))
    return table


def _figures(one: PolicyOutcome, scale: int) -> list[str]:
    if not one.fits:
        return ["-"] * 8
    found = one.replayed
    sizes = (
        *(found.peak_bytes, found.average_bytes, found.host.peak_bytes, found.flash.peak_bytes),
        *(one.moved_bytes, found.flash.written_bytes),
    )
    return [
        format_duration(found.step_ns / 1e9),
        f"{found.slowdown:.3f} x",
        *(f"{size / scale:.2f}" if size else "0" for size in sizes),
    ]


def _fits(one: PolicyOutcome, scale: int) -> Text:
    if one.fits:
        return Text("yes", style="green")
    if one.least_bytes is None:
        return Text("no", style="bold red")
    least = math.ceil(one.least_bytes / scale * 100) / 100  # the printed value must suffice
    return Text(f"from {least:.2f}", style="bold red")


def _verdict(one: PolicyOutcome, largest: LargestFit | None) -> Text:
    text = Text(f"policy {one.policy}: ", style="bold")
    if one.fits:
        text.append("it fits", style="green")
    else:
        text.append("it does not fit", style="bold red")
        if one.least_bytes is not None:
            text.append(
                f"; it needs {format_bytes(one.least_bytes)} ({one.least_bytes} bytes) of device memory",
                style="not bold",
            )
    if largest is not None:
        text.append(f"; largest batch that fits: {largest}", style="not bold")
    return text


def _step(one: PolicyOutcome) -> Table:
    found = one.replayed
    title = "One step" if one.fits else "One step, if memory were enough at its peak"
    table = grid(title, ("", "time", "vs oracle"))
    parts = {
        "with unlimited memory (the oracle)": found.ideal_ns,
        "convolutions with less workspace": found.lean_ns,
        "recomputation": found.recompute_ns,
        "slowed down by transfers": found.interference_ns,
        "waits for memory": found.budget_ns,
        "waits for demand reads": found.demand_ns,
        "waits for late prefetches": found.late_ns,
    }
    for name, took_ns in parts.items():
        if took_ns:
            add_row(table, name, *_times(took_ns, found.ideal_ns))
    add_row(table, "the whole step", *_times(found.step_ns, found.ideal_ns))
    return table


def _times(took_ns: int, ideal_ns: int) -> tuple[str, str]:
    share = f"{took_ns / ideal_ns:.3f} x" if ideal_ns else "-"
    return format_duration(took_ns / 1e9), share


def _memory(one: PolicyOutcome) -> Table:
    table = grid("Memory", ("", "peak", "average", "budget", "peak of budget"))
    found, budgets = one.replayed, one.plan.budgets
    for name, peak, budget in (
        ("device", found.peak_bytes, budgets.device_bytes),
        ("host", found.host.peak_bytes, budgets.host_bytes),
        ("flash", found.flash.peak_bytes, budgets.flash_bytes),
    ):
        sizes = (format_bytes(n) for n in (peak, one.average_bytes(name), budget))
        share = Text("-")
        if budget:
            share = Text(percent(peak / budget), style="bold red" if peak > budget else "green")
        add_row(table, name, *sizes, share)
    for name, use in (("first fit", one.first_fit), ("two-ended", one.two_ended)):
        if use.peak_live_bytes:
            address = format_bytes(use.peak_address)
            add_row(
                table,
                f"addresses, {name}",
                address,
                "-",
                "-",
                f"{use.fragmentation:.3f} x the slots",
            )
    return table


def _traffic(one: PolicyOutcome, tbw_bytes: int | None) -> RenderableType:
    found = one.replayed
    tiers = grid("Moved in one step", ("tier", "written", "read"))
    for name, use in (("host", found.host), ("flash", found.flash)):
        if use != TierUse():
            add_row(tiers, name, format_bytes(use.written_bytes), format_bytes(use.read_bytes))
    busy = grid(None, ("channel", "busy", "of the step"))
    for name, label in _CHANNELS.items():
        took_ns: int = getattr(found, f"{name}_ns")
        if took_ns:
            share = percent(took_ns / found.step_ns)
            add_row(busy, label, format_duration(took_ns / 1e9), share)
    return Group(tiers, Text(), busy, Text(), Text(wear(found.flash.written_bytes, tbw_bytes)))


def wear(written_bytes: int, tbw_bytes: int | None) -> str:
    """Return a line on how much a step's writes wear an SSD."""
    text = f"{format_bytes(written_bytes)} written to the SSD in each step"
    if not tbw_bytes or not written_bytes:
        return text
    return (
        f"{text}, {written_bytes / tbw_bytes * 100:.2g} % of its {tbw_bytes / _TB:g} TBW; at this rate"
        f" that lasts {tbw_bytes // written_bytes:.3g} steps"
    )


def _places(one: PolicyOutcome) -> Table:
    table = grid("Offloaded and resident slots", ("", "why", "slots", "bytes"), first=2)
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for decision in one.plan.decisions:
        place = (verdict(decision), decision.reason.partition(";")[0])
        slots, nbytes = sums.get(place, (0, 0))
        sums[place] = slots + 1, nbytes + decision.key.nbytes
    lines = sorted(sums.items(), key=lambda line: (-line[1][1], line[0]))
    for (what, why), (slots, nbytes) in lines[:TOP_REASONS]:
        add_row(table, what, why, f"{slots}", format_bytes(nbytes))
    if rest := [sums for _, sums in lines[TOP_REASONS:]]:
        slots, nbytes = sum(n for n, _ in rest), sum(n for _, n in rest)
        add_row(table, "", f"{len(rest)} other reasons", f"{slots}", format_bytes(nbytes))
    return table


def _slots(one: PolicyOutcome) -> Table:
    table = grid("Slots, in the order in which they are saved", ("slot", "", "why"), first=3)
    for decision in one.plan.decisions:
        reason = decision.reason
        if decision.prefetch_at is not None:
            reason += f"; read no earlier than need {decision.prefetch_at}"
        add_row(table, str(decision.key), verdict(decision), reason)
    return table


def verdict(decision: Decision) -> str:
    """Format a decision: ``"keep"``, ``"offload → flash, narrow"``, ``"recompute"``."""
    if decision.action is not Action.OFFLOAD:
        return str(decision.action)
    return f"offload → {decision.tier}{', ' * bool(decision.codec)}{decision.codec}"


def _notes(one: PolicyOutcome) -> Iterator[Text]:
    if one.plan.recomputed:
        yield Text(f"recomputed in backward: {_named(one.plan.recomputed)}")
    if one.plan.lean_convolutions:
        yield Text(f"convolutions with less workspace: {_named(one.plan.lean_convolutions)}")
    yield from (Text(f"note: {note}", style="yellow") for note in one.plan.notes)


def _named(paths: Iterable[str]) -> str:
    """Name the first few paths, and count the others."""
    first, *rest = paths
    some = [first, *rest[:3]]
    more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
    return ", ".join(some) + more
