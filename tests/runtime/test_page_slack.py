"""Restored storages take whole pages: a session plans with less than its budget, for those not full."""

import pytest
import torch

from penstock.core.units import GIB, MIB
from penstock.runtime.movers import page_slack_bytes


@pytest.mark.parametrize(("budget", "slack"), [(8 * MIB, MIB), (64 * MIB, 4 * MIB), (GIB, 4 * MIB)])
def test_a_session_plans_with_two_pages_less_than_its_budget(session_for, budget, slack):
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    with session_for(net, policy="auto", device_memory=budget) as session:
        net(torch.randn(64, 256)).sum().backward()
        assert session.plan.budgets.device_bytes == budget - slack
        assert session.budget.limit_bytes == budget


@pytest.mark.parametrize(("budget", "slack"), [(2 * MIB, MIB // 4), (64 * MIB, MIB // 2)])
def test_from_the_heap_they_take_less(session_for, monkeypatch, budget, slack):
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", "heap")
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    with session_for(net, policy="auto", device_memory=budget) as session:
        net(torch.randn(64, 256)).sum().backward()
        assert session.plan.budgets.device_bytes == budget - slack


def test_a_plan_that_was_given_is_followed_as_it_is(session_for, tmp_path):
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    with session_for(net, policy="auto", device_memory=8 * MIB) as session:
        net(torch.randn(64, 256)).sum().backward()
        plan = session.plan
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    with session_for(net, policy=str(path), device_memory=plan.budgets.device_bytes) as session:
        net(torch.randn(64, 256)).sum().backward()
        assert session.plan == plan
        assert not session.summary().warnings
        assert session.summary().prediction is None  # no step has ended
        session.step()
        net(torch.randn(64, 256)).sum().backward()
        session.step()
        assert session.summary().prediction.steps == 1


def test_without_a_budget_nothing_is_left():
    assert page_slack_bytes(0) == 0


def test_where_only_the_whole_budget_will_do_all_of_it_is_planned_with(session_for):
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    inputs = torch.randn(512, 512)  # maps of 1 MiB
    plans = []
    for budget in (MIB + MIB // 16, 16 * MIB):
        with session_for(net, policy="all", device_memory=budget) as session:
            net(inputs).square().sum().backward()
            plans.append(session.plan)
    whole, less = plans
    assert whole.budgets.device_bytes == MIB + MIB // 16
    assert less.budgets.device_bytes == 14 * MIB
