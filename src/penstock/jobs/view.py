"""View of running jobs on a terminal."""

from __future__ import annotations

import time
from collections import deque
from typing import IO, Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from penstock.cli.output import say
from penstock.core.units import format_bandwidth, format_bytes, format_duration
from penstock.observe.summary_text import add_row, grid

_DRAW_S: Final = 0.25
_LINES: Final = 6
_RATE_S: Final = 5.0
_COLOURS: Final = {
    "awake": "bold green",
    "asleep": "blue",
    "suspending": "yellow",
    "waking": "yellow",
    "starting": "yellow",
}


class Watch:
    """View of a manager's status: live on a terminal, otherwise only its messages."""

    def __init__(self, file: IO[str]) -> None:
        """Remember the output file."""
        self._console = Console(file=file)
        self._live: Live | None = None
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._drawn = 0.0
        self._steps: dict[str, deque[tuple[float, int]]] = {}

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def tell(self, line: str) -> None:
        """Show a message."""
        if self._live is None:
            say(line)
        else:
            self._lines.append(line)

    def __call__(self, status: dict[str, Any]) -> None:
        """Draw the status, unless it was drawn a moment ago."""
        now = time.monotonic()
        if self._live is None or now - self._drawn < _DRAW_S:
            return
        self._drawn = now
        for job in status["jobs"]:
            seen = self._steps.setdefault(job["name"], deque())
            seen.append((now, job["steps"]))
            while now - seen[0][0] > _RATE_S:
                seen.popleft()
        rates = {name: _rate(seen) for name, seen in self._steps.items()}
        lines = Text("\n".join(self._lines), style="dim")
        self._live.update(Group(table(status, rates), lines), refresh=True)


def table(status: dict[str, Any], rates: dict[str, float] | None = None) -> RenderableType:
    """Return a line for the machine, and a row for each job.

    Args:
        status: Status of a manager.
        rates: Steps per second, by job; by default the average while awake.
    """
    columns = ("job", "state", "DRAM", "flash", "steps", "steps/s", "awake", "")
    made = grid(None, columns, first=2)
    made.columns[-1].justify = "left"
    for job in status["jobs"]:
        state = job["outcome"] if job["phase"] == "over" else job["phase"]
        style = _COLOURS.get(state, "red" if state == "failed" else "")
        average = job["steps"] / job["awake_s"] if job["awake_s"] else 0.0
        rate = average if rates is None else rates.get(job["name"], 0.0)
        add_row(
            made,
            job["name"],
            Text(state + (" (held)" if job["held_back"] and job["phase"] != "over" else ""), style),
            format_bytes(job["held_bytes"]),
            format_bytes(job["flash_bytes"]) if job["flash_bytes"] else "",
            str(job["steps"]),
            f"{rate:.2f}" if rate else "",
            format_duration(job["awake_s"]) if job["awake_s"] else "",
            job["note"] or job["told"],
        )
    return Group(Text(_machine(status)), made)  # a title would be only as wide as the table


def _machine(status: dict[str, Any]) -> str:
    machine = status["machine"]
    text = (
        f"DRAM {format_bytes(machine['held_bytes'])} held, {format_bytes(machine['charged_bytes'])}"
        f" charged of {format_bytes(machine['memory_bytes'])}"
    )
    if machine["flash_capacity_bytes"] is not None:
        where = ", ".join(machine["flash_directories"])
        text += (
            f" · flash {format_bytes(machine['flash_bytes'])} of"
            f" {format_bytes(machine['flash_capacity_bytes'])} in {where}"
            f" · turns of {format_duration(machine['slice_s'])}"
        )
    means = "the kernel" if machine["enforced"] else "polling"
    return f"{text} · kept by {means} · {format_bandwidth(machine['bytes_per_s'])}"


def _rate(seen: deque[tuple[float, int]]) -> float:
    (begun, first), (ended, last) = seen[0], seen[-1]
    return (last - first) / (ended - begun) if ended > begun else 0.0
