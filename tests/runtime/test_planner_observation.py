"""Observed passes in sessions that recompute; the rules are in ``test_planner``."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from offload_runs import assert_nothing_held, assert_within_budget
from penstock.core.units import KIB, MIB
from penstock.observe.events import Mark
from penstock.plan import policies
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
