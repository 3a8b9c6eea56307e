"""What else touches device memory: suspended jobs, checkpoints, optimizers with states on flash."""

import ctypes

import pytest
import torch
from gpu_runs import DEVICE, settings_for
from torch import nn

import penstock
from offload_runs import Trace, session_in
from penstock import checkpoint
from penstock.optim import FlashAdamW

pytestmark = pytest.mark.gpu

LONG = 500_000_000
"""Cycles of the device that take about a quarter of a second."""


@pytest.fixture
def busy():
    """``busy()`` keeps the current stream, which is none that others share, at work for a while."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield lambda: torch.cuda._sleep(LONG)
    torch.cuda.synchronize()


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 512)).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(trace, number, model, optimizer):
    optimizer.zero_grad()
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    trace.note(f"step {number}, loss", loss)
    trace.note_weights(number, model)


def is_pinned(slab):
    memory = (ctypes.c_ubyte * slab.capacity_bytes).from_address(slab.arena.address)
    return torch.frombuffer(memory, dtype=torch.uint8).is_pinned()


def test_a_suspended_job_gives_its_memory_back_and_goes_on_to_the_same_bits(disk_path, busy):
    expected, found = Trace(), Trace()
    plain = network()
    for number in range(3):
        step(expected, number, *plain)
    model, optimizer = network()
    with session_in(disk_path, model, optimizer, **settings_for("flash")) as session:
        slabs = session._stores.mover._slabs
        assert all(is_pinned(slab) for slab in slabs)
        for number in range(3):
            step(found, number, model, optimizer)
            before = torch.cuda.memory_allocated()
            busy()
            suspended = penstock.suspend(session)
            assert suspended.nbytes > 4 * 1024 * 1024  # weights, gradients and states
            assert torch.cuda.memory_allocated() <= before - suspended.nbytes
            assert not any(is_pinned(slab) for slab in slabs)
            penstock.resume(session)
            assert all(is_pinned(slab) for slab in slabs)
    found.assert_same_bits(expected)


def test_a_checkpoint_has_what_a_stream_was_still_to_write(disk_path, busy):
    saved = torch.zeros(3 << 20, device=DEVICE)
    torch.cuda.synchronize()
    busy()
    saved.fill_(3)
    checkpoint.save(disk_path / "a", {"x": saved})
    loaded = torch.zeros_like(saved)
    torch.cuda.synchronize()
    checkpoint.load(disk_path / "a", {"x": loaded})
    assert bool((loaded == 3).all())


@pytest.mark.filterwarnings("ignore:AdamW on flash takes more memory")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_an_optimizer_on_flash_makes_the_weights_that_it_makes_on_the_host(
    disk_path, busy, overlap, clip_norm
):
    def weights(device):
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=generator) for shape in ((700, 300), (5000,), (3,))]
        mine = [nn.Parameter(each.to(device)) for each in start]
        # two tiles and more, so that several threads copy
        settings = {"flash": disk_path, "tile": 102_400, "overlap": overlap, "clip_norm": clip_norm}
        optimizer = FlashAdamW(mine, lr=1e-2, **settings)
        for _ in range(3):
            optimizer.zero_grad()
            slopes = [torch.randn(each.shape, generator=generator) for each in start]
            if device == DEVICE:
                busy()
            sum((w * s.to(device)).sum() for w, s in zip(mine, slopes, strict=True)).backward()
            optimizer.step()
        optimizer.close()
        return [each.detach().cpu() for each in mine]

    for there, here in zip(weights(DEVICE), weights("cpu"), strict=True):
        assert (
            torch.allclose(there, here, rtol=1e-5, atol=1e-6)
            if clip_norm
            else torch.equal(there, here)
        )
