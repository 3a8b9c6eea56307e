"""One process for each device: whatever a process does, it makes a context on its own device only.

A context on another one would take half a gigabyte there, from every process. It stays until the process
ends, so each use has a process of its own.
"""

import os
from pathlib import Path

import pytest
import torch
from gpu_runs import copied_bytes, settings_for
from torch import nn

import penstock
import preloaded
from offload_runs import counted, session_in, wait_for_writes
from penstock import checkpoint
from penstock.core.units import MIB
from penstock.io import cufile
from penstock.observe.recorder import Stage
from penstock.optim import FlashAdamW
from recompute_plans import Block, runs_again

pytestmark = pytest.mark.gpu

ALONE = "PENSTOCK_TEST_ALONE"
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
WIDTH = 256
ROWS = 2048
DEVICE = "cuda:1"


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).to(DEVICE)


def batch():
    return torch.randn(ROWS, WIDTH).to(DEVICE)


def train(model, session=None, optimizer=None, steps=3):
    x = batch()
    for _ in range(steps):
        loss = torch.tanh(model(torch.relu(x))).square().mean()
        if session is not None:
            wait_for_writes(session)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize(DEVICE)


def spill(path, places="flash", named=True, **settings):
    model = network()
    with session_in(path, model if named else None, **settings_for(places, **settings)) as session:
        train(model, session)
    return session


def flash(path):
    assert min(copied_bytes(spill(path))) > 8 * MIB


def host(path):
    """A session without a model has the device that is current."""
    assert min(copied_bytes(spill(path, "host", named=False))) > 8 * MIB


def without_a_budget(path):
    session = spill(path, policy="auto", device_memory=None)
    assert session.budget.advisory


def codec(path):
    assert counted(spill(path, codec="zero-value"), "encoded.source_bytes") > MIB


def gpu_direct(path):
    if not cufile.available(ask_library=True):
        pytest.skip("GPU-direct I/O does not work here")
    os.environ["PENSTOCK_GPU_DIRECT"] = "on"
    session = spill(path, host_memory=0)
    assert copied_bytes(session) == (0, 0)
    assert session.recorder.snapshot().flow(Stage.WRITE, "flash").nbytes > 8 * MIB


def recompute(path):
    model = nn.Sequential(*(Block(WIDTH) for _ in range(4))).to(DEVICE)
    settings = settings_for("flash", policy="recompute", device_memory=24 * MIB)
    with session_in(path, model, **settings) as session:
        train(model, session)
        assert runs_again(session) > 0


def optimizer(path, **settings):
    model = network()
    adam = FlashAdamW(model.parameters(), lr=1e-2, flash=path, tile=102_400, **settings)
    train(model, optimizer=adam)
    adam.close()


def optimizer_overlapped(path):
    optimizer(path, overlap=True)


def optimizer_with_gradients(path):
    optimizer(path, gradient_memory=0)


def saved(path):
    """And loaded, into what is there and anew."""
    model = network()
    adam = torch.optim.AdamW(model.parameters())
    train(model, optimizer=adam)
    state = checkpoint.training_state(model=model, optimizer=adam)
    checkpoint.save(path / "a", state)
    checkpoint.load(path / "a", state)
    checkpoint.load(path / "a")


def saved_in_the_background(path):
    model = network()
    adam = torch.optim.AdamW(model.parameters())
    train(model, optimizer=adam)
    state = checkpoint.training_state(model=model, optimizer=adam)
    with checkpoint.Checkpointer(path / "all") as keeper:
        keeper.save(1, state, wait=False)
        train(model, optimizer=adam, steps=1)
        keeper.wait()
        keeper.load(state)


def suspended(path):
    model = network()
    adam = torch.optim.AdamW(model.parameters())
    with session_in(path, model, adam, **settings_for("flash")) as session:
        train(model, session, adam)
        penstock.suspend(session)
        penstock.resume(session)
        train(model, session, adam)


def weights(path):
    model = network().requires_grad_(False)
    model.append(nn.Linear(WIDTH, 1).to(DEVICE))
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    settings = settings_for("flash", weights="flash", weights_memory="768KiB", floor="64KiB")
    with session_in(path, model, **settings) as session:
        assert session._weights.total_bytes == 6 * 4 * WIDTH * WIDTH
        train(model, optimizer=optimizer)
        with torch.no_grad():
            model[0].weight.mul_(2)


def trained_weights(path):
    model = network()
    settings = settings_for("flash", weights="flash", weights_memory="768KiB", floor="64KiB")
    for overlap in (False, True):
        with session_in(path, model, **settings) as session:
            adam = FlashAdamW(model.parameters(), flash=path, tile=102_400, overlap=overlap)
            assert session._weights.total_bytes == 6 * 4 * WIDTH * WIDTH
            train(model, optimizer=adam)
            adam.close()


USES = {
    each.__name__: each
    for each in (
        flash,
        host,
        without_a_budget,
        codec,
        gpu_direct,
        recompute,
        optimizer,
        optimizer_overlapped,
        optimizer_with_gradients,
        saved,
        saved_in_the_background,
        suspended,
        weights,
        trained_weights,
    )
}


@pytest.mark.skipif(ALONE not in os.environ, reason="run by the test below, in its own process")
@pytest.mark.filterwarnings("ignore:.*takes more memory than in memory")
@pytest.mark.parametrize("use", USES)
def test_the_second_device_alone(disk_path, small_knobs, use):
    torch.cuda.set_device(1)
    train(network())
    assert not torch._C._cuda_hasPrimaryContext(0), "torch itself has made a context there"
    USES[use](disk_path)
    assert not torch._C._cuda_hasPrimaryContext(0), "a call of ours has made a context there"


@pytest.mark.parametrize("use", USES)
def test_trap_34_no_context_is_made_on_a_device_that_is_not_used(request, use):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device only")
    plugins = [part for name in request.config.option.plugins for part in ("-p", name)]
    test = f"{__file__}::test_the_second_device_alone[{use}]"
    ended = preloaded.run(
        ["-c", PYTEST, "-m", "gpu", *plugins, test],
        env=os.environ | {ALONE: "1"},
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stdout
    assert "1 passed" in ended.stdout or "1 skipped" in ended.stdout
