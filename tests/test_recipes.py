"""Storages that are made again from what is saved anyway leave every bit of training as it was.

And in the same run: that they were made again, by the recipes that the profile found; that the budget
was kept, and nothing is left behind.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from offload_runs import assert_nothing_held, assert_within_budget, read_bytes, written_bytes
from penstock.core.errors import HookError, InPlaceError
from penstock.core.units import MIB
from penstock.plan import Action, Decision
from penstock.plan.groups import groups_of
from penstock.plan.recipes import recipe_name
from penstock.plan.recompute import RecomputeChoices
from penstock.runtime import digests
from penstock.runtime.movers import CpuMover
from penstock.runtime.recompute import RECOMPUTED
from recompute_plans import FLASH, HOST, assert_nothing_unknown, following, profiled, runs_again
from test_bitwise import SIZES, batch_size_of, prepare, train, without_penstock

STEPS = 3


@pytest.fixture
def disk(disk_path, small_knobs, one_thread):
    return disk_path


def by_recipes(plan, profile, tier_of=lambda number: "", only=""):
    """``plan``, with every recipe of the profile that goes with the others; and the tiers of the rest.

    Or with ``only`` one recipe.
    """
    recomputing = RecomputeChoices.of(profile)
    chosen = [recomputing.modules[only]] if only else recomputing.recipes()
    maker = {g: one.path for one in chosen for g in one.groups}
    decisions, number = [], 0
    for g, group in enumerate(groups_of(profile)):
        if g in maker:
            decisions.append(Decision(group.key, Action.RECOMPUTE, "", "test", recipe=maker[g]))
            continue
        tier = tier_of(number)
        number += 1
        action = Action.OFFLOAD if tier else Action.KEEP
        decisions.append(Decision(group.key, action, tier, "as the test says"))
    return replace(
        plan,
        policy="by hand",
        decisions=tuple(decisions),
        recomputed=tuple(maker.values()),
        window_bytes=sum(d.key.nbytes for d in decisions if d.tier),
    )


def plan_of(session_for, family, tier_of=lambda number: "", dtype=torch.float32):
    model, optimizer = prepare(family)
    batch = batch_size_of(family, dtype)
    run = lambda: train(model, optimizer, batch, steps=1, dtype=dtype)  # noqa: E731
    plan, profile = profiled(session_for, model, run, optimizer)
    return by_recipes(plan, profile, tier_of)


def check(disk, family, plan, *, dtype=torch.float32, **settings):
    batch = batch_size_of(family, dtype)
    expected = without_penstock(family, steps=STEPS, dtype=dtype, batch=batch)
    model, optimizer = prepare(family)
    with following(disk, plan, model, optimizer, **settings) as session:
        found = train(model, optimizer, batch, steps=STEPS, dtype=dtype)
        found.assert_same_bits(expected)
        assert runs_again(session) == STEPS * len(plan.recomputed) > 0
        assert_nothing_unknown(session)
        del found
        assert_nothing_held(session)
        assert session.budget.used_by(RECOMPUTED) == 0
        return session


@pytest.mark.parametrize("family", ["resnet18", "vgg16", "gpt2", "bert-base", "densenet121"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_modules_give_is_made_again(session_for, disk, family, dtype):
    plan = plan_of(session_for, family, dtype=dtype)
    session = check(disk, family, plan, dtype=dtype)
    dropped = plan.recomputed_bytes
    largest = max(d.key.nbytes for d in plan.decisions if d.action is Action.RECOMPUTE)
    assert session.budget.peak_bytes <= plan.kept_bytes + dropped // 2 + 2 * largest + MIB


@pytest.mark.parametrize("family", ["resnet18", "gpt2"])
def test_from_what_is_in_memory_on_flash_and_in_host_memory(session_for, disk, family):
    tiers = ("", FLASH, HOST)
    plan = plan_of(session_for, family, lambda number: tiers[number % 3])
    session = check(disk, family, plan)
    for tier in (FLASH, HOST):
        assert written_bytes(session, tier) > 0
        assert read_bytes(session, tier) > 0


def test_the_mover_is_told_of_what_is_made_again(session_for, disk, monkeypatch):
    """So that on CUDA other streams wait for it, as they do for what is copied back."""
    made = []
    monkeypatch.setattr(CpuMover, "made", lambda mover, storage: made.append(storage.nbytes()))
    plan = plan_of(session_for, "gpt2")
    session = check(disk, "gpt2", plan)
    assert len(made) == runs_again(session)


def test_in_a_tight_budget(session_for, disk):
    plan = plan_of(session_for, "vgg16", lambda number: FLASH)
    session = check(disk, "vgg16", plan, device_memory=8 * MIB)
    assert_within_budget(session)


def test_the_policy_does_it_by_itself(session_for):
    expected = without_penstock("vgg16", steps=4, dtype=torch.float32)
    model, optimizer = prepare("vgg16")
    with session_for(model, optimizer, policy="recompute", device_memory=9 * MIB) as session:
        found = train(model, optimizer, SIZES["vgg16"].batch, steps=4, dtype=torch.float32)
        found.assert_same_bits(expected)
        assert any("->" in path for path in session.plan.recomputed)
        assert runs_again(session) == 3 * len(session.plan.recomputed)
        assert_within_budget(session)


# -- one module after the other ------------------------------------------------------------------------

WIDTH = 64


class Layers(nn.Module):
    """``first`` and ``second`` behind a linear layer, between linear layers that save what they get."""

    def __init__(self, *between):
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Sequential(*between)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        return self.out(self.between(self.into(features)))


def found_in(session_for, model, rows=64):
    """(plan, profile, the recipes that end within ``between``)."""
    features = torch.randn(rows, WIDTH)
    run = lambda: model(features).square().mean().backward()  # noqa: E731
    plan, profile = profiled(session_for, model, run)
    recipes = {slot.recipe for slot in profile.slots if slot.recipe}
    return plan, profile, [recipe_name(one) for one in recipes if "between" in one[-1]]


@pytest.mark.parametrize(
    ("between", "recipe"),
    [
        ([nn.GELU()], "Layers.between.0->"),
        ([nn.LayerNorm(WIDTH)], "Layers.between.0->"),
        ([nn.Tanh()], None),  # it saves what it makes, and nobody what it is given
        ([nn.ReLU()], None),
        ([nn.ReLU(inplace=True)], "Layers.into->Layers.between.0->"),
        ([nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)], "Layers.between.0->Layers.between.1->"),
        ([nn.GELU(), nn.Dropout(0.5)], None),  # a dropout is drawn anew
        ([nn.Dropout(0.5)], None),
        ([type("MyGELU", (nn.GELU,), {})()], None),  # a subclass may do anything
    ],
    ids=str,
)
def test_recipes_of_one_layer(session_for, disk, between, recipe):
    torch.manual_seed(0)
    model = Layers(*between)
    assert found_in(session_for, model)[2] == ([recipe] if recipe else [])


def followed(session_for, disk, model, steps, *, rows=64):
    plan, profile, (recipe,) = found_in(session_for, model, rows)
    with following(disk, by_recipes(plan, profile, only=recipe), model) as session:
        steps(torch.randn(rows, WIDTH))
        return session


def test_a_graph_that_is_walked_twice(session_for, disk):
    torch.manual_seed(0)
    model = Layers(nn.GELU())
    grads = []

    def steps(features):
        loss = model(features).square().mean()
        grads.extend(
            torch.autograd.grad(loss, model.parameters(), retain_graph=retain)
            for retain in (True, False)
        )

    session = followed(session_for, disk, model, steps)
    assert runs_again(session) == 2
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_a_hook_on_the_module_ends_its_recipe(session_for):
    model = Layers(nn.GELU())
    model.between[0].register_forward_hook(lambda *_: None)
    assert found_in(session_for, model)[2] == []


def test_whoever_changes_what_was_made_ends_its_recipe(session_for):
    class Adding(Layers):
        def forward(self, features):
            normed = self.between[0](self.into(features))
            normed += 1
            return self.out(normed)

    assert found_in(session_for, Adding(nn.LayerNorm(WIDTH)))[2] == []


def test_batch_statistics_see_each_batch_once(session_for, disk):
    torch.manual_seed(0)
    model = Layers(nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))

    def steps(features):
        model.between[0].reset_running_stats()
        model(features).square().mean().backward()
        assert model.between[0].num_batches_tracked == 1

    assert runs_again(followed(session_for, disk, model, steps)) == 1


def test_a_parameter_that_was_changed_before_backward_is_named(session_for, disk):
    model = Layers(nn.LayerNorm(WIDTH))

    def steps(features):
        loss = model(features).square().mean()
        with torch.no_grad():
            model.between[0].bias.add_(1)  # autograd itself does not need it
        with pytest.raises(InPlaceError, match=r"cannot recompute .*between\.0 .*\(64,\)"):
            loss.backward()

    followed(session_for, disk, model, steps)


def test_other_parameters_than_in_forward_are_refused(session_for, disk):
    model = Layers(nn.LayerNorm(WIDTH))
    others = {name: each.detach().clone() + 1 for name, each in model.named_parameters()}
    others = {name: each.requires_grad_() for name, each in others.items()}

    def steps(features):
        loss = torch.func.functional_call(model, others, features).square().mean()
        with pytest.raises(HookError, match=r"between\.0 .* has other parameters"):
            loss.backward()

    followed(session_for, disk, model, steps)


def test_a_setting_that_was_changed_before_backward_is_named(session_for, disk):
    model = Layers(nn.GELU())

    def steps(features):
        loss = model(features).square().mean()
        model.between[0].approximate = "tanh"
        with pytest.raises(InPlaceError, match=r"settings are .*'tanh'"):
            loss.backward()

    followed(session_for, disk, model, steps)


@pytest.mark.parametrize("behind", [False, True], ids=["by the host", "by the device"])
def test_other_bits_are_found_the_first_time(session_for, disk, monkeypatch, behind):
    monkeypatch.setattr(digests, "is_behind", lambda device: behind)
    model = Layers(nn.GELU())

    def steps(features):
        loss = model(features).square().mean()
        monkeypatch.setattr(nn.GELU, "forward", lambda self, given: nn.functional.relu(given))
        with pytest.raises(HookError, match=r"between\.0 computes something else"):
            loss.backward()

    followed(session_for, disk, model, steps)


def test_an_exception_in_the_module_leaves_nothing(session_for, disk):
    model = Layers(nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))

    def steps(features):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(features[:1])
        model(features).square().mean().backward()

    session = followed(session_for, disk, model, steps)
    assert runs_again(session) == 1
    assert_nothing_held(session)


def test_evaluation_and_paused_steps_are_left_alone(session_for, disk):
    model = Layers(nn.GELU())

    def steps(features):
        model.eval()
        model(features).square().mean().backward()
        model.train()
        with torch.no_grad():
            model(features)

    assert runs_again(followed(session_for, disk, model, steps)) == 0
