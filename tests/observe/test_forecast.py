"""Predicted against measured: which steps count, and what is laid over what."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.core.errors import ConfigError
from penstock.observe.clock import ManualClock
from penstock.observe.events import Stage, StallCause
from penstock.observe.forecast import Forecast, compare
from penstock.observe.recorder import Recorder

MS = 10**6
FORESEEN = Forecast(
    since_ns=100 * MS,
    machine="here",
    passes=1,
    compute_ns=40 * MS,
    recompute_ns=0,
    interference_ns=2 * MS,
    budget_ns=8 * MS,
    demand_ns=0,
    late_ns=0,
    device_peak_bytes=900,
    host_peak_bytes=0,
    flash_peak_bytes=500,
    host_written_bytes=0,
    host_read_bytes=0,
    flash_written_bytes=600,
    flash_read_bytes=500,
    saved_bytes=2000,
)


def step(recorder: Recorder, took_ms: int, *, passes: int = 1, written: int = 600) -> None:
    """Of equal passes, half forward and half backward, a tenth of which is waiting for room."""
    clock = recorder.clock
    recorder.begin_step(0)
    each_ns = took_ms * MS // passes
    for _ in range(passes):
        now = clock.now_ns()
        middle, end = now + each_ns // 2, now + each_ns
        recorder.span(Stage.STALL, now, now + each_ns // 10, cause=StallCause.BUDGET)
        recorder.span(Stage.WRITE, now, middle, nbytes=written, tier="flash")
        recorder.level("device", 700)
        clock.advance(each_ns)
        recorder.span(Stage.FORWARD, now, middle)
        recorder.span(Stage.BACKWARD, middle, end)
    recorder.level("device", 0)
    recorder.end_step()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(clock=ManualClock())


def lines(found):
    return {line.what: line for line in found.lines}


def test_only_steps_under_the_plan_count(recorder):
    step(recorder, 100, written=10**6)  # without a plan
    for took_ms in (50, 40, 60):
        step(recorder, took_ms)
    found = compare(FORESEEN, recorder.steps())
    assert (found.steps, found.machine) == (3, "here")
    rows = lines(found)
    whole = rows["forward and backward"]
    assert (whole.predicted, whole.measured) == (pytest.approx(0.05), pytest.approx(0.05))
    assert whole.difference == pytest.approx(0)
    assert rows["computing"].measured == pytest.approx(0.045)
    assert rows["computing"].difference == pytest.approx(42 / 45 - 1)
    assert rows["stall: budget"].measured == pytest.approx(0.005)
    assert (rows["flash written"].predicted, rows["flash written"].measured) == (600, 600)
    assert (rows["device peak"].predicted, rows["device peak"].measured) == (900, 700)
    assert rows["flash peak"].difference is None  # nobody measured it
    assert "host peak" not in rows
    assert "stall: demand" not in rows


def test_before_the_first_step_under_the_plan_there_is_nothing_to_compare(recorder):
    step(recorder, 100)
    assert compare(FORESEEN, recorder.steps()) is None


def test_of_a_step_of_several_passes_as_much_more_is_predicted(recorder):
    foreseen = dataclasses.replace(FORESEEN, since_ns=0)
    step(recorder, 200, passes=4)
    rows = lines(compare(foreseen, recorder.steps()))
    whole, written = rows["forward and backward"], rows["flash written"]
    assert (whole.predicted, whole.measured) == (pytest.approx(0.2), pytest.approx(0.2))
    assert (written.predicted, written.measured) == (2400, 2400)


def test_steps_that_have_some_of_several_kinds_are_averaged(recorder):
    foreseen = dataclasses.replace(FORESEEN, since_ns=0, passes=2)
    step(recorder, 10, written=100)
    step(recorder, 30, written=500)
    rows = lines(compare(foreseen, recorder.steps()))
    whole, written = rows["forward and backward"], rows["flash written"]
    assert (whole.predicted, whole.measured) == (pytest.approx(0.025), pytest.approx(0.02))
    assert (written.predicted, written.measured) == (300, 300)


def test_it_survives_the_log_and_says_what_is_wrong_if_it_does_not():
    fields = FORESEEN.to_fields()
    assert Forecast.from_fields(fields) == FORESEEN
    for name, value in (("late_ns", None), ("late_ns", 1.5), ("machine", 3)):
        with pytest.raises(ConfigError, match=rf"run:7: prediction: field '{name}'"):
            Forecast.from_fields({**fields, name: value}, source="run:7")
    with pytest.raises(ConfigError, match="passes"):
        Forecast.from_fields({**fields, "passes": 0})
