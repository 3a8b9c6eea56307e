"""The trace: what Perfetto demands of it, and that it says what was recorded."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.clock import ManualClock
from penstock.observe.events import Mark, Span, Stage, StallCause
from penstock.observe.log import EventLog
from penstock.observe.recorder import Recorder
from penstock.observe.records import read_events
from penstock.report.trace import MEMORY_PID, TIERS_PID, TRAINING_PID, trace_events, write_trace

US = 1000


@pytest.fixture
def recorder() -> Recorder:
    clock = ManualClock()
    clock.advance(10**12)  # the trace begins at 0 all the same
    recorder = Recorder(clock=clock)
    begin = clock.now_ns()
    recorder.begin_step(0)
    recorder.level("device", 5)
    clock.advance(100 * US)
    recorder.span(Stage.WRITE, begin, begin + 50 * US, nbytes=400_000, tier="flash", slot="fc#0")
    recorder.span(
        Stage.WRITE, begin + 20 * US, begin + 70 * US, nbytes=1, tier="flash", slot="fc#1"
    )
    recorder.span(Stage.STALL, begin + 80 * US, begin + 90 * US, cause=StallCause.BUDGET)
    recorder.mark("replan", reason="drift")
    recorder.end_step()
    return recorder


def load(recorder: Recorder, path) -> list[dict]:
    write_trace(recorder, path)
    return json.loads(path.read_text())["traceEvents"]


@pytest.fixture
def events(recorder, tmp_path) -> list[dict]:
    return load(recorder, tmp_path / "trace.json")


def lanes(events: list[dict]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }


def test_every_event_has_what_its_phase_demands(events):
    wanted = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "tid", "ts", "args"},
        "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    }
    for event in events:
        assert set(event) - {"ph"} == wanted[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    assert {event["ph"] for event in events} == set(wanted)


def test_times_are_microseconds_from_the_first_event(events):
    write = next(event for event in events if event["name"] == "fc#0")
    stall = next(event for event in events if event["name"] == "budget")
    assert (write["ts"], write["dur"]) == (0.0, 50.0)
    assert (stall["ts"], stall["dur"]) == (80.0, 10.0)


def test_lanes_are_named_by_tier_and_stage(events):
    names = lanes(events)
    by_name = {names[e["pid"], e["tid"]]: e for e in events if e["ph"] == "X"}
    assert set(by_name) == {"step", "stall", "flash write", "flash write (2)"}
    assert by_name["step"]["pid"] == by_name["stall"]["pid"] == TRAINING_PID
    assert by_name["flash write"]["pid"] == TIERS_PID
    assert len(set(names)) == len(set(names.values())) == 4


def test_processes_are_named(events):
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {TRAINING_PID: "training", TIERS_PID: "tiers", MEMORY_PID: "memory"}


def test_slices_carry_bytes_slot_and_rate(events):
    write = next(event for event in events if event["name"] == "fc#0")
    assert write["args"] == {"slot": "fc#0", "nbytes": 400_000, "GB_per_s": 8.0}
    stall = next(event for event in events if event["name"] == "budget")
    assert stall["args"]["cause"] == "budget"


def test_levels_are_counters_and_marks_are_instants(events):
    counter = next(event for event in events if event["ph"] == "C")
    assert (counter["name"], counter["pid"], counter["args"]) == (
        "device",
        MEMORY_PID,
        {"bytes": 5},
    )
    instant = next(event for event in events if event["ph"] == "i")
    assert (instant["name"], instant["ts"], instant["s"]) == ("replan", 100.0, "g")
    assert instant["args"] == {"reason": "drift"}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=30))
def test_slices_of_a_thread_never_overlap_and_threads_are_as_few_as_can_be(intervals):
    spans = [Span("read", a, a + length, 0, "flash", str(n), "") for n, (a, length) in
             enumerate(intervals)]  # fmt: skip
    threads = defaultdict(list)
    for event in trace_events(spans):
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(slices))
    assert sum(map(len, threads.values())) == len(intervals)
    if all(length for _, length in intervals):
        cells = [t for a, length in intervals for t in range(a, a + length)]
        assert len(threads) == max((cells.count(t) for t in cells), default=0)


def test_a_log_gives_the_same_trace_as_its_recorder(recorder, tmp_path):
    with EventLog(tmp_path / "log", clock=recorder.clock) as log:
        again = Recorder(clock=recorder.clock, log=log)
        again.span(Stage.READ, 5, 9, nbytes=3, tier="host", slot="a")
        again.level("device", 1)
        again.mark("replan", slots=3)
    write_trace(again, tmp_path / "a.json")
    write_trace(read_events(tmp_path / "log"), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_facts_and_compression(recorder, tmp_path):
    write_trace(recorder, tmp_path / "trace.json.gz", about={"policy": "auto", "steps": 3})
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert trace["otherData"] == {"policy": "auto", "steps": "3"}
    assert trace["displayTimeUnit"] == "ms"


def test_an_empty_recorder_gives_an_empty_trace(tmp_path):
    events = load(Recorder(), tmp_path / "trace.json")
    assert {event["ph"] for event in events} == {"M"}


def test_not_a_number_is_still_json(tmp_path):
    recorder = Recorder()
    recorder.mark("loss", value=float("nan"))
    write_trace(recorder, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_failure_leaves_the_old_trace_and_no_litter(tmp_path, recorder):
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_trace([Mark(0, "bad", {"value": object()})], path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
