"""The summary of a session, as one frozen value: print it, or call ``to_json()``.

1. The runtime fills :class:`RunFacts` with what only it knows (plan, budgets, slots, warnings).
2. :func:`summarize` joins them with the recorder's :class:`~penstock.observe.totals.Totals`.
3. ``str(summary)`` is plain text; ``rich.print(summary)`` is the same with colours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from rich.console import RenderableType

from penstock.core.errors import ConfigError
from penstock.observe.clients import ON_FLASH, is_once
from penstock.observe.counters import MOVED_EARLIER, PLANS, WINDOW_GROWN
from penstock.observe.events import Stage
from penstock.observe.forecast import Forecast, compare
from penstock.observe.suggestion import Suggestion
from penstock.observe.summary_text import render, to_text
from penstock.observe.summary_values import (
    CodecLine,
    FlowLine,
    HostMemoryUse,
    MemoryLine,
    PlaceLine,
    RecomputeLine,
    ReplanLine,
    StallLine,
    SummaryValues,
    WrittenLine,
)
from penstock.observe.totals import StepTotals, Totals

SCHEMA: Final = 1
MISSES: Final = "prefetch.missed"
"""Counter of tensors that were needed before a prefetch of them had begun."""
FALLBACKS: Final = ("fallback", "spill.full", "spill.failed")
"""Prefixes of the counters, by tier, of tensors that a tier did not accept."""
ENCODED_SOURCE: Final = "encoded.source_bytes"
"""Prefix of the counters, by codec, of bytes that were encoded for a tier."""
ENCODED_FRAME: Final = "encoded.frame_bytes"
"""Prefix of the counters, by codec, of the bytes after encoding."""
_MOVING: Final = (
    Stage.ENCODE,
    Stage.COPY_OUT,
    Stage.WRITE,
    Stage.READ,
    Stage.COPY_IN,
    Stage.DECODE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotFact:
    """The outcome of one slot of the plan."""

    nbytes: int
    action: str
    """Action of the plan: ``"keep"``, ``"offload"``, ..."""
    tier: str = ""
    """Tier that holds it; ``""`` for a resident slot."""
    reason: str = ""
    """Reason of the action. Slots are grouped by the part before a semicolon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts about a run that only the runtime knows."""

    policy: str
    """Name of the plan's policy."""
    device: str
    """Name of the device: ``"cpu"``, ``"cuda:0"``, ..."""
    rank: int | None = None
    """Rank of the process; ``None`` if it is the only one."""
    local_rank: int | None = None
    """Its index among the processes on its machine; ``None`` if it is not known."""
    node: str | None = None
    """Name of its machine; ``None`` if the process is the only one."""
    budget_bytes: int | None
    """Limit of the memory named ``"device"``; ``None`` if there is none."""
    other_budgets: tuple[tuple[str, int | None], ...] = ()
    """Limits of further devices' memories, by names such as ``"device cuda:1"``."""
    host_budget_bytes: int | None = None
    """Limit of the memory named ``"host"``; ``None`` if there is no such tier."""
    steps: int = 0
    """Number of ended optimizer steps: calls of an optimizer's ``step``, or of the session's."""
    slots: tuple[SlotFact, ...] = ()
    """The plan's slots, in the order of saving."""
    saved_peak_bytes: int = 0
    """Peak of the bytes that autograd would have held without Penstock."""
    tbw_bytes: int | None = None
    """Rated endurance of the SSD in bytes written (its TBW), if stated."""
    foreseen: Forecast | None = None
    """Predicted cost of the plan in force, if known."""
    loaders_bytes_per_s: float = 0.0
    """Flash bandwidth that data loaders on the same flash need."""
    loaders_planned_bytes_per_s: float = 0.0
    """Flash bandwidth that the plan in force leaves to data loaders."""
    suggestion: Suggestion | None = None
    """Suggested device budgets, for a run that has none."""
    notes: tuple[str, ...] = ()
    """Informative sentences for the user, which need no action."""
    warnings: tuple[str, ...] = ()
    host: HostMemoryUse | None = None
    """Host memory of the process, if it was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary(SummaryValues):
    """The summary of a session, which converts to text and JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values under the names of the fields, and ``schema`` (1)."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        return to_text(render(self))

    def __rich__(self) -> RenderableType:
        return render(self)


def summarize(totals: Totals, facts: RunFacts, steps: Iterable[StepTotals] = ()) -> Summary:
    """Combine the recorded totals with the runtime's facts.

    Args:
        totals: Totals of the run.
        facts: Facts that the recorder does not have.
        steps: Totals of individual steps, for the comparison with the prediction.

    Raises:
        ConfigError: The stated TBW is not positive.
    """
    if facts.tbw_bytes is not None and facts.tbw_bytes <= 0:
        raise ConfigError(f"a TBW of {facts.tbw_bytes} bytes is not positive")
    lines = _written_lines(totals)
    written = sum(line.nbytes for line in lines)
    return Summary(
        policy=facts.policy,
        device=facts.device,
        rank=facts.rank,
        local_rank=facts.local_rank,
        node=facts.node,
        steps=facts.steps,
        elapsed_s=totals.elapsed_ns / 1e9,
        saved_peak_bytes=facts.saved_peak_bytes,
        flows=_flow_lines(totals),
        codecs=_codec_lines(totals),
        stalls=_stall_lines(totals, facts.steps),
        memory=_memory_lines(totals, facts),
        host=facts.host,
        places=_place_lines(facts.slots),
        replans=_replan_lines(totals),
        triggers_moved=totals.counters.get(MOVED_EARLIER, 0),
        window_grown_bytes=totals.counters.get(WINDOW_GROWN, 0),
        recomputed=_recompute_line(totals),
        misses=totals.counted(MISSES),
        fallbacks=sum(totals.counted(name) for name in FALLBACKS),
        counters=dict(sorted(totals.counters.items())),
        ssd_written_bytes=written,
        ssd_written=lines,
        tbw_bytes=facts.tbw_bytes,
        tbw_share=None if facts.tbw_bytes is None else written / facts.tbw_bytes,
        steps_to_wear_out=_steps_to_wear_out(lines, facts),
        prediction=None if facts.foreseen is None else compare(facts.foreseen, steps),
        loaders_bytes_per_s=facts.loaders_bytes_per_s,
        loaders_planned_bytes_per_s=facts.loaders_planned_bytes_per_s,
        suggestion=facts.suggestion,
        notes=facts.notes,
        warnings=facts.warnings,
    )


def _flow_lines(totals: Totals) -> tuple[FlowLine, ...]:
    def rank(key: tuple[Stage, str]) -> tuple[str, int]:
        return key[1], _MOVING.index(key[0])

    keys = sorted((key for key in totals.flows if key[0] in _MOVING), key=rank)
    return tuple(
        FlowLine(
            stage=str(stage),
            tier=tier,
            count=flow.count,
            nbytes=flow.nbytes,
            busy_s=flow.busy_ns / 1e9,
            bytes_per_s=flow.bytes_per_s,
        )
        for stage, tier in keys
        for flow in (totals.flows[stage, tier],)
    )


def _codec_lines(totals: Totals) -> tuple[CodecLine, ...]:
    prefix = ENCODED_SOURCE + "."
    lines = (
        CodecLine(codec=codec, source_bytes=source, frame_bytes=encoded, ratio=encoded / source)
        for name, source in totals.counters.items()
        if name.startswith(prefix) and source
        for codec in (name.removeprefix(prefix),)
        for encoded in (totals.counters.get(f"{ENCODED_FRAME}.{codec}", 0),)
    )
    return tuple(sorted(lines, key=lambda line: (-line.source_bytes, line.codec)))


def _replan_lines(totals: Totals) -> tuple[ReplanLine, ...]:
    prefix = PLANS + "."
    return tuple(
        ReplanLine(reason=name.removeprefix(prefix), count=count)
        for name, count in totals.counters.items()
        if name.startswith(prefix)
    )


def _recompute_line(totals: Totals) -> RecomputeLine:
    flow = totals.flow(Stage.RECOMPUTE)
    return RecomputeLine(count=flow.count, nbytes=flow.nbytes, busy_s=flow.busy_ns / 1e9)


def _stall_lines(totals: Totals, steps: int) -> tuple[StallLine, ...]:
    longest_first = sorted(totals.stalls.items(), key=lambda item: -item[1].total_ns)
    return tuple(
        StallLine(
            cause=cause,
            count=stall.count,
            total_ms=stall.total_ns / 1e6,
            per_step_ms=stall.total_ns / 1e6 / steps if steps else None,
            share=stall.total_ns / totals.elapsed_ns if totals.elapsed_ns else 0.0,
        )
        for cause, stall in longest_first
    )


def _memory_lines(totals: Totals, facts: RunFacts) -> tuple[MemoryLine, ...]:
    others = dict(facts.other_budgets)
    budgets = {"device": facts.budget_bytes, **others, "host": facts.host_budget_bytes}
    order = {name: rank for rank, name in enumerate(("device", *sorted(others), "host", "flash"))}
    names = sorted(totals.memory, key=lambda name: (order.get(name, len(order)), name))
    return tuple(
        MemoryLine(
            memory=name,
            peak_bytes=use.peak_bytes,
            average_bytes=use.average_bytes,
            current_bytes=use.current_bytes,
            budget_bytes=budgets.get(name),
        )
        for name in names
        for use in (totals.memory[name],)
    )


def _place_lines(slots: Iterable[SlotFact]) -> tuple[PlaceLine, ...]:
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for slot in slots:
        key = (slot.action, slot.tier, slot.reason.split(";")[0].strip())
        tensors, nbytes = sums.get(key, (0, 0))
        sums[key] = tensors + 1, nbytes + slot.nbytes
    lines = (
        PlaceLine(action=action, tier=tier, reason=reason, tensors=tensors, nbytes=nbytes)
        for (action, tier, reason), (tensors, nbytes) in sums.items()
    )
    return tuple(sorted(lines, key=lambda line: (-line.nbytes, line.reason)))


def _written_lines(totals: Totals) -> tuple[WrittenLine, ...]:
    lines = (
        WrittenLine(client=client, nbytes=nbytes, is_per_step=not is_once(tier))
        for tier, client in ON_FLASH.items()
        if (nbytes := totals.flow(Stage.WRITE, tier).nbytes)
    )
    return tuple(sorted(lines, key=lambda line: -line.nbytes))


def _steps_to_wear_out(lines: Iterable[WrittenLine], facts: RunFacts) -> int | None:
    written = sum(line.nbytes for line in lines if line.is_per_step)
    if facts.tbw_bytes is None or not written or not facts.steps:
        return None
    return facts.tbw_bytes * facts.steps // written
