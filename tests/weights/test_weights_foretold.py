"""What a step reads and writes is what plans of it foretell, to the page."""

import gc
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.core.units import MIB
from penstock.hooks.module_weights import session_weights
from penstock.lab.dry.profile import dry_step
from penstock.optim import FlashAdamW
from penstock.optim.overlap import Overlap
from penstock.plan import Machine, policies
from penstock.plan.micro_batches import accumulated, micro_batched
from penstock.plan.step_profile import forward_part
from penstock.plan.training_step import StepPlanner
from penstock.plan.weight_stays import weight_stays
from penstock.plan.weights import IN_STEP, forward_only, step_bytes
from weights_rig import (
    PATIENCE_S,
    WEIGHT_BYTES,
    Chain,
    TierTraffic,
    Traffic,
    built,
    flash_adamw,
    inputs,
    on_flash,
    settle,
    train_step,
)

AMPLE = 1 << 50
WIDTH = 1024
DEPTH = 12
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


def foretold(model, ids, limit, *, infers=False, batched=None, **settings):
    """Return the bytes that a step moves; ``batched`` makes one of two micro-batches."""
    machine = Machine.preset("cpu")
    step = dry_step(model, loss_of, inputs=(ids,), machine=machine, whole_device=False)
    profile, weights = step.profile, step.weights
    if infers:
        profile, weights = forward_part(profile), forward_only(weights)
    if batched is not None:
        profile, weights = batched(profile, weights, 2)
    planner = StepPlanner(
        profile, weights, machine, policy=policies.get("keep"), weights_bytes=limit, **settings
    )
    return planner.plan(AMPLE).replayed.moved


@contextmanager
def trained_on_flash(model, limit, directory):
    with penstock.offload(
        model,
        weights="flash",
        weights_memory=limit * MIB,
        flash=directory,
        device_memory="1GiB",
        host_memory="128MiB",
    ) as session:
        yield session


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
    moved = foretold(model, ids, limit * MIB, infers=kind == "infer")
    expected = moved.weights_read, moved.weights_written
    model, ids = model.to(device), ids.to(device)
    with (
        trained_on_flash(model, limit, disk_path) as session,
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


WAITING = {"gradient_memory": 12 * MIB}
"""Memory of gradients that wait: the first ones fit, which are the head's, and one layer's."""
IN_MEMORY = {"gradient_memory": AMPLE}
OVERLAP = {"overlap": True, "accumulation": 2}
STEPS = {
    "in memory": ({"update": IN_STEP, **IN_MEMORY}, {}),
    "on flash": ({"update": IN_STEP, **WAITING}, WAITING),
    "clip_norm": ({"update": IN_STEP, **WAITING}, {**WAITING, "clip_norm": 1.0}),
    "clip_grad_norm_": ({"update": IN_STEP, "clips": True, **WAITING}, WAITING),
    "accumulated": ({"update": IN_STEP, "batched": accumulated, **WAITING}, WAITING),
    "overlap": ({"batched": accumulated, **WAITING}, {**OVERLAP, **WAITING}),
    "micro_batched": ({"batched": micro_batched, **IN_MEMORY}, OVERLAP),
}
"""By how a step is made: how it is planned, and the settings of its optimizer."""


def backward(model, ids, how):
    if how == "micro_batched":
        blocks = [model.words, *model.pairs, model.head, lambda x: x.square().mean()]
        sum(penstock.micro_batched(blocks, torch.cat([ids, ids]), parts=2)).backward()
        return
    for _ in range(2 if how in {"accumulated", "overlap"} else 1):
        loss_of(model, ids).backward()
        land(model)
    if how == "clip_grad_norm_":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        land(model)


def land(model):
    """Wait until gradients are on flash: one that is still in memory is not read from there."""
    places = [getattr(each.grad, "place", None) for each in model.parameters()]
    late = time.monotonic() + PATIENCE_S
    while any(each is not None and each.tickets and each.real is not None for each in places):
        assert time.monotonic() < late
        time.sleep(0.001)


@pytest.mark.parametrize("how", STEPS)
def test_bytes_of_gradients_that_wait_are_those_foretold(how, disk_path):
    model, ids = built(lambda: Net(DEPTH // 2)), torch.arange(64).view(1, 64)
    settings, options = STEPS[how]
    expected = foretold(model, ids, LIMITS[0] * MIB, **settings)
    with trained_on_flash(model, LIMITS[0], disk_path) as session:
        optimizer = FlashAdamW(model.parameters(), flash=disk_path, format="int8", **options)

        def step():
            backward(model, ids, how)
            optimizer.step()
            optimizer.zero_grad()
            settle(session._weights)

        for _ in range(3):  # two show the order
            step()
        gradients = optimizer._penstock.gradients
        tier = None if gradients is None else gradients._spill._tier
        counts = [Traffic(session._weights), *([] if tier is None else [TierTraffic(tier)])]
        step()
        found = [nbytes for each in counts for nbytes in (each.read, each.written)]
        optimizer.close()
    assert found[:2] == [expected.weights_read, expected.weights_written]
    assert (found[2:] or [0, 0]) == [expected.gradients_read, expected.gradients_written]
    assert (expected.gradients_read > 0) == ("gradient_memory" in options)


TILE = 1 << 16
PAGE_BYTES = 4096
TENSOR = 1 << 19
OF_CLASSES = [
    ({"overlap": True}, {"weights_memory": "6MiB", "device_memory": "6MiB"}),
    ({"overlap": True}, {"weights_memory": "9MiB", "device_memory": "9MiB"}),
    ({"threads": 1, "gradient_memory": "1GiB"}, {"memory": "48MiB"}),
]


@pytest.mark.parametrize(("updates", "limits"), OF_CLASSES, ids=str)
def test_bytes_of_each_class_are_those_of_the_plan_of_a_session(updates, limits, disk_path):
    gc.collect()  # optimizers of other tests
    model = built(lambda: Chain(depth=12, width=512))
    [x] = inputs(1, shape=(256, 512))
    optimizer = flash_adamw(model, disk_path, tile=TILE, squeeze=False, **updates)
    settings = {"weights": "flash", "flash": disk_path, "floor": "64KiB", "codec": "none"}
    with penstock.offload(model, **settings, **limits) as session:
        found = []
        for _ in range(8):
            before = moved_bytes(session)
            train_step(model, optimizer, x)
            land_all(session, optimizer)
            found.append(
                {
                    k: [a - b for a, b in zip(v, before[k], strict=True)]
                    for k, v in moved_bytes(session).items()
                }
            )
        expected = session_step(session) | {
            "optimizer": 2 * [optimizer.wear().state_bytes_per_step]
        }
    optimizer.close()
    found = found[-3:]  # limits and orders are as they stay
    assert [each["weights"] for each in found] == 3 * [expected["weights"]]
    records, saved = expected["optimizer"], expected["flash"]
    # two threads update tiles with overlap, and each may be ahead of the other
    assert all(
        abs(a - b) <= 2 * 8 * TILE * ("overlap" in updates)
        for each in found
        for a, b in zip(each["optimizer"], records, strict=True)
    )
    # what is needed before it is written, or freed, is not read
    assert all(read <= written for read, written in (each["flash"] for each in found))
    pages = saved[0] // TENSOR * PAGE_BYTES
    assert 0 <= max(written for _, written in (each["flash"] for each in found)) - saved[0] <= pages


def moved_bytes(session):
    """Bytes read and written so far, by class."""
    found = {each: [0, 0] for each in ("weights", "optimizer", "flash")}
    for flow in session.summary().to_json()["flows"]:
        if flow["tier"] in found and flow["stage"] in ("read", "write"):
            found[flow["tier"]][flow["stage"] == "write"] += flow["nbytes"]
    return found


def land_all(session, optimizer):
    """Wait until nothing moves, and nothing can be read ahead."""
    settle(session._weights)
    pipeline = optimizer._penstock.pipeline
    with pipeline._wake:
        pipeline._wake.wait_for(lambda: not any(each.is_moving for each in pipeline._buffers))


def session_step(session):
    """Bytes of weights and saved tensors read and written in a step, as a session plans it."""
    profile = session.profile
    weights = session_weights(session.modules, session.optimizers, profile.operators)
    limit = min(session._weights.account.limit_bytes, session._weights.total_bytes)
    planner = StepPlanner(
        profile, weights, session.machine, policy=policies.get("keep"), weights_bytes=limit
    )
    choice = planner.plan(1 << 40).choice
    moved = step_bytes(weights, replace(choice, cached=frozenset()))
    saved = session.plan.offloaded_bytes
    return {
        "weights": [moved.weights_read, moved.weights_written],
        "flash": [saved, saved],
    }


@pytest.mark.parametrize("room", [2, 10])
def test_updates_that_take_long_move_what_is_foretold_of_few_equal_weights(
    room, disk_path, monkeypatch
):
    """Backward waits for an update rather than that its weight takes the place of one that stays."""
    update = Overlap._update

    def slow(*args):
        time.sleep(0.002)
        update(*args)

    monkeypatch.setattr(Overlap, "_update", slow)
    depth, limit = 16, room * WEIGHT_BYTES
    order = [*range(depth), *reversed(range(depth))]
    expected = weight_stays(order, [WEIGHT_BYTES] * depth, [True] * depth, limit)
    model = built(lambda: Chain(depth))
    with on_flash(model, disk_path, limit=limit) as session:
        optimizer = flash_adamw(model, disk_path, overlap=True, tile=WEIGHT_BYTES // 4)
        traffic, found = Traffic(session._weights), []
        for x in inputs(7):
            traffic.reset()
            train_step(model, optimizer, x)
            settle(session._weights)
            found.append((traffic.read, traffic.written))
        optimizer.close()
    assert found[4:] == [(expected.read_bytes, expected.written_bytes)] * 3
