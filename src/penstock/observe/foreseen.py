"""What a plan was expected to cost, beside what it did: predicted against measured.

The runtime replays each plan on the machine's measured speeds when the plan comes into force, and says
what that gave as a :class:`Foreseen`: to the recorder as a mark, so that an event log has it, and to the
summary. A :class:`Foreseen` is of one turn through the passes that the profile has. :func:`compare` lays
the steps that have run under the plan over it, and gives both per optimizer step: of a step that has more
passes (gradient accumulation) more is predicted.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.observe.events import Stage, StallCause
from penstock.observe.totals import MemoryUse, Stall, StepTotals, Totals

PREDICTION: Final = "prediction"
"""Name of the mark."""
SECONDS: Final = "s"
BYTES: Final = "bytes"
_FORESEEN_STALLS: Final = (StallCause.BUDGET, StallCause.DEMAND, StallCause.LATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """A replay of the plan in force, in plain numbers. Raises ConfigError if ``passes`` is none."""

    since_ns: int
    """When the plan came into force, by the recorder's clock."""
    machine: str
    """Name of the machine that it was replayed on."""
    passes: int
    """How many forwards and backwards the profile has; all figures are of so many."""
    compute_ns: int
    """Forwards and backwards, if nothing moves; as the profiled step took."""
    recompute_ns: int
    interference_ns: int
    """By how much computing is slower while bytes move."""
    budget_ns: int
    demand_ns: int
    late_ns: int
    device_peak_bytes: int
    host_peak_bytes: int
    flash_peak_bytes: int
    host_written_bytes: int
    host_read_bytes: int
    flash_written_bytes: int
    flash_read_bytes: int
    saved_bytes: int
    """What autograd would hold at the most, if everything stayed."""

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ConfigError(f"prediction: passes is {self.passes}, it must be one or more")

    @property
    def busy_ns(self) -> int:
        """Forwards and backwards without what is waited for."""
        return self.compute_ns + self.recompute_ns + self.interference_ns

    @property
    def step_ns(self) -> int:
        """Forwards and backwards."""
        return self.busy_ns + self.budget_ns + self.demand_ns + self.late_ns

    def to_fields(self) -> dict[str, str | int]:
        """As the fields of a mark."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, Any], *, source: str = "") -> Foreseen:
        """From a mark's fields. Raises ConfigError, naming ``source`` and the field at fault."""
        where = f"{source}: " if source else ""
        for field in dataclasses.fields(Foreseen):
            kind = str if field.name == "machine" else int
            if type(fields.get(field.name)) is not kind:
                raise ConfigError(
                    f"{where}prediction: field {field.name!r} is {fields.get(field.name)!r}, not"
                    f" {kind.__name__}; was it written by another version of Penstock?"
                )
        return Foreseen(
            **{field.name: fields[field.name] for field in dataclasses.fields(Foreseen)}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedLine:
    """One figure, predicted and measured."""

    what: str
    unit: str
    """``"s"`` or ``"bytes"``."""
    predicted: float
    measured: float
    difference: float | None
    """Predicted over measured, less one; ``None`` where nothing was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the plan in force was expected to cost, and what it did."""

    machine: str
    """Replayed on."""
    steps: int
    """Measured: optimizer steps that began after the plan had come into force."""
    lines: tuple[ComparedLine, ...]
    """Per optimizer step, but for peaks; without those that are zero both ways."""


def compare(foreseen: Foreseen, steps: Iterable[StepTotals]) -> Prediction | None:
    """Lay the steps that ran under the plan over what was foreseen, both per optimizer step.

    Times and traffic are the median pass's, or the mean pass's where the profile has several kinds of
    passes, times the passes that a step had on average; peaks are the highest.

    Args:
        foreseen: Of the plan in force.
        steps: Any; those that began before it are left out, and those without a backward.

    Returns:
        ``None`` if no step is left.
    """
    mine = [
        step.totals
        for step in steps
        if step.totals.start_ns >= foreseen.since_ns and _passes(step.totals)
    ]
    if not mine:
        return None
    passes = sum(map(_passes, mine)) / len(mine)
    predicted_times = passes / foreseen.passes
    rows = [
        _line(what, SECONDS, predicted_times * ns / 1e9, _per_step(foreseen, mine, measure) / 1e9)
        for what, ns, measure in _times(foreseen, mine)
    ]
    rows += [
        _line(
            f"{tier} {way}",
            BYTES,
            predicted_times * predicted,
            _per_step(foreseen, mine, _moved(stage, tier)),
        )
        for tier, way, stage, predicted in _traffic(foreseen)
    ]
    rows += [
        _line(f"{memory} peak", BYTES, predicted, max(_peak(each, memory) for each in mine))
        for memory, predicted in (
            ("device", foreseen.device_peak_bytes),
            ("host", foreseen.host_peak_bytes),
            ("flash", foreseen.flash_peak_bytes),
        )
    ]
    lines = tuple(line for line in rows if line.predicted or line.measured)
    return Prediction(machine=foreseen.machine, steps=len(mine), lines=lines)


_Measure = Callable[[Totals], int]


def _times(
    foreseen: Foreseen, mine: Sequence[Totals]
) -> list[tuple[str, int, Callable[[Totals], int]]]:
    causes = dict.fromkeys([*_FORESEEN_STALLS, *(cause for each in mine for cause in each.stalls)])
    waits = {
        StallCause.BUDGET: foreseen.budget_ns,
        StallCause.DEMAND: foreseen.demand_ns,
        StallCause.LATE: foreseen.late_ns,
    }
    return [
        ("forward and backward", foreseen.step_ns, _running_ns),
        ("computing", foreseen.busy_ns, lambda each: max(0, _running_ns(each) - each.stall_ns)),
        *(
            (f"stall: {cause}", waits.get(StallCause(cause), 0), _stalled(str(cause)))
            for cause in causes
            if cause in tuple(StallCause)
        ),
    ]


def _traffic(foreseen: Foreseen) -> tuple[tuple[str, str, Stage, int], ...]:
    return (
        ("host", "written", Stage.WRITE, foreseen.host_written_bytes),
        ("host", "read", Stage.READ, foreseen.host_read_bytes),
        ("flash", "written", Stage.WRITE, foreseen.flash_written_bytes),
        ("flash", "read", Stage.READ, foreseen.flash_read_bytes),
    )


def _running_ns(one: Totals) -> int:
    return one.flow(Stage.FORWARD).busy_ns + one.flow(Stage.BACKWARD).busy_ns


def _stalled(cause: str) -> _Measure:
    return lambda one: one.stalls.get(cause, Stall()).total_ns


def _moved(stage: Stage, tier: str) -> _Measure:
    return lambda one: one.flow(stage, tier).nbytes


def _peak(one: Totals, memory: str) -> int:
    return one.memory.get(memory, MemoryUse()).peak_bytes


def _passes(one: Totals) -> int:
    return one.flow(Stage.BACKWARD).count


def _per_step(foreseen: Foreseen, mine: Sequence[Totals], measure: _Measure) -> float:
    if foreseen.passes == 1:
        passes = sum(map(_passes, mine)) / len(mine)
        return passes * statistics.median(measure(each) / _passes(each) for each in mine)
    return sum(map(measure, mine)) / len(mine)


def _line(what: str, unit: str, predicted: float, measured: float) -> ComparedLine:
    return ComparedLine(
        what=what,
        unit=unit,
        predicted=predicted,
        measured=measured,
        difference=predicted / measured - 1 if measured else None,
    )
