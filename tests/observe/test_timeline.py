"""The sums over time, against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe import timeline
from penstock.observe.timeline import BusyTime, LevelMeter

MOMENT = st.integers(0, 60)
INTERVALS = st.lists(st.tuples(MOMENT, MOMENT), max_size=40)


def union_length(intervals: list[tuple[int, int]]) -> int:
    """Count the unit cells that any interval covers."""
    return len({cell for start, end in intervals for cell in range(start, end)})


@given(INTERVALS)
def test_busy_time_is_the_length_of_the_union(intervals):
    busy = BusyTime()
    for count, (start, end) in enumerate(intervals, start=1):
        busy.add(start, end)
        assert busy.total_ns == union_length(intervals[:count])


@given(INTERVALS)
def test_the_order_of_arrival_does_not_matter(intervals):
    forwards, backwards = BusyTime(), BusyTime()
    for start, end in intervals:
        forwards.add(start, end)
    for start, end in reversed(intervals):
        backwards.add(start, end)
    assert forwards.total_ns == backwards.total_ns


def test_touching_intervals_become_one_burst():
    busy = BusyTime()
    for start in range(0, 1000, 10):
        busy.add(start, start + 10)
    assert busy.total_ns == 1000
    assert busy._ends == [1000]


def test_memory_is_bounded_and_recent_overlaps_stay_exact(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_BURSTS", 8)
    busy, intervals = BusyTime(), []
    for start in range(0, 10_000, 10):
        intervals.append((start, start + 3))
        busy.add(start, start + 3)
        intervals.append((max(start - 25, 0), start + 1))  # reaches back over two idle periods
        busy.add(max(start - 25, 0), start + 1)
        assert len(busy._ends) <= 8
    assert busy.total_ns == union_length(intervals)


def test_what_was_folded_is_counted_once(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_BURSTS", 8)
    busy = BusyTime()
    for start in range(0, 1000, 10):
        busy.add(start, start + 5)
    before = busy.total_ns
    busy.add(0, 5)
    assert busy.total_ns == before
    busy.add(0, 1000)
    assert before < busy.total_ns <= 1000


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), min_size=1, max_size=40),
    st.integers(0, 5),
)
def test_area_is_the_sum_of_the_level_at_every_tick(samples, rest):
    meter, level_at, level = LevelMeter(0), [], 0
    for wait, nbytes in samples:
        level_at += [level] * wait
        level = nbytes
        meter.sample(len(level_at), nbytes)
    level_at += [level] * rest
    assert meter.area_until(len(level_at)) == sum(level_at)
    assert meter.peak_bytes == max(nbytes for _, nbytes in samples)
    assert meter.current_bytes == level


def test_a_window_has_its_own_peak_which_starts_at_the_present_level():
    meter = LevelMeter(0)
    meter.sample(0, 100)
    meter.sample(1, 40)
    meter.open_window()
    assert meter.window_peak_bytes == 40
    meter.sample(2, 70)
    assert (meter.window_peak_bytes, meter.peak_bytes) == (70, 100)


@pytest.mark.parametrize(("start", "end"), [(5, 5), (9, 3)])
def test_an_empty_interval_adds_nothing(start, end):
    busy = BusyTime()
    busy.add(start, end)
    assert busy.total_ns == 0
