"""``micro_batched`` on a GPU: backwards inside a backward, in the device's own thread."""

import pytest
import torch
from gpu_runs import DEVICE, assert_moved
from torch import nn

from offload_runs import session_in
from penstock import micro_batched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*determinis"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream"),
]


def network():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(nn.Linear(64, 64), *layers, nn.Linear(64, 64))
    model[-1].weight = model[0].weight
    return model.to(DEVICE)


def squared(x):
    return x.square().mean()


def loop(model, batch):
    for part in batch.tensor_split(4):
        (squared(model(part)) / 4).backward()


def vertical(model, batch):
    (sum(micro_batched([*model, squared], batch, parts=4)) / 4).backward()


def gradients_of(step):
    model = network()
    for seed in range(3):
        torch.manual_seed(seed)
        step(model, torch.randn(1024, 64).to(DEVICE))
    return [weight.grad.cpu() for weight in model.parameters()]


def test_gradients_on_a_device_are_those_of_the_loop(disk_path):
    expected = gradients_of(loop)
    assert all(map(torch.equal, gradients_of(vertical), expected))
    with session_in(disk_path, host_memory="64MiB", device_memory="512KiB") as session:
        found = gradients_of(vertical)
        assert_moved(session, "flash", back=True)
    assert all(map(torch.equal, found, expected))
