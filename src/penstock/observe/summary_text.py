"""The text of a summary: tables that fit the terminal, with colours if it supports them.

This module only reads the fields of a summary and computes nothing but percentages.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.core.units import MIB, format_bandwidth, format_bytes, format_duration
from penstock.observe.clients import is_once
from penstock.observe.counters import MOVED_EARLIER, PLANS, WINDOW_GROWN

if TYPE_CHECKING:
    from penstock.observe.forecast import ComparedLine
    from penstock.observe.summary_values import FlowLine, MemoryLine, PlaceLine, SummaryValues

NARROWEST: Final = 60
WIDEST: Final = 110
TOP_REASONS: Final = 6
"""Number of lines about placed tensors; the rest is added up in one line."""
PER_STEP: Final = "per optimizer step"
_TB: Final = 10**12
_IN_TABLES: Final = (
    "encoded.source_bytes.",
    "encoded.frame_bytes.",
    f"{PLANS}.",
    MOVED_EARLIER,
    WINDOW_GROWN,
)


def to_text(renderable: RenderableType, *, width: int | None = None) -> str:
    """Return plain text without colour codes or trailing blanks.

    Args:
        renderable: Anything that rich can print.
        width: Number of columns; defaults to the terminal's, between 60 and 110.
    """
    if width is None:
        width = min(max(shutil.get_terminal_size((WIDEST, 24)).columns, NARROWEST), WIDEST)
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(renderable, crop=False)  # a line that is not to be wrapped is whole
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def render(summary: SummaryValues) -> RenderableType:
    """Return the summary as an object that rich can print; empty parts are omitted."""
    parts: list[RenderableType] = [head(summary)]
    for part in (
        _host(summary),
        _memory(summary),
        _traffic(summary),
        _codecs(summary),
        _stalls(summary),
        _prediction(summary),
        _places(summary),
        _written(summary),
        _suggestion(summary),
    ):
        if part is not None:
            parts += [Text(), part]
    parts += [Text(), *_notes(summary)]
    return Group(*parts)


def grid(title: str | None, columns: Sequence[str], *, first: int = 1) -> Table:
    """Return an empty table: the ``first`` columns are names, the others numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for number, column in enumerate(columns):
        if number < first:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a row literally: a bracket in a module's path is not markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table of names without a title."""
    table = grid(None, columns, first=len(columns))
    for row in rows:
        add_row(table, *row)
    return table


def percent(share: float) -> str:
    """Format a share: ``0.1234`` as ``"12.3 %"``, and a tiny one with two digits."""
    if 0 < share < 0.001:
        return f"{share * 100:.2g} %"
    return f"{share * 100:.1f} %"


def head(summary: SummaryValues) -> Text:
    """Return the first lines of a summary."""
    line = Text("Penstock", style="bold")
    rank = "" if summary.rank is None else f"rank {summary.rank}{_where(summary)}: "
    line.append(
        f"  {rank}{_plural(summary.steps, 'optimizer step')} in {format_duration(summary.elapsed_s)},"
        f" policy {summary.policy}, device {summary.device}",
        style="not bold",
    )
    if summary.saved_peak_bytes:
        line.append(
            f"\nautograd saves {format_bytes(summary.saved_peak_bytes)} at its peak",
            style="not bold",
        )
        line.append(_against_budget(summary), style="not bold")
    return line


def _where(summary: SummaryValues) -> str:
    if summary.local_rank is None:
        return ""
    return f", local rank {summary.local_rank} on {summary.node}"


def _against_budget(summary: SummaryValues) -> str:
    peak_bytes = sum(line.peak_bytes for line in _devices(summary))
    if not peak_bytes:
        return ""
    ratio = summary.saved_peak_bytes / peak_bytes
    less = f", {ratio:.1f} times less" if ratio >= 1.05 else ""  # 1.0 times less is not less
    return f"; it ran in {format_bytes(peak_bytes)}{less}"


def _devices(summary: SummaryValues) -> list[MemoryLine]:
    """Return the lines of device memories: the session's own, and those of further devices."""
    return [line for line in summary.memory if line.memory.split()[0] == "device"]


def _host(summary: SummaryValues) -> Table | None:
    """Return the table that says what Penstock and the rest of the process hold, and what is saved."""
    use = summary.host
    if use is None or not (use.held_peak_bytes or use.limit_bytes):
        return None
    table = grid("Memory of this process", ("", "peak", "limit"))
    limit = "-" if use.limit_bytes is None else format_bytes(use.limit_bytes)
    add_row(table, "held by Penstock", format_bytes(use.held_peak_bytes), limit)
    if len(use.owners) > 1:
        for line in use.owners:
            add_row(table, f"  {line.owner}", format_bytes(line.peak_bytes), "")
    add_row(table, "the rest: weights, gradients, ...", format_bytes(use.rest_bytes), "")
    process = "-" if use.usable_bytes is None else format_bytes(use.usable_bytes)
    add_row(table, "together", format_bytes(use.together_bytes), process)
    if use.without_bytes is not None:
        add_row(table, "without Penstock, about", format_bytes(use.without_bytes), "")
        saved = use.without_bytes - use.together_bytes
        if saved > 0:
            share = percent(saved / use.without_bytes)
            add_row(table, "saved, about", f"{format_bytes(saved)}, {share}", "")
    return table


def _memory(summary: SummaryValues) -> Table | None:
    if not summary.memory:
        return None
    table = grid("Resident bytes", ("memory", "peak", "average", "budget", "peak of budget"))
    several = len(_devices(summary)) > 1
    for line in summary.memory:
        own = several and line.memory == "device"
        add_row(
            table,
            f"device {summary.device}" if own else line.memory,
            format_bytes(line.peak_bytes),
            format_bytes(line.average_bytes),
            "-" if line.budget_bytes is None else format_bytes(line.budget_bytes),
            _of_budget(line),
        )
    return table


def _of_budget(line: MemoryLine) -> Text:
    if not line.budget_bytes:
        return Text("-")
    over = line.peak_bytes > line.budget_bytes
    share = line.peak_bytes / line.budget_bytes
    text = f"{share * 100:.1f} %"
    return Text(f"{text} OVER" if over else text, style="bold red" if over else "green")


def _traffic(summary: SummaryValues) -> Table | None:
    if not summary.flows:
        return None
    columns = ("stage", "tier", "transfers", "bytes", PER_STEP, "busy", "rate")
    table = grid("Traffic", columns, first=2)
    for line in summary.flows:
        add_row(
            table,
            line.stage,
            line.tier or "-",
            f"{line.count}",
            format_bytes(line.nbytes),
            _bytes_per_step(line, summary.steps),
            format_duration(line.busy_s),
            format_bandwidth(line.bytes_per_s) if line.busy_s else "-",
        )
    return table


def _bytes_per_step(line: FlowLine, steps: int) -> str:
    return format_bytes(line.nbytes / steps) if steps and not is_once(line.tier) else "-"


def _codecs(summary: SummaryValues) -> Table | None:
    if not summary.codecs:
        return None
    table = grid("Encoded", ("codec", "bytes", "became", "of the bytes"))
    for line in summary.codecs:
        add_row(
            table,
            line.codec,
            format_bytes(line.source_bytes),
            format_bytes(line.frame_bytes),
            percent(line.ratio),
        )
    return table


def _stalls(summary: SummaryValues) -> Table | None:
    if not summary.stalls:
        return None
    table = grid("Stalls", ("cause", "times", "total", PER_STEP, "of the run"))
    for line in summary.stalls:
        add_row(
            table,
            line.cause,
            f"{line.count}",
            f"{line.total_ms:.1f} ms",
            "-" if line.per_step_ms is None else f"{line.per_step_ms:.2f} ms",
            percent(line.share),
        )
    return table


def _prediction(summary: SummaryValues) -> Table | None:
    found = summary.prediction
    if found is None or not found.lines:
        return None
    title = f"Predicted against measured, {PER_STEP} ({found.steps} measured)"
    table = grid(title, ("", "predicted", "measured", "difference"))
    for line in found.lines:
        add_row(
            table,
            line.what,
            _figure(line, line.predicted),
            _figure(line, line.measured),
            "-" if line.difference is None else f"{line.difference * 100:+.1f} %",
        )
    return table


def _figure(line: ComparedLine, value: float) -> str:
    return format_bytes(value) if line.unit == "bytes" else format_duration(value)


def _suggestion(summary: SummaryValues) -> Table | None:
    found = summary.suggestion
    if found is None or not found.budgets:
        return None
    setting = "memory" if found.is_host else "device_memory"
    title = f"Predicted cost of {setting}, by a replay of these passes on this machine"
    columns = [setting, "", "forward and backward take about"]
    rest_bytes = None if summary.host is None or not found.is_host else summary.host.rest_bytes
    if rest_bytes is not None:
        columns.append("the process holds about")
    table = grid(title, columns, first=2)
    for each in found.budgets:
        least = "the minimum" if each.device_bytes == found.least_bytes else ""
        nbytes = each.device_bytes + found.others_bytes
        row = [f"'{-(-nbytes // MIB)}MiB'", least, f"{each.slowdown:.2f}x"]
        if rest_bytes is not None:
            row.append(format_bytes(rest_bytes + nbytes))
        add_row(table, *row)
    return table


def _written(summary: SummaryValues) -> Table | None:
    if not summary.ssd_written:
        return None
    table = grid("Written to flash", ("by", "bytes", PER_STEP))
    for line in summary.ssd_written:
        steps = summary.steps if line.is_per_step else 0
        add_row(
            table,
            line.client,
            format_bytes(line.nbytes),
            format_bytes(line.nbytes / steps) if steps else "-",
        )
    return table


def _places(summary: SummaryValues) -> Table | None:
    if not summary.places:
        return None
    table = grid("Offloaded and resident tensors", ("", "why", "tensors", "bytes"), first=2)
    shown, rest = summary.places[:TOP_REASONS], summary.places[TOP_REASONS:]
    for line in shown:
        add_row(
            table, _place(line), line.reason or "-", f"{line.tensors}", format_bytes(line.nbytes)
        )
    if rest:
        tensors, nbytes = sum(x.tensors for x in rest), sum(x.nbytes for x in rest)
        why = _plural(len(rest), "other reason")
        add_row(table, "", why, f"{tensors}", format_bytes(nbytes))
    return table


def _place(line: PlaceLine) -> str:
    return f"{line.action} → {line.tier}" if line.tier else line.action


def _notes(summary: SummaryValues) -> Iterable[Text]:
    yield Text(
        f"{_plural(summary.misses, 'miss', 'misses')} (needed before a prefetch had begun),"
        f" {_plural(summary.fallbacks, 'fallback')}"
    )
    yield Text(_wear(summary))
    if plans := _plans(summary):
        yield Text(plans)
    if summary.recomputed.count:
        yield Text(_recomputed(summary))
    if summary.loaders_bytes_per_s or summary.loaders_planned_bytes_per_s:
        needed = format_bandwidth(summary.loaders_bytes_per_s)
        left = format_bandwidth(summary.loaders_planned_bytes_per_s)
        yield Text(f"data loaders need {needed} of flash; the plan leaves them {left}")
    if plain := {name: n for name, n in summary.counters.items() if not _in_table(name)}:
        counted = ", ".join(f"{name} {number}" for name, number in plain.items())
        yield Text(f"counted: {counted}")
    for note in summary.notes:
        yield Text(note)
    for warning in summary.warnings:
        yield Text(f"warning: {warning}", style="yellow")


def _plans(summary: SummaryValues) -> str:
    parts = []
    if summary.replans:
        made = ", ".join(f"{line.count} {line.reason}" for line in summary.replans)
        parts.append(
            f"{_plural(sum(line.count for line in summary.replans), 'plan')} made ({made})"
        )
    if summary.triggers_moved:
        parts.append(f"{_plural(summary.triggers_moved, 'late read')} moved to begin earlier")
    if summary.window_grown_bytes:
        parts.append(f"the read window grew by {format_bytes(summary.window_grown_bytes)}")
    return "; ".join(parts)


def _recomputed(summary: SummaryValues) -> str:
    line = summary.recomputed
    return (
        f"{_plural(line.count, 'module')} recomputed in backward:"
        f" {format_bytes(line.nbytes)} in {format_duration(line.busy_s)}"
    )


def _in_table(counter: str) -> bool:
    """Return whether the text has a table or line for this counter."""
    return counter.startswith(_IN_TABLES)


def _wear(summary: SummaryValues) -> str:
    text = f"{format_bytes(summary.ssd_written_bytes)} written to the SSD"
    if summary.tbw_bytes is None or summary.tbw_share is None:
        return text
    text += f", {percent(summary.tbw_share)} of its {summary.tbw_bytes / _TB:g} TBW"
    if summary.steps_to_wear_out is None:
        return text
    return text + f"; at this rate that lasts {summary.steps_to_wear_out:.3g} optimizer steps"


def _plural(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
