"""The axis of profiles: waits of clients are left out of it, each once."""

from penstock.observe.clock import ManualClock
from penstock.observe.events import StallCause
from penstock.observe.recorder import Recorder
from penstock.runtime.compute_time import ComputeTime


def test_a_wait_inside_of_another_one_is_a_part_of_it():
    clock = ManualClock()
    recorder = Recorder(clock=clock)
    time = ComputeTime(clock)
    with time.waiting(recorder, StallCause.UPDATE, "layer"):
        clock.advance(10_000_000)
        with time.waiting(recorder, StallCause.WEIGHTS, "weight"):
            clock.advance(5_000_000)
    with time.waiting(recorder, StallCause.WEIGHTS, "weight"):
        clock.advance(1_000_000)
    assert time.stalled_ns == 16_000_000
    stalls = recorder.snapshot().stalls
    assert {cause: each.total_ns for cause, each in stalls.items()} == {
        StallCause.UPDATE: 15_000_000,
        StallCause.WEIGHTS: 1_000_000,
    }
