"""Training whose modules are run again in backward is the same to the last bit as without Penstock.

Losses, gradients, weights and buffers of every step, dropout and batch statistics included; and in the
same run: that modules really were run again, that every slot still has the name the plan knows it by,
that the budget, where there is one, was kept, and that nothing is left behind.
"""

import re

import pytest
import torch

from offload_runs import assert_nothing_held, assert_within_budget, read_bytes, written_bytes
from penstock.core.units import MIB
from penstock.plan import Action, policies
from penstock.runtime.recompute import RECOMPUTED
from recompute_plans import (
    FLASH,
    HOST,
    assert_nothing_unknown,
    following,
    inside,
    profiled,
    recomputing,
    runs_again,
)
from test_bitwise import SIZES, batch_size_of, prepare, train, without_penstock

BLOCKS = {
    "resnet18": r"ResNet\.groups\.\d\.\d",
    "bert-base": r"Bert\.blocks\.\d+",
    "gpt2": r"GPT2\.blocks\.\d+",
    "densenet121": r"DenseNet\.features\.group\d\.\d",
    "vgg16": r"VGG\.(features|classifier)",
}
"""By family: paths of what is run again."""
STEPS = 3
BELOW_FLOOR_BYTES = MIB
"""More than what these networks save in storages below the floor of 8 KiB, at once."""


@pytest.fixture
def disk(disk_path, small_knobs, one_thread):
    return disk_path


def paths_of(family, profile):
    known = {path for slot in profile.slots for path in ancestors(slot.key.module)}
    paths = sorted(path for path in known if re.fullmatch(BLOCKS[family], path))
    assert not set(paths) & set(profile.unrepeatable)
    return paths


def ancestors(path):
    return [path, *ancestors(path.rpartition(".")[0])] if path else []


def plan_of(session_for, family, tier_of=lambda number: "", *, every=1, dtype=torch.float32):
    model, optimizer = prepare(family)
    batch = batch_size_of(family, dtype)
    run = lambda: train(model, optimizer, batch, steps=1, dtype=dtype)  # noqa: E731
    plan, profile = profiled(session_for, model, run, optimizer)
    return recomputing(plan, profile, *paths_of(family, profile)[::every], tier_of=tier_of)


def check(disk, family, plan, *, dtype=torch.float32, **settings):
    batch = batch_size_of(family, dtype)
    expected = without_penstock(family, steps=STEPS, dtype=dtype, batch=batch)
    model, optimizer = prepare(family)
    with following(disk, plan, model, optimizer, **settings) as session:
        found = train(model, optimizer, batch, steps=STEPS, dtype=dtype)
        found.assert_same_bits(expected)
        assert runs_again(session) == STEPS * len(plan.recomputed)
        assert session.summary().recomputed.count == STEPS * len(plan.recomputed)
        assert_nothing_unknown(session)
        del found
        assert_nothing_held(session)
        assert session.budget.used_by(RECOMPUTED) == 0
        return session


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_block_is_run_again(session_for, disk, family, dtype):
    plan = plan_of(session_for, family, dtype=dtype)
    session = check(disk, family, plan, dtype=dtype)
    largest = max(
        sum(
            decision.key.nbytes
            for decision in plan.decisions
            if decision.action is Action.RECOMPUTE and inside(decision.key.module, path)
        )
        for path in plan.recomputed
    )
    assert session.budget.peak_bytes <= plan.kept_bytes + largest + BELOW_FLOOR_BYTES


@pytest.mark.parametrize("family", ["resnet18", "gpt2"])
def test_recompute_flash_host_and_memory_together(session_for, disk, family):
    """Every other block is run again; of what is left a third each stays, goes to flash, and to host."""
    tiers = ("", FLASH, HOST)
    plan = plan_of(session_for, family, lambda number: tiers[number % 3], every=2)
    session = check(disk, family, plan)
    for tier in (FLASH, HOST):
        assert written_bytes(session, tier) > 0
        assert read_bytes(session, tier) > 0


def test_everything_that_is_not_made_again_is_on_flash_in_a_tight_budget(session_for, disk):
    plan = plan_of(session_for, "bert-base", lambda number: FLASH)
    session = check(disk, "bert-base", plan, device_memory=9 * MIB)
    assert_within_budget(session)


@pytest.mark.parametrize(("family", "mib"), [("bert-base", 8), ("resnet18", 8)])
def test_a_policy_runs_modules_again_by_itself(session_for, family, mib):
    """From what the first step has shown; the others are run by that plan, and none is made after it."""
    expected = without_penstock(family, steps=4, dtype=torch.float32)
    model, optimizer = prepare(family)
    with session_for(model, optimizer, policy="recompute", device_memory=mib * MIB) as session:
        found = train(model, optimizer, SIZES[family].batch, steps=4, dtype=torch.float32)
        found.assert_same_bits(expected)
        assert runs_again(session) == 3 * len(session.plan.recomputed) > 0
        assert session.planner.replans == 1
        assert_within_budget(session)
        del found
        assert_nothing_held(session)


def test_recompute_is_to_be_asked_for(session_for, monkeypatch):
    """By ``recompute``, by the policy's name, or by a plan: not by a policy that would like to."""
    monkeypatch.setitem(policies._POLICIES, "by itself", policies.get("recompute"))
    model, optimizer = prepare("bert-base")
    settings = {"policy": "by itself", "device_memory": 8 * MIB}
    with session_for(model, optimizer, **settings) as session:
        train(model, optimizer, SIZES["bert-base"].batch, steps=2, dtype=torch.float32)
        assert session.plan.recomputed == ()
        assert runs_again(session) == 0
        assert session.profile.operators
