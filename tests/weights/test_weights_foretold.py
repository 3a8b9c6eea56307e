"""What a step reads and writes of its weights is what ``penstock plan`` foretells, to the page."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.core.units import MIB
from penstock.lab.dry.profile import dry_step
from penstock.optim import FlashAdamW
from penstock.plan import Machine, policies
from penstock.plan.training_step import StepPlanner, forward_part
from penstock.plan.weights import forward_only, step_bytes
from weights_rig import Traffic, built, settle

WIDTH = 1024
DEPTH = 12
LIMITS = [24, 36, 48, 80]
"""Of memory for weights, in MiB. The layers have 4 MiB each, and embedding and head 8 MiB."""


class Net(nn.Module):
    """An embedding, layers in pairs, and a head that is twice as long as they are."""

    def __init__(self, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        self.words = nn.Embedding(2 * WIDTH, WIDTH)
        self.pairs = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False)
            )
            for _ in range(DEPTH // 2)
        )
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for pair in self.pairs:
            x = checkpoint(pair, x, use_reentrant=False) if self.recomputes else pair(x)
        return self.head(x)


def loss_of(model, ids):
    return model(ids).square().mean()


def foretold(model, ids, limit, *, infers=False):
    machine = Machine.preset("cpu")
    step = dry_step(model, loss_of, inputs=(ids,), machine=machine, whole_device=False)
    profile, weights = step.profile, step.weights
    if infers:
        profile, weights = forward_part(profile), forward_only(weights)
    planner = StepPlanner(
        profile, weights, machine, policy=policies.get("keep"), weights_bytes=limit
    )
    moved = step_bytes(weights, planner.plan(machine.device_bytes).choice)
    return moved.weights_read, moved.weights_written


def steps_of(kind, model, ids, directory):
    """Return a function that makes one step of this kind."""
    if kind == "infer":
        return lambda: model(ids)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    if kind in ("train", "recompute"):
        optimizer = FlashAdamW(
            trained, flash=directory, format="int8", overlap=True, gradient_memory="32MiB"
        )

    def step():
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CASES = [
    *(("cpu", "train", limit) for limit in LIMITS),
    *(("cpu", "recompute", limit) for limit in LIMITS[::2]),
    *(("cpu", kind, limit) for kind in ("frozen", "infer") for limit in LIMITS[1:3]),
    *(pytest.param("cuda", kind, LIMITS[1], marks=pytest.mark.gpu) for kind in ("train", "frozen")),
]


@pytest.mark.parametrize(("device", "kind", "limit"), CASES)
def test_bytes_of_weights_are_those_foretold(device, kind, limit, disk_path):
    model = built(lambda: Net(recomputes=kind == "recompute"))
    if kind == "frozen":
        model.requires_grad_(False)
        model.pairs[0].append(nn.Linear(WIDTH, 8))  # small, so it stays
        model.pairs[0].append(nn.Linear(8, WIDTH))
    ids = torch.arange(64).view(1, 64)
    expected = foretold(model, ids, limit * MIB, infers=kind == "infer")
    model, ids = model.to(device), ids.to(device)
    with (
        penstock.offload(
            model,
            weights="flash",
            weights_memory=limit * MIB,
            flash=disk_path,
            device_memory="1GiB",
            host_memory="128MiB",
        ) as session,
        torch.set_grad_enabled(kind != "infer"),
    ):
        step = steps_of(kind, model, ids, disk_path)
        for _ in range(4):  # two show the order
            step()
        settle(session._weights)
        traffic = Traffic(session._weights)
        found = []
        for _ in range(3):
            traffic.reset()
            step()
            settle(session._weights)
            found.append((traffic.read, traffic.written))
    assert found == [expected] * 3
    if limit == LIMITS[-1]:
        assert expected == (0, 0)
