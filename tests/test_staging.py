"""Two pieces in turn, on a device whose copies run as late as they may. On a real one: ``tests/gpu``."""

from collections import deque
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock import staging
from penstock.core.errors import PenstockWarning
from penstock.staging import PIECE_BYTES, Staging, ready_event

DEVICE = torch.device("cuda", 0)
COUNTS = [1, PIECE_BYTES // 4, PIECE_BYTES + 3]
"""Of float32: less than a piece, one, and more than four."""


class LateStream:
    """Does nothing before somebody waits for it."""

    def __init__(self, device=None, priority=0):
        self.queue = deque()

    def wait_event(self, event):
        self.queue.append(event.synchronize)

    def run_to(self, end):
        while end in self.queue:
            work = self.queue.popleft()
            if not isinstance(work, LateEvent):
                work()


class LateEvent:
    def __init__(self, blocking=False):
        self.stream = None

    def record(self, stream):
        self.stream = stream
        stream.queue.append(self)

    def synchronize(self):
        self.stream.run_to(self)


class LateCopies(TorchDispatchMode):
    """What is not to block is enqueued on the current stream."""

    current = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_late = args[2:3] == (True,) or kwargs.get("non_blocking", False)
        if func is torch.ops.aten.copy_.default and is_late:
            target, source = args[:2]

            def copy():
                with _disable_current_modes(), torch.no_grad():
                    target.copy_(source)

            self.current.queue.append(copy)
            return target
        return func(*args, **kwargs)


@pytest.fixture
def device(monkeypatch):
    """The mode, which knows the current stream."""
    late = LateCopies()

    @contextmanager
    def current(stream):
        before, late.current = late.current, stream
        yield
        late.current = before

    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(staging, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    with late:
        yield late


def copied(there, here, *, out, after=None):
    steps = staging._steps(there=there, here=here, out=out)
    mine = Staging(DEVICE)
    (mine.to_host if out else mine.to_device)(steps, after)


def late_event(work):
    """Of a stream that has something to do before it."""
    stream, event = LateStream(), LateEvent()
    stream.queue.append(work)
    event.record(stream)
    return event


@pytest.mark.parametrize("count", COUNTS)
def test_each_piece_is_emptied_after_the_device_has_filled_it(device, count):
    there = torch.arange(float(count))
    here = torch.full((count,), -1.0)
    copied(there, here, out=True)
    assert torch.equal(here, there)


@pytest.mark.parametrize("count", COUNTS)
def test_each_piece_is_filled_again_after_the_device_has_emptied_it(device, count):
    here = torch.arange(float(count))
    there = torch.full((count,), -1.0)
    copied(there, here, out=False)
    assert torch.equal(there, here)


@pytest.mark.parametrize("out", [True, False])
def test_a_copy_comes_after_its_event(device, out):
    there, here = torch.zeros(8), torch.ones(8)
    seen = []

    def work():
        with _disable_current_modes():
            seen.append(there.clone())
            there.add_(2)

    copied(there, here, out=out, after=late_event(work))
    assert torch.equal(seen[0], torch.zeros(8))
    assert torch.equal(here, torch.full((8,), 2.0 if out else 1.0))
    assert torch.equal(there, here)


def test_an_error_leaves_nothing_on_its_way(device):
    there = torch.arange(3.0 * PIECE_BYTES)
    mine = Staging(DEVICE)

    def fail(piece):
        raise OSError("no room")

    steps = [
        step._replace(on_host=fail)
        for step in staging._steps(there=there, here=torch.empty_like(there), out=True)
    ]
    with pytest.raises(OSError, match="no room"):
        mine.to_host(steps, None)
    assert not mine._stream.queue


def test_types_are_made_on_the_host(device):
    there, here = torch.arange(7, dtype=torch.bfloat16), torch.empty(7)
    copied(there, here, out=True)
    assert torch.equal(here, there.float())
    copied(there, here + 1, out=False)
    assert torch.equal(there, (here + 1).bfloat16())


def test_one_is_used_by_one_thread_at_a_time_and_kept_for_the_next(device):
    with staging.staging_for(DEVICE) as first, staging.staging_for(DEVICE) as second:
        assert first is not second
    with staging.staging_for(DEVICE) as third:
        assert third in (first, second)
    staging.free_idle()
    with staging.staging_for(DEVICE) as fourth:
        assert fourth not in (first, second)
    staging.free_idle()


def test_memory_that_the_driver_does_not_pin_does_with_a_warning(monkeypatch):
    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("out of memory")
        return empty(*args, **kwargs)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(staging, "_warned", set())
    with pytest.warns(PenstockWarning, match="cannot pin 64 bytes of host memory .out of memory"):
        assert staging.pinned(64).nbytes == 64
    assert staging.pinned(64).nbytes == 64  # said once


def test_there_is_nothing_to_wait_for_on_the_host():
    assert ready_event(torch.device("cpu")) is None
    source = torch.arange(5.0)
    assert torch.equal(staging.copy_across(source, torch.empty(5), None), source)
