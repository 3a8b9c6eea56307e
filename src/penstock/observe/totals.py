"""Totals over a run or one step: frozen values that cover all events, also those no longer kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.observe.events import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """All spans of one stage in one tier."""

    count: int = 0
    nbytes: int = 0
    busy_ns: int = 0
    """Time during which at least one span was running: their union, not their sum."""

    @property
    def bytes_per_s(self) -> float:
        """Ratio of ``nbytes`` to the busy time; 0 without busy time."""
        return self.nbytes * 1e9 / self.busy_ns if self.busy_ns else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """All waits for one cause."""

    count: int = 0
    total_ns: int = 0
    """Time during which at least one thread waited for this cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Level of one memory over a period."""

    current_bytes: int = 0
    """Level at the end of the period."""
    peak_bytes: int = 0
    area_byte_ns: int = 0
    """Integral of the level over ``observed_ns``."""
    observed_ns: int = 0
    """Time from the first sample, or the beginning of the step, to the end."""

    @property
    def average_bytes(self) -> int:
        """Time-weighted average, rounded down; the present level if no time has passed."""
        if not self.observed_ns:
            return self.current_bytes
        return self.area_byte_ns // self.observed_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over all events of a period, including events that are no longer kept."""

    start_ns: int
    end_ns: int
    flows: Mapping[tuple[Stage, str], Flow]
    """Flows by stage and tier; the tier is ``""`` for a stage without one."""
    stalls: Mapping[str, Stall]
    """Stalls by cause: the spans of ``Stage.STALL``."""
    counters: Mapping[str, int]
    memory: Mapping[str, MemoryUse]

    @property
    def elapsed_ns(self) -> int:
        """Length of the period."""
        return self.end_ns - self.start_ns

    @property
    def stall_ns(self) -> int:
        """Total time of all stalls."""
        return sum(stall.total_ns for stall in self.stalls.values())

    def flow(self, stage: Stage, tier: str = "") -> Flow:
        """Return the flow of one stage and tier; zeros if there was none."""
        return self.flows.get((stage, tier), Flow())

    def counted(self, prefix: str) -> int:
        """Return the sum of the counter ``prefix`` and of all below it, as ``a.b`` is below ``a``."""
        below = prefix + "."
        return sum(
            amount
            for name, amount in self.counters.items()
            if name == prefix or name.startswith(below)
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain values; units are in the names."""
        return {
            "t_ns": self.start_ns,
            "dur_ns": self.elapsed_ns,
            "flows": [
                {"stage": str(stage), "tier": tier, **_plain(flow)}
                for (stage, tier), flow in self.flows.items()
            ],
            "stalls": {str(cause): _plain(stall) for cause, stall in self.stalls.items()},
            "counters": dict(self.counters),
            "memory": {
                name: {
                    "current_bytes": use.current_bytes,
                    "peak_bytes": use.peak_bytes,
                    "average_bytes": use.average_bytes,
                }
                for name, use in self.memory.items()
            },
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """Totals of one training step. A span belongs to the step in which it ended."""

    index: int
    totals: Totals
    """Totals of this step alone, including ``peak_bytes`` and ``average_bytes``."""


def step_from_json(record: Mapping[str, Any]) -> StepTotals:
    """Build from a record with ``index`` and the result of ``Totals.to_json``.

    Averages are as exact as they were written.

    Raises:
        KeyError, TypeError, ValueError: The record is not of this form.
    """
    start_ns, took_ns = int(record["t_ns"]), int(record["dur_ns"])
    totals = Totals(
        start_ns=start_ns,
        end_ns=start_ns + took_ns,
        flows=MappingProxyType(
            {(Stage(one["stage"]), str(one["tier"])): _parsed(Flow, one) for one in record["flows"]}
        ),
        stalls=MappingProxyType(
            {cause: _parsed(Stall, one) for cause, one in record["stalls"].items()}
        ),
        counters=MappingProxyType({name: int(n) for name, n in record["counters"].items()}),
        memory=MappingProxyType(
            {
                name: MemoryUse(
                    current_bytes=int(one["current_bytes"]),
                    peak_bytes=int(one["peak_bytes"]),
                    area_byte_ns=int(one["average_bytes"]) * took_ns,
                    observed_ns=took_ns,
                )
                for name, one in record["memory"].items()
            }
        ),
    )
    return StepTotals(index=int(record["index"]), totals=totals)


def summed(steps: Sequence[StepTotals]) -> Totals:
    """Add up the totals of steps, given in order, as if nothing had been in between.

    Raises:
        ValueError: ``steps`` is empty.
    """
    if not steps:
        raise ValueError("no step to sum up")
    flows: dict[tuple[Stage, str], Flow] = {}
    stalls: dict[str, Stall] = {}
    counters: dict[str, int] = {}
    memory: dict[str, MemoryUse] = {}
    for one in (step.totals for step in steps):
        for key, flow in one.flows.items():
            flows[key] = _sum(flow, flows.get(key, Flow()))
        for cause, stall in one.stalls.items():
            stalls[cause] = _sum(stall, stalls.get(cause, Stall()))
        for name, amount in one.counters.items():
            counters[name] = counters.get(name, 0) + amount
        for name, use in one.memory.items():
            before = memory.get(name, MemoryUse())
            memory[name] = replace(
                _sum(use, before),
                current_bytes=use.current_bytes,
                peak_bytes=max(before.peak_bytes, use.peak_bytes),
            )
    return Totals(
        start_ns=steps[0].totals.start_ns,
        end_ns=steps[-1].totals.end_ns,
        flows=MappingProxyType(flows),
        stalls=MappingProxyType(stalls),
        counters=MappingProxyType(counters),
        memory=MappingProxyType(memory),
    )


def between(start: Totals, end: Totals, peaks: Mapping[str, int]) -> Totals:
    """Return the difference of two totals of one recorder.

    Args:
        start: The earlier totals.
        end: The later totals.
        peaks: Highest level of each memory in between, which the totals do not contain.
    """
    gains = {name: n - start.counters.get(name, 0) for name, n in end.counters.items()}
    memory = {
        name: replace(
            _sum(use, start.memory.get(name, MemoryUse()), -1),
            current_bytes=use.current_bytes,
            peak_bytes=peaks[name],
        )
        for name, use in end.memory.items()
    }
    return Totals(
        start_ns=start.end_ns,
        end_ns=end.end_ns,
        flows=_increases(start.flows, end.flows, Flow()),
        stalls=_increases(start.stalls, end.stalls, Stall()),
        counters=MappingProxyType({name: gain for name, gain in gains.items() if gain}),
        memory=MappingProxyType(memory),
    )


_Key = TypeVar("_Key")
_Counted = TypeVar("_Counted", Flow, Stall)
_Summable = TypeVar("_Summable", Flow, Stall, MemoryUse)


def _increases(
    start: Mapping[_Key, _Counted], end: Mapping[_Key, _Counted], nothing: _Counted
) -> Mapping[_Key, _Counted]:
    found = {key: _sum(each, start.get(key, nothing), -1) for key, each in end.items()}
    return MappingProxyType({key: each for key, each in found.items() if each.count})


def _sum(one: _Summable, other: _Summable, sign: int = 1) -> _Summable:
    """Add two values, or subtract the second, field by field."""
    names = one.__slots__
    return type(one)(**{name: getattr(one, name) + sign * getattr(other, name) for name in names})


def _plain(one: Flow | Stall) -> dict[str, int]:
    return {name: getattr(one, name) for name in one.__slots__}


def _parsed(kind: type[_Counted], record: Mapping[str, Any]) -> _Counted:
    return kind(**{name: int(record[name]) for name in kind.__slots__})
