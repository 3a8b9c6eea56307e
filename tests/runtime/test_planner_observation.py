"""Which passes are observed: those that a plan is made from, also under a plan that recomputes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from offload_runs import assert_nothing_held, assert_within_budget
from penstock.core.units import KIB, MIB
from penstock.observe.events import Mark
from penstock.plan import Action, policies
from recompute_plans import Block, recomputing, runs_again

ROWS = 2048


@pytest.fixture
def by_hand(monkeypatch):
    """A policy that runs every block again that it may; it notes the profiles that it is given."""
    seen = []

    def policy(profile, machine, budgets):
        seen.append(profile)
        base = policies.get("keep")(profile, machine, budgets)
        paths = {
            slot.key.module.rpartition(".")[0]
            for slot in profile.slots
            if slot.producer is not None
        }
        fit = paths - set(profile.unrepeatable)
        paths = sorted(each for each in fit if each.rpartition(".")[2].isdigit())
        return recomputing(replace(base, notes=()), profile, *paths) if paths else base

    monkeypatch.setitem(policies._POLICIES, "by hand", policy)
    return seen


def blocks(depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


def reasons(session):
    marks = (each for each in session.recorder.events() if isinstance(each, Mark))
    return [mark.fields["reason"] for mark in marks if mark.name == "replan"]


def test_a_pass_that_recomputes_is_no_drift(session_for, by_hand):
    """It lacks what is not saved; the profile of the pass before knows it."""
    model = blocks()
    with session_for(model, policy="by hand", recompute=True) as session:
        for _ in range(5):
            model(torch.randn(ROWS, 64)).square().mean().backward()
        assert runs_again(session) == 4 * 3
        assert session.planner.replans == len(by_hand) == 1
        assert session.profile is by_hand[0]
        assert sum(d.action is Action.RECOMPUTE for d in session.plan.decisions) > 3
        assert {line.reason: line.count for line in session.summary().replans} == {"first": 1}
        assert_nothing_held(session)


def test_drift_under_recompute_is_observed_before_it_is_planned(session_for, by_hand):
    """Three times the rows: new slots. One pass is run without recompute, and is planned from."""
    model = blocks()
    with session_for(model, policy="by hand", recompute=True) as session:
        counts = []
        for rows in (ROWS, ROWS, 3 * ROWS, 3 * ROWS, 3 * ROWS):
            model(torch.randn(rows, 64)).square().mean().backward()
            counts.append(runs_again(session))
        assert counts == [0, 3, 6, 6, 9]
        assert reasons(session) == ["first", "drift"]
        (_, drifted) = by_hand
        sizes = {slot.key.nbytes for slot in drifted.slots if slot.pass_index == 4}
        assert {each.pass_index for each in drifted.operators} >= {4}
        assert max(sizes) == 3 * ROWS * 128 * 4
        assert_nothing_held(session)


def test_two_kinds_of_passes_are_both_observed(session_for, by_hand):
    """As of a network and its adversary, in turn; the second is found to be unknown under recompute."""
    one, other = blocks(2), blocks(2)
    with session_for(policy="by hand", recompute=True) as session:
        for _ in range(5):
            for model in (one, other):
                model(torch.randn(ROWS, 64)).square().mean().backward()
        passes = {each.index for each in session.profile.passes}
        assert {each.pass_index for each in session.profile.operators} == passes
        assert len(passes) == 2
        found = set(session.plan.recomputed)
        assert found == {f"{root}.{n}" for root in ("Sequential", "Sequential-2") for n in (0, 1)}
        before = runs_again(session)
        for model in (one, other):
            model(torch.randn(ROWS, 64)).square().mean().backward()
        assert runs_again(session) == before + 4
        assert_nothing_held(session)


def test_a_policy_that_ignores_what_cannot_be_run_again_is_not_followed(session_for, monkeypatch):
    class Changing(Block):
        def forward(self, features):
            return super().forward(features.add_(1))

    def careless(profile, machine, budgets):
        base = policies.get("keep")(profile, machine, budgets)
        if not any(slot.producer for slot in profile.slots):
            return base
        return recomputing(base, profile, "Sequential.1")

    monkeypatch.setitem(policies._POLICIES, "careless", careless)
    model = nn.Sequential(nn.Linear(64, 64), Changing(), nn.Linear(64, 64))
    with session_for(model, policy="careless", recompute=True) as session:
        for _ in range(2):
            model(torch.randn(ROWS, 64)).square().mean().backward()
        assert "Sequential.1" in session.profile.unrepeatable
        assert session.plan.recomputed == ()
        assert any("nothing is run again" in note for note in session.summary().warnings)


def test_a_plan_that_may_exceed_the_budget_runs_nothing_again(session_for):
    """``recompute`` knows no tier: in a third of what one block makes it would fail in backward."""
    model = blocks(4)
    settings = {"policy": "recompute", "device_memory": 2 * MIB + 512 * KIB}
    with session_for(model, **settings) as session:
        for _ in range(3):
            model(torch.randn(ROWS, 64)).square().mean().backward()
        assert session.plan.recomputed == ()
        assert runs_again(session) == 0
        assert_within_budget(session)
