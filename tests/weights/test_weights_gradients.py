"""Gradients of weights on flash are within the one limit of memory, where they wait for the step."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.core.units import MIB
from penstock.optim.offloaded_gradient import OffloadedGradient
from penstock.store.account import host_account
from weights_rig import Chain, bits, built, flash_adamw, inputs, loss_of

WIDTH = 512
"""Of a layer, whose weight is one MiB, as its gradient."""
DEPTH = 12
MEMORY = 18 * MIB
STEPS = 2


@pytest.fixture(autouse=True)
def nothing_is_held():
    """Not even by optimizers of other tests that were dropped."""
    gc.collect()


WAITS = [
    ({}, "before"),
    ({"clip_norm": 0.01}, "in the session"),
    ({"backwards": 2, "clip_norm": 0.01}, "before"),
    ({"backwards": 2, "overlap": True}, "in the session"),
    ({"overlap": True, "clip_norm": 0.01}, "before"),
]
"""Options of an optimizer with which gradients wait, and when it is made."""


def chain():
    return built(lambda: Chain(depth=DEPTH, width=WIDTH))


def optimizer_of(model, directory, *, backwards=1, overlap=False, **options):
    accumulation = backwards if overlap else 1
    return flash_adamw(
        model,
        directory,
        lr=1e-3,
        tile=1 << 16,
        host_memory="7MiB",
        overlap=overlap,
        accumulation=accumulation,
        **options,
    )


def trained(model, optimizer, backwards, seen=lambda: None):
    """Losses of some steps; ``seen`` is called as each gradient has come, and after each step."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen())
    losses = []
    for step in range(STEPS):
        for x in inputs(backwards, shape=(256, WIDTH), seed=step):
            loss = loss_of(model, x)
            loss.backward()
            losses.append(bits(loss))
        seen()
        optimizer.step()
        seen()
        optimizer.zero_grad()
    return losses


def held_bytes(model):
    """Bytes of gradients in memory."""
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return sum(each.nbytes for each in grads if not isinstance(each, OffloadedGradient))


def all_bytes(model):
    """What Penstock and gradients hold."""
    memory = host_account()
    charged = memory.used_by("gradients")
    return memory.used_bytes - charged + max(charged, held_bytes(model))


@pytest.mark.parametrize(("options", "made"), WAITS, ids=str)
def test_gradients_that_wait_are_within_the_memory_of_a_session(disk_path, options, made):
    backwards = options.get("backwards", 1)
    plain, model = chain(), chain()
    optimizer = optimizer_of(plain, disk_path, **options)
    expected = trained(plain, optimizer, backwards)
    optimizer.close()
    most = []
    if made == "before":
        optimizer = optimizer_of(model, disk_path, **options)
    settings = {"weights": "flash", "flash": str(disk_path), "floor": "64KiB"}
    with penstock.offload(model, memory=MEMORY, **settings):
        host_account().reset_peak()  # the bandwidth is measured in more
        if made != "before":
            optimizer = optimizer_of(model, disk_path, **options)
        found = trained(model, optimizer, backwards, lambda: most.append(all_bytes(model)))
        assert max(most) <= MEMORY
        assert host_account().peak_bytes <= MEMORY
    optimizer.close()
    assert found == expected
    assert all(map(torch.equal, map(bits, plain.parameters()), map(bits, model.parameters())))


@pytest.mark.parametrize(
    ("memory", "given", "is_charged"),
    [("128MiB", None, True), (MEMORY, "1GiB", False)],
    ids=["what is left", "the user's"],
)
def test_gradients_stay_in_what_is_left_or_what_the_user_gives(
    disk_path, memory, given, is_charged
):
    model, charged = chain(), []
    optimizer = optimizer_of(model, disk_path, gradient_memory=given)
    settings = {"weights": "flash", "flash": str(disk_path), "floor": "64KiB"}
    with penstock.offload(model, memory=memory, **settings):
        trained(model, optimizer, 1, lambda: charged.append(host_account().used_by("gradients")))
        assert optimizer._penstock.gradients.written == 0
        assert max(charged) == (DEPTH + 1) * MIB * is_charged  # and the one that is being made
        assert charged[-1] == max(charged)
        assert all(each.grad is None for each in model.parameters())
        assert host_account().used_by("gradients") == MIB * is_charged
    assert host_account().used_by("gradients") == 0
    optimizer.close()


class OfTwo:
    """A process group that says that it has another process."""

    def __init__(self, group):
        self._group = group

    def size(self):
        return 2

    def __getattr__(self, name):
        return getattr(self._group, name)


def test_a_model_that_becomes_replicated_has_no_memory_kept_for_its_gradients(disk_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = chain()
        optimizer = optimizer_of(model, disk_path)
        settings = {"weights": "flash", "flash": str(disk_path), "floor": "64KiB"}
        with penstock.offload(model, memory="128MiB", **settings):
            trained(model, optimizer, 1)
            assert host_account().used_by("gradients") == MIB  # the one that is being made
            parallel = DistributedDataParallel(model)
            parallel.process_group = OfTwo(parallel.process_group)
            trained(parallel, optimizer, 1)
            assert host_account().used_by("gradients") == 0
        optimizer.close()
        assert host_account().used_by("gradients") == 0
    finally:
        dist.destroy_process_group()
