"""Device memory really falls by what is offloaded, and all of it comes back."""

import gc

import pytest
import torch
from gpu_runs import DEVICE, SMALL, settings_for
from torch import nn

from cuda_runs import assert_nothing_held
from offload_runs import session_in

pytestmark = pytest.mark.gpu

WIDTH, ROWS, LAYERS = (128, 2048, 24) if SMALL else (1024, 8192, 24)
SAVED_EACH = WIDTH * ROWS * 4
"""Bytes of what a layer saves, 32 MiB (or 1 MiB): its output, which is the input of the next one."""
HOST = "256MiB" if SMALL else "4GiB"
BUDGET = 6 * SAVED_EACH
SLACK = 2 * SAVED_EACH
"""What torch's allocator rounds up, cuBLAS takes, and a dropped tensor holds until its copy ends."""


def network():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(DEVICE)


def peak_bytes(model, steps=3):
    """The most that was allocated during some steps, over what was before."""
    for step in range(steps):
        if step == 1:  # the first makes gradients and warms up
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        x = torch.randn(ROWS, WIDTH, device=DEVICE)
        model(x).square().mean().backward()
        del x
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def settings(places, **more):
    """Room for two steps, so that nothing goes elsewhere because a slow disk is still busy."""
    return settings_for(places, host_memory=HOST, **({"flash_capacity": "4GiB"} | more))


@pytest.mark.parametrize("places", ["flash", "host"])
def test_the_peak_falls_to_the_budget(disk_path, places):
    model = network()
    without = peak_bytes(model)
    assert without >= LAYERS * SAVED_EACH
    more = {"policy": "auto", "device_memory": BUDGET}
    with session_in(disk_path, model, **settings(places, **more)) as session:
        with_us = peak_bytes(model)
        assert session.budget.peak_bytes <= BUDGET
    transient = 4 * SAVED_EACH  # what a node makes beside what is saved: outputs and gradients
    assert with_us <= BUDGET + transient + SLACK


@pytest.mark.parametrize("places", ["flash", "host"])
def test_nothing_is_left_on_the_device_or_pinned(disk_path, places):
    model = network()
    peak_bytes(model, steps=2)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with session_in(disk_path, model, **settings(places)) as session:
        peak_bytes(model, steps=2)
        assert_nothing_held(session)
        slabs = session._stores.mover._slabs
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert all(slab.arena.touched_bytes == 0 for slab in slabs)


def test_trap_07_a_graph_that_is_dropped_gives_everything_back(disk_path):
    model = network()
    with session_in(disk_path, model, **settings("flash")) as session:
        for _ in range(3):
            model(torch.randn(ROWS, WIDTH, device=DEVICE))
        assert_nothing_held(session)
