"""The recorder: exact totals, bounded memory, many threads, finalizers."""

from __future__ import annotations

import gc
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.locks import defer
from penstock.observe import recorder as recorder_module
from penstock.observe.clock import ManualClock
from penstock.observe.events import Level, Mark, Span, Stage, StallCause
from penstock.observe.recorder import EVENT_BYTES, Recorder
from penstock.observe.totals import Flow, Stall
from penstock.store.account import Account
from tries import tries


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def recorder(clock):
    return Recorder(clock=clock, event_bytes=10_000 * EVENT_BYTES)


def test_overlapping_transfers_share_the_busy_time(recorder):
    recorder.span(Stage.READ, 0, 10, nbytes=600, tier="flash")
    recorder.span(Stage.READ, 5, 20, nbytes=400, tier="flash")
    recorder.span(Stage.READ, 0, 99, nbytes=1, tier="host")
    flow = recorder.snapshot().flow(Stage.READ, "flash")
    assert flow == Flow(count=2, nbytes=1000, busy_ns=20)
    assert flow.bytes_per_s == 1000 * 1e9 / 20


def test_nothing_moved_is_zero_not_a_division_by_zero(recorder):
    assert recorder.snapshot().flow(Stage.WRITE, "flash").bytes_per_s == 0.0


def test_stalls_are_summed_by_cause(recorder):
    recorder.span(Stage.STALL, 0, 7, cause=StallCause.BUDGET)
    recorder.span(Stage.STALL, 10, 12, cause=StallCause.BUDGET)
    recorder.span(Stage.STALL, 20, 25, cause=StallCause.LATE)
    recorder.span(Stage.STALL, 30, 31)
    recorder.span(Stage.READ, 40, 45, cause="not a stall")
    totals = recorder.snapshot()
    assert totals.stalls == {
        "budget": Stall(count=2, total_ns=9),
        "late_prefetch": Stall(count=1, total_ns=5),
        "other": Stall(count=1, total_ns=1),
    }
    assert totals.stall_ns == 15


def test_counters_add_up_and_group_by_prefix(recorder):
    recorder.count("fallback.host")
    recorder.count("fallback.host", 4)
    recorder.count("fallback.keep")
    recorder.count("fallbacks")
    totals = recorder.snapshot()
    assert totals.counters == {"fallback.host": 5, "fallback.keep": 1, "fallbacks": 1}
    assert totals.counted("fallback") == 6


def test_the_average_level_is_weighted_by_time(recorder, clock):
    clock.advance(1000)  # before the first sample nothing is known, and nothing counts
    recorder.level("device", 100)
    clock.advance(30)
    recorder.level("device", 10)
    clock.advance(10)
    use = recorder.snapshot().memory["device"]
    assert (use.current_bytes, use.peak_bytes, use.observed_ns) == (10, 100, 40)
    assert use.average_bytes == (100 * 30 + 10 * 10) // 40


def test_an_average_over_no_time_is_the_level(recorder):
    recorder.level("device", 7)
    assert recorder.snapshot().memory["device"].average_bytes == 7


def test_a_budget_reports_its_level(recorder, clock):
    budget = Account(100, on_change=lambda nbytes: recorder.level("device", nbytes))
    assert budget.try_take(60, "a")
    clock.advance(1)
    budget.free(20, "a")
    assert [e.nbytes for e in recorder.events() if isinstance(e, Level)] == [60, 40]
    assert recorder.snapshot().memory["device"].peak_bytes == budget.peak_bytes == 60


def test_events_come_back_typed_and_in_order(recorder, clock):
    recorder.span(Stage.WRITE, 1, 2, nbytes=3, tier="flash", slot="fc#0", cause="")
    clock.advance(5)
    recorder.level("host", 9)
    recorder.mark("replan", reason="drift", share=0.5, tensor=[1, 2])
    assert recorder.events() == [
        Span("write", 1, 2, 3, "flash", "fc#0", ""),
        Level(5, "host", 9),
        Mark(5, "replan", {"reason": "drift", "share": 0.5, "tensor": "[1, 2]"}),
    ]


def test_old_events_fall_off_and_totals_do_not(clock):
    recorder = Recorder(clock=clock, event_bytes=10 * EVENT_BYTES)
    for start in range(0, 1000, 10):
        recorder.span(Stage.WRITE, start, start + 4, nbytes=2, tier="flash")
    assert [event.start_ns for event in recorder.events()] == list(range(900, 1000, 10))
    assert recorder.snapshot().flow(Stage.WRITE, "flash") == Flow(
        count=100, nbytes=200, busy_ns=400
    )


class TestSteps:
    def test_a_step_counts_only_what_happened_in_it(self, recorder, clock):
        recorder.level("device", 500)
        recorder.count("misses", 3)
        recorder.span(Stage.WRITE, 0, 5, nbytes=50, tier="flash")
        clock.advance(10)
        recorder.level("device", 20)
        recorder.begin_step(7)
        clock.advance(10)
        recorder.level("device", 80)
        recorder.count("misses")
        recorder.span(Stage.WRITE, 12, 19, nbytes=8, tier="flash")
        recorder.span(Stage.STALL, 12, 13, cause="budget")
        clock.advance(10)
        step = recorder.end_step()
        totals = step.totals
        assert (step.index, totals.start_ns, totals.elapsed_ns) == (7, 10, 20)
        assert totals.flow(Stage.WRITE, "flash") == Flow(count=1, nbytes=8, busy_ns=7)
        assert totals.flow(Stage.STEP) == Flow(count=1, nbytes=0, busy_ns=20)
        assert totals.stalls == {"budget": Stall(count=1, total_ns=1)}
        assert totals.counters == {"misses": 1}
        use = totals.memory["device"]
        assert (use.peak_bytes, use.average_bytes, use.observed_ns) == (80, 50, 20)
        assert recorder.steps() == (step,)

    def test_quiet_lanes_and_counters_are_left_out(self, recorder):
        recorder.span(Stage.READ, 0, 1, tier="flash")
        recorder.count("x")
        recorder.begin_step(0)
        totals = recorder.end_step().totals
        assert set(totals.flows) == {(Stage.STEP, "")}
        assert totals.counters == {}

    def test_steps_add_up_to_the_whole(self, recorder, clock):
        for index in range(5):
            recorder.begin_step(index)
            clock.advance(100)
            now_ns = clock.now_ns()
            # reaches back into the step before: only new busy time counts here
            recorder.span(Stage.READ, now_ns - 130, now_ns, nbytes=index, tier="flash")
        recorder.end_step()
        steps = [step.totals.flow(Stage.READ, "flash") for step in recorder.steps()]
        whole = recorder.snapshot().flow(Stage.READ, "flash")
        assert sum(step.nbytes for step in steps) == whole.nbytes == 10
        assert sum(step.busy_ns for step in steps) == whole.busy_ns == 530

    def test_beginning_a_step_ends_the_open_one(self, recorder, clock):
        recorder.begin_step(0)
        clock.advance(4)
        recorder.begin_step(1)
        assert [step.index for step in recorder.steps()] == [0]
        assert recorder.steps()[0].totals.elapsed_ns == 4

    def test_ending_without_a_begin_is_nothing(self, recorder):
        assert recorder.end_step() is None
        assert recorder.steps() == ()

    def test_steps_kept_are_bounded(self, clock, monkeypatch):
        monkeypatch.setattr(recorder_module, "MAX_STEPS", 3)
        recorder = Recorder(clock=clock, event_bytes=0)
        for index in range(10):
            recorder.begin_step(index)
        recorder.end_step()
        assert [step.index for step in recorder.steps()] == [7, 8, 9]


def test_a_snapshot_does_not_change_afterwards(recorder):
    recorder.count("x")
    before = recorder.snapshot()
    recorder.count("x")
    assert before.counters == {"x": 1}
    with pytest.raises(TypeError):
        before.counters["x"] = 5


def test_many_threads_lose_nothing():
    recorder, each, threads = Recorder(event_bytes=10_000 * EVENT_BYTES), 2000, 6
    start = threading.Barrier(threads)

    def hammer(me: int) -> None:
        start.wait()
        for turn in range(each):
            begin_ns = (me * each + turn) * 2  # disjoint from everybody else's
            recorder.span(Stage.WRITE, begin_ns, begin_ns + 1, nbytes=3, tier="flash")
            recorder.count("turns")
            recorder.level("device", turn)
            if turn % 500 == 0:
                recorder.begin_step(turn)
                recorder.snapshot()

    workers = [threading.Thread(target=hammer, args=(me,)) for me in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    totals = recorder.snapshot()
    assert totals.counters == {"turns": each * threads}
    flow = totals.flow(Stage.WRITE, "flash")
    assert (flow.count, flow.nbytes) == (each * threads, 3 * each * threads)
    assert totals.memory["device"].peak_bytes == each - 1
    times = [event.t_ns for event in recorder.events() if isinstance(event, Level)]
    assert times == sorted(times)


def test_a_finalizer_that_reports_does_not_deadlock_or_nest():
    """Garbage is collected while the recorder's own lock is held, and its finalizer reports too."""

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            defer(lambda: recorder.count("finalized"))
            defer(lambda: recorder.level("device", 1))

    class CollectingClock(ManualClock):
        def now_ns(self) -> int:
            gc.collect()
            return super().now_ns()

    recorder = Recorder(clock=CollectingClock(), event_bytes=0)
    for _ in range(3):
        Garbage()
        recorder.level("device", 2)  # asks the clock while it holds its lock
    assert recorder.snapshot().counters == {"finalized": 3}


@settings(max_examples=tries(50))
@given(
    st.lists(
        st.tuples(
            st.sampled_from([Stage.READ, Stage.WRITE]),
            st.sampled_from(["host", "flash"]),
            st.integers(0, 50),
            st.integers(0, 50),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
def test_flows_equal_brute_force(spans):
    recorder = Recorder(clock=ManualClock(), event_bytes=0)
    for stage, tier, start, end, nbytes in spans:
        recorder.span(stage, start, end, nbytes=nbytes, tier=tier)
    for stage in (Stage.READ, Stage.WRITE):
        for tier in ("host", "flash"):
            mine = [span for span in spans if span[:2] == (stage, tier)]
            busy = {cell for _, _, start, end, _ in mine for cell in range(start, end)}
            assert recorder.snapshot().flow(stage, tier) == Flow(
                count=len(mine), nbytes=sum(span[4] for span in mine), busy_ns=len(busy)
            )
