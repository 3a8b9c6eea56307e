"""The summary of a job of several ranks: a line for each, from its summary, and what they do together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.core.units import format_bandwidth, format_bytes, format_duration
from penstock.observe.clients import ON_FLASH, is_measurement
from penstock.observe.events import Stage
from penstock.observe.summary_text import add_row, grid, percent, to_text
from penstock.observe.summary_values import FlowLine, SummaryValues

SCHEMA: Final = 1
MOST_LINES: Final = 32
"""Number of ranks in the text; of more, those that have waited longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLine:
    """The essentials of one rank's summary."""

    rank: int
    local_rank: int | None
    """Index among the ranks on its machine, if that is known."""
    node: str
    """Name of its machine."""
    device: str
    steps: int
    """Number of optimizer steps."""
    elapsed_s: float
    saved_peak_bytes: int
    """Peak of the bytes that autograd would have held."""
    peak_bytes: int
    """Peak of the bytes of saved tensors on the device."""
    held_peak_bytes: int
    """Peak of the host memory that Penstock held."""
    written_bytes: int
    """Bytes written to flash, by all parts."""
    read_bytes: int
    """Bytes read from flash, by all parts."""
    write_bytes_per_s: float
    """Bytes of training's writes, divided by the busy times of all kinds of data together; 0.0 without
    writes."""
    read_bytes_per_s: float
    """The same of its reads."""
    stalled_s: float
    """Time that training waited."""
    warnings: tuple[str, ...]

    def to_text(self) -> str:
        """Return the line as JSON, for other ranks."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> RankLine:
        """Return the line that another rank of this version has written by ``to_text``."""
        fields = json.loads(text)
        return cls(**{**fields, "warnings": tuple(fields["warnings"])})


def rank_line(summary: SummaryValues) -> RankLine:
    """Return the line of a summary. One without a rank is rank 0."""
    reads = [line for line in summary.flows if line.stage == Stage.READ and line.tier in ON_FLASH]
    writes = [line for line in summary.flows if line.stage == Stage.WRITE and line.tier in ON_FLASH]
    devices = [line for line in summary.memory if line.memory.split()[0] == "device"]
    return RankLine(
        rank=summary.rank or 0,
        local_rank=summary.local_rank,
        node=summary.node or "",
        device=summary.device,
        steps=summary.steps,
        elapsed_s=summary.elapsed_s,
        saved_peak_bytes=summary.saved_peak_bytes,
        peak_bytes=sum(line.peak_bytes for line in devices),
        held_peak_bytes=0 if summary.host is None else summary.host.held_peak_bytes,
        written_bytes=summary.ssd_written_bytes,
        read_bytes=sum(line.nbytes for line in reads),
        write_bytes_per_s=_rate(writes),
        read_bytes_per_s=_rate(reads),
        stalled_s=sum(line.total_ms for line in summary.stalls) / 1e3,
        warnings=summary.warnings,
    )


def _rate(flows: Iterable[FlowLine]) -> float:
    """Return the rate of flows, without measurements of bandwidth, in which training takes no part."""
    counted = [line for line in flows if not is_measurement(line.tier)]
    busy_s = sum(line.busy_s for line in counted)
    return sum(line.nbytes for line in counted) / busy_s if busy_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSummary:
    """The summaries of a job's ranks, as far as they are known: print it, or call ``to_json()``."""

    world_size: int
    """Number of ranks of the job."""
    ranks: tuple[RankLine, ...]
    """Known ranks, in order."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that gave no report (they have no session, have ended, or were too late)."""
        known = {line.rank for line in self.ranks}
        return tuple(number for number in range(self.world_size) if number not in known)

    @property
    def written_bytes(self) -> int:
        """Bytes that the known ranks have written to flash."""
        return sum(line.written_bytes for line in self.ranks)

    @property
    def read_bytes(self) -> int:
        """Bytes that the known ranks have read from flash."""
        return sum(line.read_bytes for line in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return plain values under the names of the fields, with ``missing`` and ``schema`` (1)."""
        return {"schema": SCHEMA, **dataclasses.asdict(self), "missing": list(self.missing)}

    def __str__(self) -> str:
        return to_text(_render(self))

    def __rich__(self) -> RenderableType:
        return _render(self)


def joined(lines: Iterable[RankLine], world_size: int) -> JobSummary:
    """Return the summary of a job of ``world_size`` ranks, or more if a line has a higher rank."""
    ordered = tuple(sorted(lines, key=lambda line: line.rank))
    least = 1 + max((line.rank for line in ordered), default=0)
    return JobSummary(world_size=max(world_size, least), ranks=ordered)


def _render(job: JobSummary) -> RenderableType:
    columns = ("rank", "node", "steps", "time", "saved", "resident", "written", "read", "waited")
    table = grid("Ranks of the job", columns, first=2)
    shown = job.ranks
    if len(shown) > MOST_LINES:
        longest = sorted(shown, key=lambda line: -line.stalled_s)[:MOST_LINES]
        shown = tuple(sorted(longest, key=lambda line: line.rank))
    for line in shown:
        add_row(
            table,
            f"{line.rank}",
            line.node if line.local_rank is None else f"{line.node}:{line.local_rank}",
            f"{line.steps}",
            format_duration(line.elapsed_s),
            format_bytes(line.saved_peak_bytes),
            format_bytes(line.peak_bytes),
            format_bytes(line.written_bytes),
            format_bytes(line.read_bytes),
            percent(line.stalled_s / line.elapsed_s) if line.elapsed_s else "-",
        )
    if len(shown) < len(job.ranks):
        add_row(table, "...", f"{len(job.ranks) - len(shown)} more", *[""] * 7)
    return Group(table, Text(), *_notes(job))


def _notes(job: JobSummary) -> Iterable[Text]:
    nodes = len({line.node for line in job.ranks})
    where = f" on {nodes} nodes" if nodes > 1 else ""
    yield Text(
        f"{len(job.ranks)} of {job.world_size} ranks{where}: {format_bytes(job.written_bytes)} written to"
        f" flash, {format_bytes(job.read_bytes)} read"
    )
    yield from _rates("read", {line.rank: line.read_bytes_per_s for line in job.ranks})
    yield from _rates("write", {line.rank: line.write_bytes_per_s for line in job.ranks})
    if job.missing:
        numbers = ", ".join(map(str, job.missing[:MOST_LINES]))
        more = ", ..." if len(job.missing) > MOST_LINES else ""
        yield Text(
            f"warning: no report of rank {numbers}{more}: without a session, ended early, or too late",
            style="yellow",
        )
    said: dict[str, list[int]] = {}
    for line in job.ranks:
        for warning in line.warnings:
            said.setdefault(warning, []).append(line.rank)
    for warning, ranks in said.items():
        yield Text(f"warning: rank {', '.join(map(str, ranks))}: {warning}", style="yellow")


def _rates(direction: str, rates: dict[int, float]) -> Iterable[Text]:
    """Return the mean and the slowest rate of ranks that move anything, if there are two."""
    moving = {rank: rate for rank, rate in rates.items() if rate}
    if len(moving) > 1:
        mean = sum(moving.values()) / len(moving)
        slowest = min(moving, key=lambda rank: moving[rank])
        yield Text(
            f"ranks {direction} at {format_bandwidth(mean)} on average, the slowest, rank {slowest}, at"
            f" {format_bandwidth(moving[slowest])}"
        )
