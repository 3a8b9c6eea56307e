"""On GPUs: a budget that is found where none is given, and a model that is spread over two."""

import gc

import pytest
import torch
from gpu_runs import little_memory, settings_for
from torch import nn

from cuda_runs import assert_nothing_held
from offload_runs import Trace, session_in
from penstock.core.units import MIB
from penstock.plan import Action
from penstock.runtime.cuda.link import CudaLink
from penstock.runtime.table import SAVED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*determinis"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream"),
]

DEVICE = "cuda:0"
ROWS, WIDTH = 4096, 1024
TENSOR_BYTES = ROWS * WIDTH * 4
"""What a layer saves, and torch's allocator does not round up."""
LAYERS = 12
ROOM_BYTES = 13 * TENSOR_BYTES
"""Less than a step takes, which is what the layers save and three more; enough for one that offloads."""


class Spread(nn.Module):
    """A chain, the first part of which is on one device and the second on another, or on the same."""

    def __init__(self, first, second):
        super().__init__()
        self.first = nn.Sequential(*(self.layer() for _ in range(LAYERS // 2))).to(first)
        self.second = nn.Sequential(*(self.layer() for _ in range(LAYERS // 2))).to(second)
        self.to_second = second

    @staticmethod
    def layer():
        return nn.Sequential(nn.Tanh(), Scaled())

    def forward(self, x):
        return self.second(self.first(x).to(self.to_second)).square().mean()


class Scaled(nn.Module):
    """Saves what it is given, which the layer before has saved already."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.full((WIDTH,), 1.1))

    def forward(self, x):
        return x * self.by


def train(first, second, steps=3, session_of=None):
    torch.manual_seed(0)
    model, trace = Spread(first, second), Trace()
    optimizer = torch.optim.Adam(model.parameters())
    session = None if session_of is None else session_of(model, optimizer).__enter__()
    try:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(ROWS, WIDTH, generator=generator).to(first)
            loss = model(x)
            loss.backward()
            trace.note(f"step {step}, loss", loss)
            trace.note_gradients(step, model)
            optimizer.step()
            optimizer.zero_grad()
            del x, loss
        if session is not None:
            assert_nothing_held(session)
    finally:
        if session is not None:
            session.close()
    return trace, session


@pytest.fixture
def room():
    with little_memory(ROOM_BYTES, DEVICE) as most:
        yield most


def test_without_a_budget_what_is_left_is_the_budget(disk_path, small_knobs, room):
    with pytest.raises(torch.OutOfMemoryError):
        train(DEVICE, DEVICE)
    gc.collect()
    torch.cuda.empty_cache()
    settings = settings_for("host", host_memory="256MiB", policy="auto", device_memory=None)
    found, session = train(
        DEVICE, DEVICE, session_of=lambda m, o: session_in(disk_path, m, o, **settings)
    )
    assert session.budget.advisory
    assert 0 < session.budget.limit_bytes < room - 4 * TENSOR_BYTES
    assert session.plan.offloaded_bytes >= 2 * TENSOR_BYTES
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    found.assert_same_bits(train(DEVICE, DEVICE)[0])


def test_what_fits_stays_without_a_budget(disk_path, small_knobs):
    settings = settings_for("host", host_memory="256MiB", policy="auto", device_memory=None)
    _, session = train(
        DEVICE, DEVICE, session_of=lambda m, o: session_in(disk_path, m, o, **settings)
    )
    assert {each.action for each in session.plan.decisions} == {Action.KEEP}
    free, _ = torch.cuda.mem_get_info(DEVICE)
    assert session.budget.limit_bytes <= CudaLink().usable_bytes(torch.device(DEVICE))
    assert free > LAYERS * TENSOR_BYTES


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("places", ["flash", "host"])
@pytest.mark.parametrize("policy", ["auto", "all"])
def test_a_model_on_two_devices_trains_bit_for_bit(disk_path, small_knobs, places, policy):
    expected, _ = train("cuda:0", "cuda:1")
    budget = 5 * TENSOR_BYTES
    settings = settings_for(places, policy=policy, host_memory="256MiB", device_memory=budget)
    found, session = train(
        "cuda:0", "cuda:1", session_of=lambda m, o: session_in(disk_path, m, o, **settings)
    )
    found.assert_same_bits(expected)
    assert [str(device) for device in session.devices.all] == ["cuda:0", "cuda:1"]
    for executor in session.devices.all.values():
        assert MIB < executor.budget.peak_bytes <= budget
        assert executor.budget.used_by(SAVED) == 0
    assert list(session.plans) == ["cuda:0", "cuda:1"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_of_two_devices_has_what_is_left_on_it(disk_path, small_knobs):
    settings = settings_for("host", host_memory="256MiB", policy="auto", device_memory=None)
    _, session = train(
        "cuda:0", "cuda:1", session_of=lambda m, o: session_in(disk_path, m, o, **settings)
    )
    for device, executor in session.devices.all.items():
        assert executor.budget.advisory
        assert executor.budget.limit_bytes <= CudaLink().usable_bytes(device)
    assert sum("no device_memory was given" in note for note in session.summary().notes) == 2
