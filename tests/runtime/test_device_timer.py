"""``penstock.runtime.cuda.timing``: when a device came to moments of a step, told without stopping it."""

import pytest
import torch
from simulated_device import DEVICE, SimLink

from penstock.observe.clock import ManualClock
from penstock.runtime.cuda.timing import DeviceTimer

OTHER = torch.device("meta")
"""Stands for a second device."""


class TwoLinks(SimLink):
    """Two devices, each with a stream; times of one device cannot be compared with the other's."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.second = self.stream("compute-1")

    def current_stream(self, device):
        return self.second if device == OTHER else self.current

    def record(self, stream, *, timed=False):
        event = super().record(stream, timed=timed)
        event.device = OTHER if stream is self.second else DEVICE
        return event

    def elapsed_ns(self, start, end):
        assert start.device == end.device, "as CUDA: an invalid resource handle"
        return super().elapsed_ns(start, end)


class Bench:
    """A timer, the device that it times, and a host whose clock moves by hand."""

    def __init__(self, link=SimLink):
        self.clock = ManualClock()
        self.link = link(clock=self.clock)
        self.timer = DeviceTimer(self.link, DEVICE, self.clock)
        self.timer.begin()

    def mark(self):
        return self.timer.mark(self.clock.now_ns())

    def run_until_now(self):
        """Let the device do what it has done by the host's time."""
        for stream in self.link.streams:
            while stream.queue and stream.runnable:
                _, _, told_ns, takes_ns = stream.queue[0]
                if max(stream.now_ns, told_ns) + takes_ns > self.clock.now_ns():
                    break
                stream.step()

    def since_first(self, *marks):
        """By the device's time, in ns."""
        times = self.timer.times()
        return [times[mark] - times[marks[0]] for mark in marks]


@pytest.fixture
def bench():
    return Bench()


def test_moments_are_the_devices_own_however_quick_the_host_is(bench):
    """Three kernels are enqueued in a microsecond each, and take 5, 20 and 40 of them."""
    marks = [bench.mark()]
    for takes_ns in (5_000, 20_000, 40_000):
        bench.clock.advance(1_000)
        bench.link.launch(takes_ns=takes_ns)
        marks.append(bench.mark())
    assert bench.link.current.queue, "nothing has waited for the device"
    assert bench.clock.now_ns() == 3_000
    # the first kernel could not begin before it was enqueued
    assert bench.since_first(*marks) == [0, 6_000, 26_000, 66_000]


def test_a_host_that_is_slow_is_part_of_the_step(bench):
    first = bench.mark()
    bench.clock.advance(50_000)
    bench.link.launch(takes_ns=2_000)
    assert bench.since_first(first, bench.mark()) == [0, 52_000]


def test_moments_stay_on_the_axis_of_the_clock_and_no_two_are_one(bench):
    bench.clock.advance(7_000_000)
    one, other = bench.mark(), bench.mark()
    assert (one, other) == (7_000_000, 7_000_001)
    assert bench.timer.times()[one] == one


def test_what_the_device_idles_in_a_wait_is_left_out(bench):
    """The host waits 90 us; the device had work for 30 of them."""
    first = bench.mark()
    bench.link.launch(takes_ns=30_000)
    waiting = bench.timer.wait_begins()
    bench.clock.advance(90_000)
    bench.timer.wait_ends(waiting)
    bench.link.launch(takes_ns=10_000)
    assert bench.since_first(first, bench.mark()) == [0, 40_000]


def test_a_wait_that_the_device_did_not_notice_costs_nothing(bench):
    first = bench.mark()
    bench.link.launch(takes_ns=100_000)
    waiting = bench.timer.wait_begins()
    bench.clock.advance(60_000)
    bench.timer.wait_ends(waiting)
    bench.link.launch(takes_ns=10_000)
    assert bench.since_first(first, bench.mark()) == [0, 110_000]


def test_after_a_wait_the_host_is_ahead_as_in_any_other_pass(bench):
    """Each of 20 operators takes the device 30 us and the host 10 us to launch, and a hook 100 us."""
    first = bench.mark()
    for _ in range(20):
        bench.clock.advance(10_000)
        bench.link.launch(takes_ns=30_000)
        bench.run_until_now()
        waiting = bench.timer.wait_begins()
        bench.clock.advance(100_000)
        bench.run_until_now()
        bench.timer.wait_ends(waiting)
    took_ns = bench.since_first(first, bench.mark())[1]
    assert 20 * 30_000 <= took_ns <= 20 * 30_000 + 10_000


def test_waits_and_moments_within_a_wait_are_part_of_it(bench):
    first = bench.mark()
    outer = bench.timer.wait_begins()
    bench.clock.advance(20_000)
    inner = bench.timer.wait_begins()
    bench.clock.advance(20_000)
    within = bench.mark()
    bench.timer.wait_ends(inner)
    bench.clock.advance(20_000)
    bench.timer.wait_ends(outer)
    bench.link.launch(takes_ns=10_000)
    assert bench.since_first(first, within, bench.mark()) == [0, 0, 10_000]


def test_a_wait_that_an_error_ended_is_forgotten_in_the_next_pass(bench):
    first = bench.mark()
    bench.timer.wait_begins()
    bench.clock.advance(20_000)
    assert bench.since_first(first, bench.mark()) == [0, 0]
    bench.timer.begin()
    first = bench.mark()
    bench.link.launch(takes_ns=10_000)
    assert bench.since_first(first, bench.mark()) == [0, 10_000]


def test_a_pass_that_begins_within_a_wait_ends_it(bench):
    bench.mark()
    bench.timer.times()
    waiting = bench.timer.wait_begins()
    bench.clock.advance(50_000)
    bench.timer.begin()
    first = bench.mark()
    bench.clock.advance(5_000)
    bench.timer.wait_ends(waiting)
    bench.link.launch(takes_ns=10_000)
    assert bench.since_first(first, bench.mark()) == [0, 15_000]


def test_a_stream_that_waits_for_a_copy_is_a_wait_as_well(bench):
    """The host goes on at once."""
    copy = bench.link.copy_stream(DEVICE)
    copy.put("run", lambda: None, 80_000)
    landed = bench.link.record(copy)
    first = bench.mark()
    waiting = bench.timer.wait_begins()
    bench.link.wait(bench.link.current, landed)
    bench.timer.wait_ends(waiting)
    bench.link.launch(takes_ns=10_000)
    assert bench.since_first(first, bench.mark()) == [0, 10_000]


def test_moments_of_several_streams_are_waited_for_and_never_go_back(bench):
    first = bench.mark()
    main, side = bench.link.current, bench.link.stream("compute-1")
    bench.link.launch(takes_ns=50_000)
    second = bench.mark()
    bench.link.current = side
    bench.link.launch(takes_ns=8_000)  # is done before that
    third = bench.mark()
    bench.link.launch(takes_ns=70_000)
    fourth = bench.mark()
    bench.link.current = main
    assert bench.since_first(first, second, third, fourth) == [0, 50_000, 50_000, 78_000]


def test_with_two_devices_a_moment_is_when_both_have_come_so_far():
    """A network's first half is on one of them: while that computes, the other has nothing to do."""
    bench = Bench(TwoLinks)
    first = bench.mark()
    bench.link.launch(takes_ns=50_000)
    middle = bench.mark()
    bench.timer.see(OTHER)
    done = bench.link.record(bench.link.current)
    bench.link.wait(bench.link.second, done)
    bench.link.second.put("run", lambda: None, 30_000)
    last = bench.mark()
    assert bench.since_first(first, middle, last) == [0, 50_000, 80_000]


def test_moments_are_forgotten_when_a_pass_begins_after_they_were_asked_for(bench):
    first = bench.mark()
    bench.timer.begin()
    second = bench.mark()
    assert {first, second} <= set(bench.timer.times())
    bench.timer.begin()
    assert not bench.timer.wait_begins()
    third = bench.mark()
    assert set(bench.timer.times()) == {third}


def test_while_a_graph_is_captured_moments_are_the_hosts(bench):
    first = bench.mark()
    bench.link.launch(takes_ns=50_000)
    bench.link.is_capturing = True
    queued = len(bench.link.current.queue)
    second = bench.mark()
    waiting = bench.timer.wait_begins()
    bench.timer.wait_ends(waiting)
    assert bench.timer.times() == {}
    assert len(bench.link.current.queue) == queued
    bench.link.is_capturing = False
    third = bench.mark()
    assert bench.since_first(first, third) == [0, 50_000]
    assert second not in bench.timer.times()


def test_moments_beyond_the_most_are_the_latest(bench, monkeypatch):
    monkeypatch.setattr("penstock.runtime.cuda.timing.MOST_MOMENTS", 3)
    bench = Bench()
    marks = [bench.mark() for _ in range(5)]
    assert set(bench.timer.times()) == set(marks[-3:])


def test_a_capture_on_another_device_is_not_disturbed_either():
    bench = Bench(TwoLinks)
    bench.timer.see(OTHER)
    first = bench.mark()
    bench.link.captured.add(bench.link.second)
    second = bench.mark()
    assert bench.timer.times() == {}
    bench.link.captured.clear()
    assert first in bench.timer.times()
    assert second not in bench.timer.times()
