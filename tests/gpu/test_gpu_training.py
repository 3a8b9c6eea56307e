"""Training on a GPU with Penstock and without is the same to the last bit.

Where torch has no deterministic kernel for something in a network, two runs without Penstock differ
already; such a network is skipped, in words.
"""

import ctypes
import threading
from functools import lru_cache, partial

import pytest
import torch
from gpu_runs import (
    BATCHES,
    DEVICE,
    EMULATED,
    REPRODUCIBLE,
    assert_moved,
    prepare,
    run,
    saved_bytes,
    settings_for,
    train,
)
from torch import nn

from cuda_runs import assert_nothing_held, wait_until_settled
from offload_runs import Trace, counted, session_in
from penstock.core.errors import PenstockWarning
from penstock.lab import zoo
from penstock.runtime.cuda.link import CudaLink
from penstock.runtime.cuda.pinned import Slab
from penstock.store.wrappers import FaultyTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*determinis"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream"),
]


@lru_cache
def plain(family, **how):
    first = run(family, **how)[0]
    try:
        if not EMULATED:
            first.assert_same_bits(run(family, **how)[0])
    except AssertionError as error:
        if family in REPRODUCIBLE:
            raise
        pytest.skip(f"{family} is not reproducible on this device by itself: {error}")
    return first


def check(family, path, places, *, wrap_tier=None, how=(), settled=False, **settings):
    how = dict(how)
    expected = plain(family, **how)
    settings = settings_for(places, **settings)
    found, session = run(
        family, path, wrap_tier=wrap_tier, session_settings=settings, settled=settled, **how
    )
    found.assert_same_bits(expected)
    return session


# -- networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", ["flash", "host", "both"])
@pytest.mark.parametrize("family", BATCHES)
def test_everything_offloaded_trains_bit_for_bit(disk_path, small_knobs, family, places):
    session = check(family, disk_path, places, settled=True)
    assert_moved(session, places, back=True)


@pytest.mark.parametrize("places", ["flash", "host"])
@pytest.mark.parametrize("family", ["resnet18", "resnet272", "densenet121", "bert-base", "gpt2"])
def test_under_a_budget_it_trains_bit_for_bit(disk_path, small_knobs, family, places):
    budget = int(0.6 * saved_bytes(family, disk_path))
    session = check(family, disk_path, places, settled=True, policy="auto", device_memory=budget)
    assert_moved(session, places, back=True)
    assert session.budget.peak_bytes <= budget


@pytest.mark.parametrize("family", ["resnet18", "bert-base", "gpt2"])
def test_bfloat16_autocast_trains_bit_for_bit(disk_path, small_knobs, family):
    how = {"dtype": torch.bfloat16}
    session = check(family, disk_path, "flash", how=how, settled=True)
    assert_moved(session, "flash")


def test_accumulated_gradients_are_the_same(disk_path, small_knobs):
    check("gpt2", disk_path, "flash", how={"micro_batches": 3})


def test_without_pinned_memory_it_is_the_same(disk_path, small_knobs, monkeypatch):
    monkeypatch.setattr(CudaLink, "pin", lambda self, address, nbytes, device: "not in this test")
    with pytest.warns(PenstockWarning, match="refuses to pin"):
        session = check("resnet18", disk_path, "flash")
    assert counted(session, "pin.failed") == 1


def test_trap_23_with_flash_that_fails_it_is_the_same(disk_path, small_knobs):
    faulty = partial(FaultyTier, fail_at={"write": 3}, times=4)
    with pytest.warns(PenstockWarning, match="stays in pinned host memory"):
        session = check("resnet18", disk_path, "flash", wrap_tier=faulty, settled=True)
    assert counted(session, "spill.failed.flash") == 4


# -- streams and threads --------------------------------------------------------------------------


def test_trap_15_on_a_stream_of_the_programs_own(disk_path, small_knobs):
    expected = plain("gpt2")
    model, optimizer = prepare("gpt2")
    torch.cuda.synchronize()
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        session_in(disk_path, model, optimizer, **settings_for("flash")) as session,
    ):
        found = train(model, optimizer, BATCHES["gpt2"])
        assert_nothing_held(session)
    torch.cuda.synchronize()
    found.assert_same_bits(expected)


class TwoStreams(nn.Module):
    """Two branches, each on a stream; the second waits for the first where it reads from it."""

    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
        self.side = torch.cuda.Stream()

    def forward(self, x):
        main = torch.cuda.current_stream()
        left = right = x
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                right = torch.tanh(second(right + left))
            left = torch.sigmoid(first(left)) * left
            main.wait_stream(self.side)
            left = left + right
            right.record_stream(main)
        return left.square().mean()


@pytest.mark.parametrize("places", ["flash", "host"])
def test_trap_15_on_two_streams(disk_path, small_knobs, places):
    def gradients(amid=lambda: None):
        torch.manual_seed(0)
        model = TwoStreams().to(DEVICE)
        trace = Trace()
        for step in range(4):
            x = torch.randn(512, 512, device=DEVICE)
            loss = model(x)
            amid()
            loss.backward()
            trace.note(f"step {step}, loss", loss)
            trace.note_gradients(step, model)
            model.zero_grad()
        torch.cuda.synchronize()
        return trace

    expected = gradients()
    expected.assert_same_bits(gradients())
    with session_in(disk_path, **settings_for(places)) as session:
        found = gradients(partial(wait_until_settled, session))
        assert_nothing_held(session)
    found.assert_same_bits(expected)
    assert_moved(session, places, back=True)


def test_trap_06_a_graph_that_is_walked_twice(disk_path, small_knobs):
    def gradients():
        model, _ = prepare("gpt2")
        loss = model(*zoo.example_batch(model, 16, device=DEVICE))
        trace = Trace()
        for time in range(3):
            loss.backward(retain_graph=True)
            trace.note_gradients(time, model)
        return trace

    expected = gradients()
    with session_in(disk_path, **settings_for("flash")) as session:
        gradients().assert_same_bits(expected)
        assert_nothing_held(session)


def test_trap_10_backward_in_several_threads_at_once(disk_path, small_knobs):
    def gradients():
        torch.manual_seed(0)
        models = [nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))) for _ in range(4)]
        losses = []
        for model in models:
            x = torch.randn(4096, 512, device=DEVICE)
            losses.append(model.to(DEVICE)(x).square().mean())
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        trace = Trace()
        for number, model in enumerate(models):
            trace.note_gradients(number, model)
        return trace

    expected = gradients()
    with session_in(disk_path, **settings_for("flash", device_memory="64MiB")) as session:
        found = gradients()
        assert_nothing_held(session)
    found.assert_same_bits(expected)
    assert_moved(session, "flash")


# -- races, provoked ------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["compute", "out", "in", "all"])
@pytest.mark.parametrize("places", ["flash", "host"])
def test_trap_15_with_freed_memory_poisoned_and_streams_held_up(
    disk_path, small_knobs, monkeypatch, places, slow
):
    """Freed buffers are overwritten at once, and copies and kernels come late; in whatever order."""
    expected = plain("resnet18")
    free = Slab._free_unneeded

    def poisoned(slab, buffer):
        if not buffer.wanted and not buffer.moving and buffer in slab._buffers:
            ctypes.memset(buffer.address, 0xA5, buffer.block.nbytes)
        free(slab, buffer)

    monkeypatch.setattr(Slab, "_free_unneeded", poisoned)
    for direction in ("out", "in"):
        if slow in (direction, "all"):
            monkeypatch.setattr(CudaLink, f"copy_{direction}", delayed(direction))
    model, optimizer = prepare("resnet18")
    if slow in ("compute", "all"):
        for module in model.modules():
            module.register_forward_hook(lambda *_: torch.cuda._sleep(200_000))
        for parameter in model.parameters():
            parameter.register_hook(lambda _: torch.cuda._sleep(200_000))
    with session_in(disk_path, model, optimizer, **settings_for(places)) as session:
        found = train(model, optimizer, BATCHES["resnet18"])
        assert_nothing_held(session)
    found.assert_same_bits(expected)


def delayed(direction):
    copy = getattr(CudaLink, f"copy_{direction}")

    def late(link, stream, storage, address):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # half a millisecond
        copy(link, stream, storage, address)

    return late
