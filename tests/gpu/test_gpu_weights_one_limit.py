"""Weights on flash and saved tensors share what the program leaves of a device's memory."""

from collections import defaultdict

import pytest
import torch
from gpu_runs import little_memory
from gpu_weights_rig import DEVICE, bits

import penstock
from penstock import ConfigError
from penstock.core.units import MIB
from penstock.homed import home_of
from penstock.hooks.module_weights import ParameterOwners, named_modules
from weights_rig import Chain, built, flash_adamw, inputs, train_step

pytestmark = pytest.mark.gpu

DEPTH, WIDTH, BATCH = 10, 2048, 256
"""Weights take 160 MiB, their gradients as much, and what is saved for backward takes 40 MiB."""
ROOM = 80 * MIB
"""Beside the weights, which are in device memory at first."""
STEPS = 2


def trained(model, directory, seen=None, *, width=WIDTH):
    """Losses of some steps."""
    optimizer = flash_adamw(
        model, directory, lr=1e-3, overlap=True, tile=1 << 16, host_memory="7MiB"
    )
    losses = []
    for x in inputs(STEPS, shape=(BATCH, width)):
        losses.append(bits(train_step(model, optimizer, x.to(DEVICE))).cpu())
        if seen is not None:
            seen()
    optimizer.close()
    return losses


def chain(depth=DEPTH, width=WIDTH):
    return built(lambda: Chain(depth=depth, width=width))


def test_no_limit_has_to_be_given(disk_path):
    model = chain().to(DEVICE)
    limits = []
    settings = {"weights": "flash", "flash": str(disk_path), "host_memory": "128MiB"}
    with little_memory(ROOM) as most, penstock.offload(model, policy="all", **settings) as session:
        weights = session._weights
        assert all(home_of(each) is not None for each in model.parameters())
        # what was in memory when the session was opened is on flash, and counts as free
        assert weights.account.limit_bytes + session.budget.limit_bytes > 80 * MIB

        def seen():
            limits.append((weights.account.limit_bytes, session.budget.limit_bytes))

        losses = trained(model, disk_path, seen)
        memory = weights.account.parent
        for of_weights, of_saved in limits:
            assert min(of_weights, weights.total_bytes) + of_saved <= memory.limit_bytes
        assert memory.peak_bytes <= memory.limit_bytes < most
        assert weights.account.peak_bytes > 64 * MIB
        assert weights.forced == 0
        assert session.executor.allowance._is_divided
        notes = " ".join(session.summary().notes)
        assert "no weights_memory was given: of the" in notes
        assert "beside saved tensors and weights that rest elsewhere, " in notes
        assert torch.cuda.max_memory_allocated(DEVICE) <= most
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    plain = chain().to(DEVICE)
    assert losses == trained(plain, disk_path)
    assert all(map(torch.equal, map(bits, model.parameters()), map(bits, plain.parameters())))


@pytest.mark.parametrize("settings", [
    {"policy": "auto", "device_memory": "4MiB", "floor": "64KiB"},
    {"policy": "auto", "device": DEVICE},
    {"policy": "auto", "weights": "host", "flash": ()},
    {"policy": "auto", "weights": "host", "flash": (), "device": DEVICE, "host_memory": "128MiB"},
    {"policy": "auto", "memory": "128MiB", "host_memory": None},
], ids=str)  # fmt: skip
def test_a_limit_is_found_beside_other_settings(disk_path, settings):
    settings = {"weights": "flash", "flash": str(disk_path), "host_memory": "64MiB", **settings}
    model, plain = chain(4, 512), chain(4, 512).to(DEVICE)
    if "device" not in settings:
        model.to(DEVICE)
    expected = trained(plain, disk_path, width=512)
    with penstock.offload(model, **settings) as session:
        assert trained(model, disk_path, width=512) == expected
        saved, weights, memory = session.budget, session._weights, session.budget.parent
        owners = ParameterOwners(named_modules(session.modules))
        planned = owners.weights([], defaultdict(list), {})  # for the division of memory
        assert {one.on_host for one in planned} == {settings["weights"] == "host"}
        assert weights.forced == 0
        assert 0 < weights.account.peak_bytes <= weights.account.limit_bytes
        if "device_memory" in settings:
            assert saved.peak_bytes <= saved.limit_bytes == 4 * MIB
        else:
            assert saved.limit_bytes == memory.limit_bytes - weights.total_bytes
    assert all(map(torch.equal, map(bits, model.parameters()), map(bits, plain.parameters())))


def test_where_limits_are_not_found_it_has_to_be_given(disk_path):
    model = chain(2, 512).to(DEVICE)
    settings = {"weights": "flash", "flash": str(disk_path), "host_memory": "64MiB"}
    with pytest.raises(ConfigError, match="with policy='keep'"):
        penstock.offload(model, policy="keep", **settings).open()
    assert all(home_of(each) is None for each in model.parameters())


def test_others_give_way_to_a_weight_that_is_needed(disk_path):
    """Saved tensors, for example, that were there first."""
    model = chain(4, 512).to(DEVICE)
    settings = {"weights": "flash", "flash": str(disk_path), "host_memory": "64MiB"}
    with penstock.offload(model, policy="all", **settings) as session, torch.no_grad():
        memory = session.budget.parent
        held, others = memory.free_bytes, memory.child("others")
        assert others.try_take(held, "others")
        others.yield_by(lambda nbytes: others.free(min(nbytes, others.used_bytes), "others"))
        model(torch.ones(1, 512, device=DEVICE))
        assert 0 < others.used_bytes < held
        assert session._weights.forced == 0
        assert memory.peak_bytes <= memory.limit_bytes
        others.close()


def test_a_device_that_is_nearly_full_is_enough_to_open(disk_path):
    """The weights leave it then; neither the link nor the longest weights need what is left."""
    model = chain(6).to(DEVICE)
    settings = {"weights": "flash", "flash": str(disk_path), "host_memory": "64MiB"}
    with little_memory(6 * MIB), penstock.offload(model, policy="all", **settings) as session:
        assert session._weights.account.limit_bytes >= 32 * MIB
        assert session.planner._limit_bytes == session.budget.limit_bytes
        with torch.no_grad():
            model(torch.randn(8, WIDTH, device=DEVICE))
        assert session._weights.forced == 0
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
