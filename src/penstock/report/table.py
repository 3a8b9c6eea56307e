"""Table of two or more runs side by side, as printed by the demo and the benchmarks.

>>> rows = [
...     Row.of_bits("loss of step 1", 2.25, 2.25),
...     Row.of_bytes("peak resident", 3 << 30, 300 << 20),
... ]
>>> print(to_text(side_by_side("Ten steps", ("without", "with"), rows), width=76))
Ten steps
                  without         with       verdict
────────────────────────────────────────────────────
loss of step 1       2.25         2.25     same bits
peak resident    3.00 GiB   300.00 MiB   10.2 x less
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from penstock.core.errors import ConfigError
from penstock.core.units import format_bytes, format_duration
from penstock.observe.summary_text import add_row, grid, to_text

__all__ = ["Row", "side_by_side", "to_text"]

SAME = "same bits"
DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a label, the text of each run, and the result of their comparison."""

    label: str
    values: tuple[str, ...]
    verdict: str = ""
    good: bool | None = None
    """Colour of the verdict: green if true, red if false, none if ``None``."""

    @classmethod
    def of_bits(cls, label: str, *values: float) -> Row:
        """Compare floats bit for bit, NaNs too."""
        same = len({struct.pack("<d", value) for value in values}) <= 1
        texts = tuple(repr(value) for value in values)
        return cls(label, texts, SAME if same else DIFFERENT, same)

    @classmethod
    def of_bytes(cls, label: str, *values: float) -> Row:
        """Compare sizes in bytes; less is better."""
        return cls(label, _texts(values, format_bytes), _times(values, "less", "more"))

    @classmethod
    def of_seconds(cls, label: str, *values: float) -> Row:
        """Compare durations in seconds; the first is the reference."""
        return cls(label, _texts(values, format_duration), _ratio(values))


def side_by_side(title: str, columns: Sequence[str], rows: Iterable[Row]) -> Table:
    """Return a table with a column for each run, and one for verdicts if a row has one.

    Args:
        title: Title of the table.
        columns: Name of each run, the reference first.
        rows: Rows, each with as many values as there are columns.

    Raises:
        ConfigError: A row has more or fewer values than there are columns.
    """
    rows = list(rows)
    judged = any(row.verdict for row in rows)
    table = grid(title, ("", *columns, *(["verdict"] if judged else [])))
    for row in rows:
        if len(row.values) != len(columns):
            raise ConfigError(
                f"row {row.label!r} has {len(row.values)} values for {len(columns)} columns"
            )
        add_row(table, row.label, *row.values, *([_verdict(row)] if judged else []))
    return table


def _verdict(row: Row) -> Text:
    style = "" if row.good is None else "green" if row.good else "bold red"
    return Text(row.verdict, style=style)


def _texts(values: Sequence[float], text_of: Callable[[float], str]) -> tuple[str, ...]:
    return tuple(text_of(value) for value in values)


def _ratio(values: Sequence[float]) -> str:
    """Format the ratio of the last value to the first."""
    if len(values) < 2 or values[0] <= 0:
        return ""
    return f"{values[-1] / values[0]:.3f} x"


def _times(values: Sequence[float], less: str, more: str) -> str:
    if len(values) < 2 or min(values[0], values[-1]) <= 0:
        return ""
    first, last = values[0], values[-1]
    if first == last:
        return "equal"
    return f"{first / last:.1f} x {less}" if first > last else f"{last / first:.2f} x {more}"
