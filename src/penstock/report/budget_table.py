"""Tables of what budgets cost a step: those of saved tensors, and weights or states on flash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from penstock.core.units import MIB, format_bytes, format_duration
from penstock.observe.summary_text import add_row, grid
from penstock.report.outcome import PolicyOutcome

_HELD: tuple[str, ...] = ("the process\nholds about",)


@dataclass(frozen=True, kw_only=True)
class BudgetCost:
    """A step within a budget of saved tensors. Bytes and times are those of an optimizer step."""

    name: str
    """Share of what is saved, such as ``"1/2"``; ``"least"``; ``"given"``."""
    budget_bytes: int
    outcome: PolicyOutcome
    """Plan and replay of one pass of each kind."""
    step_ns: int
    """Time of all forwards and backwards."""
    slowdown: float
    """Ratio of this time to that with memory without end."""
    stall_ns: int
    spilled_bytes: int
    """Bytes of the saved tensors that leave memory."""
    written_bytes: int
    """Bytes written to flash."""
    held_bytes: int | None
    """Memory of the whole process, about; None if it is not known."""

    @property
    def fits(self) -> bool:
        """True if the budget is kept all the time."""
        return self.outcome.fits


@dataclass(frozen=True, kw_only=True)
class FlashCost:
    """A step with states, or weights and states, on flash, in the least memory."""

    name: str
    least_bytes: int
    """Least memory for weights, gradients, buffers and saved tensors together."""
    step_ns: int
    binds: str
    """Resource that takes longest."""
    hiding_units: int | None
    """Tokens or samples a step from which on flash hides behind compute (T*); None: none do."""
    written_bytes: int
    disk_bytes: int
    """Bytes on flash."""


def mib(nbytes: int) -> str:
    """Return a size as options take it: whole MiB, rounded up."""
    return f"{-(-nbytes // MIB)}MiB"


def budget_costs(
    costs: Sequence[BudgetCost],
    *,
    setting: str,
    tbw_bytes: int | None,
    title: str = "What a budget costs, for each step of the optimizer",
) -> Table:
    """Return a table with a line for each budget; ``setting`` is the option that limits it."""
    knows_process = any(one.held_bytes is not None for one in costs)
    columns = [
        "of what\nis saved",
        setting,
        "forward and\nbackward",
        "longer",
        "waits",
        "leaves memory",
    ]
    columns += ["written to\nflash"]
    columns += ["steps until\nworn out"] if tbw_bytes else []
    columns += _HELD if knows_process else ()
    table = grid(title, columns)
    for one in costs:
        if not one.fits:
            add_row(
                table, one.name, mib(one.budget_bytes), "too small", *["-"] * (len(columns) - 3)
            )
            continue
        worn = str(tbw_bytes // one.written_bytes) if tbw_bytes and one.written_bytes else "-"
        add_row(
            table,
            one.name,
            mib(one.budget_bytes) if one.name != "all" else "none",
            format_duration(one.step_ns / 1e9),
            f"{one.slowdown:.2f} x",
            format_duration(one.stall_ns / 1e9) if one.stall_ns else "-",
            format_bytes(one.spilled_bytes) if one.spilled_bytes else "-",
            format_bytes(one.written_bytes) if one.written_bytes else "-",
            *([worn] if tbw_bytes else []),
            *([format_bytes(one.held_bytes or 0)] if knows_process else []),
        )
    return table


def flash_costs(costs: Sequence[FlashCost], *, unit: str, tbw_bytes: int | None) -> Table:
    """Return a table with a line for each of what may be on flash; ``unit`` is tokens or samples."""
    columns = ["in the least memory", "memory", "step", "binds", f"T*,\n{unit} a step", "written"]
    columns += ["steps until\nworn out"] if tbw_bytes else []
    table = grid("States or weights on flash, too", [*columns, "on flash"])
    for one in costs:
        worn = str(tbw_bytes // one.written_bytes) if tbw_bytes and one.written_bytes else "-"
        add_row(
            table,
            one.name,
            format_bytes(one.least_bytes),
            format_duration(one.step_ns / 1e9),
            one.binds,
            "-" if one.hiding_units is None else f"{one.hiding_units}",
            format_bytes(one.written_bytes),
            *([worn] if tbw_bytes else []),
            format_bytes(one.disk_bytes),
        )
    return table
