"""The predicted cost of a plan, and its comparison with the measured one.

When a plan comes into force the runtime replays it with the machine's measured speeds and reports the
result as a :class:`Forecast`: to the recorder as a mark, so that an event log contains it, and to the
summary. A :class:`Forecast` covers the passes of the profile once. :func:`compare` sets it beside the
steps that have run under the plan, both per optimizer step: for a step with more passes (gradient
accumulation) more is predicted.
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
"""Name of the mark of a prediction."""
SECONDS: Final = "s"
BYTES: Final = "bytes"
_FORESEEN_STALLS: Final = (StallCause.BUDGET, StallCause.DEMAND, StallCause.LATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The replay of the plan in force, in plain numbers. Raises ConfigError if ``passes`` is below 1."""

    since_ns: int
    """Time at which the plan came into force, on the recorder's clock."""
    machine: str
    """Name of the machine description used for the replay."""
    passes: int
    """Number of forwards and backwards in the profile; all figures are sums over them."""
    compute_ns: int
    """Time of forwards and backwards without transfers, as in the profiled step."""
    recompute_ns: int
    interference_ns: int
    """Additional computing time while transfers run."""
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
    """Peak of the bytes that autograd would hold if everything stayed resident."""

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ConfigError(f"prediction: passes is {self.passes}, but must be at least 1")

    @property
    def busy_ns(self) -> int:
        """Time of forwards and backwards without stalls."""
        return self.compute_ns + self.recompute_ns + self.interference_ns

    @property
    def step_ns(self) -> int:
        """Time of forwards and backwards, with stalls."""
        return self.busy_ns + self.budget_ns + self.demand_ns + self.late_ns

    def to_fields(self) -> dict[str, str | int]:
        """Return the values as fields of a mark."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, Any], *, source: str = "") -> Forecast:
        """Build from a mark's fields. Raises ConfigError naming ``source`` and the wrong field."""
        where = f"{source}: " if source else ""
        for field in dataclasses.fields(Forecast):
            kind = str if field.name == "machine" else int
            if type(fields.get(field.name)) is not kind:
                raise ConfigError(
                    f"{where}prediction: field {field.name!r} is {fields.get(field.name)!r}, not"
                    f" {kind.__name__}; was it written by another version of Penstock?"
                )
        return Forecast(
            **{field.name: fields[field.name] for field in dataclasses.fields(Forecast)}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedLine:
    """One figure, predicted and measured."""

    what: str
    unit: str
    """Unit: ``"s"`` or ``"bytes"``."""
    predicted: float
    measured: float
    difference: float | None
    """Ratio of predicted to measured, minus one; ``None`` if nothing was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted and the measured cost of the plan in force."""

    machine: str
    """Name of the machine description used for the replay."""
    steps: int
    """Number of measured optimizer steps: those that began under the plan."""
    lines: tuple[ComparedLine, ...]
    """Figures per optimizer step, and peaks; without those that are zero on both sides."""


def compare(foreseen: Forecast, steps: Iterable[StepTotals]) -> Prediction | None:
    """Compare the prediction with the steps that ran under the plan, both per optimizer step.

    Times and traffic are those of the median pass, or of the mean pass if the profile has several kinds
    of passes, times the average number of passes in a step; peaks are the highest.

    Args:
        foreseen: Prediction for the plan in force.
        steps: Measured steps; those that began before the plan or have no backward are ignored.

    Returns:
        The comparison, or ``None`` if no step remains.
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
    foreseen: Forecast, mine: Sequence[Totals]
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


def _traffic(foreseen: Forecast) -> tuple[tuple[str, str, Stage, int], ...]:
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


def _per_step(foreseen: Forecast, mine: Sequence[Totals], measure: _Measure) -> float:
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
