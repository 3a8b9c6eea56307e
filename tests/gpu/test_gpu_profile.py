"""On a GPU a profile tells the device's time, and a step that is profiled does not stop it."""

import threading
import time

import pytest
import torch
from gpu_runs import DEVICE, HOST, settings_for
from torch import nn

from offload_runs import session_in
from penstock.core.units import MIB, parse_bytes
from penstock.hooks.observer import PassObserver
from penstock.runtime.cuda.link import CudaLink

pytestmark = pytest.mark.gpu

ROUNDING_NS = 100_000
"""Events tell the time to a millionth of what has passed, or to half a microsecond."""
CYCLES = (10**5, 10**6, 10**4)
"""For which the layers let the device sleep."""


class Held(nn.Module):
    """A layer for which the device needs a while, which the host does not see."""

    def __init__(self, width, cycles):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.cycles = cycles

    def forward(self, x):
        torch.cuda._sleep(self.cycles)
        return torch.tanh(self.linear(x))


def network(device=DEVICE):
    torch.manual_seed(0)
    return nn.Sequential(*(Held(256, cycles) for cycles in CYCLES)).to(device)


def event():
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


@pytest.fixture
def waits(monkeypatch):
    """Waits of the host for a device, but for those of threads that do nothing else."""
    seen = []
    synchronize = CudaLink.synchronize

    def noting(link, event):
        if not threading.current_thread().name.startswith("penstock"):
            seen.append(event)
        synchronize(link, event)

    monkeypatch.setattr(CudaLink, "synchronize", noting)
    return seen


def test_a_profiled_step_waits_when_it_is_over_and_other_steps_never(disk_path, small_knobs, waits):
    model = network()
    counts = []
    with session_in(disk_path, model, **settings_for("host", policy="keep")) as session:
        del waits[:]
        for _ in range(3):
            model(torch.randn(512, 256, device=DEVICE)).square().mean().backward()
            session.step()
            counts.append(len(waits))
    assert 1 <= counts[0] <= 3  # the thread of backward may have a stream of its own
    assert counts[1] == counts[2] == counts[0]


def test_a_profile_is_as_long_as_the_devices_own_events_say(disk_path, small_knobs):
    model = network()
    x = torch.randn(512, 256, device=DEVICE)
    start = event()
    torch.cuda._sleep(CYCLES[1])
    end = event()
    end.synchronize()
    slept_ns = start.elapsed_time(end) * 1e6
    with session_in(disk_path, model, **settings_for("host", policy="keep")) as session:
        before = event()
        model(x).square().mean().backward()
        after = event()
        after.synchronize()
        profile = session.profile
    (one,) = profile.passes
    took_ns = one.end_ns - one.start_ns
    assert took_ns <= before.elapsed_time(after) * 1e6 + ROUNDING_NS
    assert took_ns >= slept_ns - ROUNDING_NS
    for slot in profile.slots:
        assert one.start_ns <= slot.saved_at_ns <= slot.needed_at_ns <= one.end_ns
    forward = [each for each in profile.operators if not each.backward]
    assert sum(each.took_ns for each in forward) <= took_ns + ROUNDING_NS


def test_what_penstock_does_in_hooks_is_no_part_of_a_profile(disk_path, small_knobs, monkeypatch):
    """While a device has nothing to do: a pass that is observed takes the host many times as long."""
    pause_s = 0.05

    def slowly(method):
        def call(self, *args):
            time.sleep(pause_s)
            return method(self, *args)

        return call

    for name in ("packed", "unpacked", "_switch"):
        monkeypatch.setattr(PassObserver, name, slowly(getattr(PassObserver, name)))
    model = network()
    x = torch.randn(512, 256, device=DEVICE)
    model(x).square().mean().backward()  # what CUDA does but once
    torch.cuda.synchronize()
    with session_in(disk_path, model, **settings_for("host", policy="keep")) as session:
        begun_s = time.monotonic()
        model(x).square().mean().backward()
        took_s = time.monotonic() - begun_s
        (one,) = session.profile.passes
    assert took_s > 12 * pause_s
    assert (one.end_ns - one.start_ns) / 1e9 < took_s / 3


@pytest.mark.parametrize(
    ("places", "host_memory", "staging_bytes"),
    [("flash", HOST, HOST), ("both", "1GiB", 512 * MIB), ("host", HOST, 0)],
)
def test_plans_know_how_much_memory_stages_what_goes_to_flash(
    disk_path, small_knobs, places, host_memory, staging_bytes
):
    model, settings = network(), settings_for(places, host_memory=host_memory)
    with session_in(disk_path, model, **settings) as session:
        for _ in range(2):
            model(torch.randn(512, 256, device=DEVICE)).square().mean().backward()
            session.step()
        assert session.plan.budgets.staging_bytes == parse_bytes(staging_bytes, what="staging")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_profile_of_two_devices_has_one_axis(disk_path, small_knobs):
    first, second = network("cuda:0"), network("cuda:1")
    with session_in(disk_path, first, **settings_for("host", policy="keep")) as session:
        hidden = first(torch.randn(512, 256, device="cuda:0"))
        second(hidden.to("cuda:1")).square().mean().backward()
        profile = session.profile
    (one,) = profile.passes
    order = [slot.saved_at_ns for slot in profile.slots]
    assert order == sorted(order)
    assert one.start_ns <= order[0]
    for slot in profile.slots:
        assert slot.saved_at_ns <= slot.needed_at_ns <= one.end_ns
