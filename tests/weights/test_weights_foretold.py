"""A step moves the bytes of weights and gradients that ``penstock plan`` foretells, to the page."""

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
from penstock.plan.weights import IN_BACKWARD, IN_STEP, forward_only
from weights_rig import TierTraffic, Traffic, built, settle

WIDTH = 1024
DEPTH = 12
AMPLE = 1 << 50
LIMITS = [24, 36, 48, 80]
"""Of memory for weights, in MiB. The layers have 4 MiB each, and embedding and head 8 MiB."""


class Net(nn.Module):
    """An embedding, layers in pairs, and a head that is twice as long as they are."""

    def __init__(self, depth=DEPTH, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        self.words = nn.Embedding(2 * WIDTH, WIDTH)
        self.pairs = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False)
            )
            for _ in range(depth // 2)
        )
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for pair in self.pairs:
            x = checkpoint(pair, x, use_reentrant=False) if self.recomputes else pair(x)
        return self.head(x)


def loss_of(model, ids):
    return model(ids).square().mean()


GRADIENTS = {"step": None, "spill": 20 * MIB}
"""Memory of gradients that wait for an update in ``step()``; None: all of it."""


def foretold(model, ids, limit, kind):
    machine = Machine.preset("cpu")
    step = dry_step(model, loss_of, inputs=(ids,), machine=machine, whole_device=False)
    profile, weights = step.profile, step.weights
    if kind == "infer":
        profile, weights = forward_part(profile), forward_only(weights)
    planner = StepPlanner(
        profile,
        weights,
        machine,
        policy=policies.get("keep"),
        weights_bytes=limit,
        update=IN_STEP if kind in GRADIENTS else IN_BACKWARD,
        gradient_memory=GRADIENTS.get(kind) or AMPLE,
    )
    moved = planner.plan(AMPLE).replayed.moved
    return moved.weights_read, moved.weights_written, moved.gradients


def steps_of(kind, model, ids, directory):
    """Return a function that makes one step of this kind, and the optimizer."""
    if kind == "infer":
        return (lambda: model(ids)), None
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    if kind in ("train", "recompute"):
        optimizer = FlashAdamW(
            trained, flash=directory, format="int8", overlap=True, gradient_memory="32MiB"
        )
    elif kind in GRADIENTS:
        optimizer = FlashAdamW(
            trained, flash=directory, format="int8", gradient_memory=GRADIENTS[kind]
        )

    def step():
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def gradient_tier(optimizer):
    """Return the tier that gradients have waited on; None: none have."""
    states = getattr(optimizer, "_penstock", None)
    gradients = None if states is None else states.gradients
    return None if gradients is None else gradients._spill._tier


CASES = [
    ("cpu", "step", LIMITS[0]),
    ("cpu", "spill", LIMITS[1]),
    *(("cpu", "train", limit) for limit in LIMITS),
    *(("cpu", "recompute", limit) for limit in LIMITS[::2]),
    *(("cpu", kind, limit) for kind in ("frozen", "infer") for limit in LIMITS[1:3]),
    *(pytest.param("cuda", kind, LIMITS[1], marks=pytest.mark.gpu) for kind in ("train", "frozen")),
]


@pytest.mark.parametrize(("device", "kind", "limit"), CASES)
def test_bytes_of_weights_and_gradients_are_those_foretold(device, kind, limit, disk_path):
    depth = DEPTH // 2 if kind in GRADIENTS else DEPTH
    model = built(lambda: Net(depth, recomputes=kind == "recompute"))
    if kind == "frozen":
        model.requires_grad_(False)
        model.pairs[0].append(nn.Linear(WIDTH, 8))  # small, so it stays
        model.pairs[0].append(nn.Linear(8, WIDTH))
    ids = torch.arange(64).view(1, 64)
    expected = foretold(model, ids, limit * MIB, kind)
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
        step, optimizer = steps_of(kind, model, ids, disk_path)
        for _ in range(4):  # two show the order
            step()
        settle(session._weights)
        traffic, found = Traffic(session._weights), []
        tier = gradient_tier(optimizer)
        gradients = None if tier is None else TierTraffic(tier)
        for _ in range(3):
            traffic.reset()
            step()
            settle(session._weights)
            found.append((traffic.read, traffic.written, 0))
            if gradients is not None:
                assert gradients.read == gradients.written
                found[-1] = (traffic.read, traffic.written, gradients.read)
                gradients.reset()
    assert found == [expected] * 3
    assert (expected[2] > 0) == (kind == "spill")
    if limit == LIMITS[-1]:
        assert expected == (0, 0, 0)
