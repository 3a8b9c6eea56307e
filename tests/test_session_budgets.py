"""What a session says of budgets: what one would cost, whether it is kept, the least that would do."""

import json

import pytest
import torch
from torch import nn

from penstock.core.errors import BudgetError
from penstock.core.units import MIB
from penstock.report.run_file import read_run
from penstock.store.account import host_account

pytestmark = pytest.mark.usefixtures("collected_account")


def network(layers=8):
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*blocks)


def train(net, steps=2, rows=1024):
    for _ in range(steps):
        net(torch.randn(rows, 256)).square().mean().backward()
        net.zero_grad()


def test_a_run_without_a_budget_is_told_what_budgets_would_cost_and_they_do(session_for):
    net = network()
    with session_for(net, policy="auto") as session:
        train(net)
        summary = session.summary()
        again = session.summary()
    suggestion = summary.suggestion
    assert suggestion.budgets is again.suggestion.budgets, "predicted once for each profile"
    sizes = [each.device_bytes for each in suggestion.budgets]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == suggestion.least_bytes
    assert sizes[0] < summary.saved_peak_bytes
    assert all(each.slowdown >= 1.0 for each in suggestion.budgets)
    text = str(summary)
    assert "Predicted cost of memory" in text
    assert "the process holds about" in text
    for each in suggestion.budgets:
        assert f"'{each.device_bytes // MIB}MiB'" in text
        assert f"{each.slowdown:.2f}x" in text
    document = json.loads(json.dumps(summary.to_json()))
    assert document["suggestion"]["least_bytes"] == suggestion.least_bytes
    assert len(document["suggestion"]["budgets"]) == len(sizes)
    for device_bytes in sizes:
        with session_for(net, policy="auto", device_memory=device_bytes) as session:
            train(net)
            assert session.budget.peak_bytes <= device_bytes
            assert session.summary().suggestion is None, "there is a budget"


def test_the_suggestion_is_in_the_event_log_too(session_for, disk_path):
    net, log = network(), disk_path / "events.jsonl"
    with session_for(net, policy="auto", event_log=str(log)) as session:
        train(net)
        suggestion = session.summary().suggestion
    assert read_run(log).summary.suggestion == suggestion is not None


def test_without_anywhere_to_spill_to_it_is_said_what_is_needed(session_for):
    net = network()
    with session_for(net, policy="auto", flash=(), flash_capacity=None) as session:
        train(net)
        summary = session.summary()
    assert summary.suggestion is None
    assert any("name a directory to offload to" in note for note in summary.notes)


def test_where_no_smaller_budget_would_do_it_is_said(session_for):
    """As in a loop of many small tensors, which stay where they are."""
    net = nn.Sequential(nn.Linear(1024, 256), *network())
    with session_for(net, policy="auto", floor="2MiB") as session:
        for _ in range(2):
            net(torch.randn(1024, 1024)).square().mean().backward()
        summary = session.summary()
    assert summary.suggestion.budgets == ()
    assert any("these passes need a device budget" in note for note in summary.notes)


def test_what_fits_has_nothing_to_gain_and_that_is_no_warning(session_for):
    net = network()
    with session_for(net, policy="auto", device_memory="1GiB") as session:
        train(net)
        summary = session.summary()
    assert any("has no benefit" in note for note in summary.notes)
    assert summary.warnings == ()
    assert "has no benefit" in str(summary)
    assert summary.ssd_written_bytes == 0


def test_a_run_that_kept_its_budget_is_not_called_infeasible(session_for):
    """A plan that keeps everything would exceed it; what it keeps is moved away all the same."""
    net = network()
    with session_for(net, policy="keep", device_memory="8MiB") as session:
        train(net)
        assert not session.plan.feasible
        assert session.budget.peak_bytes <= 8 * MIB
        summary = session.summary()
    assert "infeasible" not in str(summary)
    assert "give at least" not in str(summary)


def test_a_refusal_without_a_profile_says_that_more_may_be_needed(session_for):
    net = network()
    with (
        session_for(net, policy="auto", device_memory=MIB) as session,
        pytest.raises(
            BudgetError, match="more may be needed later in the step, of which there is no"
        ),
    ):
        train(net, 1)
    assert session.profile is None


def test_a_refusal_with_a_profile_names_what_does_for_the_whole_step(session_for):
    net = network()
    with session_for(net, policy="auto") as session:
        train(net)
        least = session.executor.orders.min_budget_bytes()
    limit = least - 64 * 1024
    with session_for(net, policy="auto", device_memory=limit) as session:
        train(net)
        room, finished = session.executor._eviction, session.executor._pass
        with pytest.raises(BudgetError, match="does for a whole step as profiled") as refused:
            room.take(limit + 1, "test", name="it", of_pass=finished, saved=None)
        assert refused.value.least_bytes == session.executor.orders.min_budget_bytes() > limit
        assert "more may be needed" not in str(refused.value)
        with pytest.raises(BudgetError, match="needs more than those profiled before") as refused:
            room.take(64 * MIB, "test", name="it", of_pass=finished, saved=None)
        assert refused.value.least_bytes >= 64 * MIB
    with session_for(net, policy="auto", device_memory=least) as session:
        train(net)
        assert session.budget.peak_bytes <= least


def test_what_a_session_holds_is_in_the_process_s_account_while_it_is_open(session_for):
    net, memory = network(), host_account()
    before = memory.used_bytes
    with session_for(net, policy="keep") as session:
        loss = net(torch.randn(1024, 256)).square().mean()
        held = memory.holdings()["saved tensors"].nbytes
        assert held == session.budget.used_bytes > 8 * MIB
        loss.backward()
    assert memory.used_bytes == before
    with session_for(net, flash=(), flash_capacity=None, host_memory="64MiB"):
        loss = net(torch.randn(1024, 256)).square().mean()
        assert memory.holdings()["host tier"].nbytes > 0
        loss.backward()
    assert memory.used_bytes == before


def test_a_limit_of_the_process_bounds_saved_tensors_too(session_for, monkeypatch):
    net, plain, memory = network(), network(), host_account()
    train(plain)
    monkeypatch.setattr(memory, "limit_bytes", memory.used_bytes + 9 * MIB)
    with session_for(net, policy="auto", device_memory="1GiB") as session:
        memory.reset_peak()
        train(net)
        assert session.recorder.snapshot().counted("evicted") > 0
        assert memory.peak_bytes <= memory.limit_bytes
    memory.force(9 * MIB, "others")
    with (
        session_for(other := network(), policy="auto", device_memory="1GiB"),
        pytest.raises(BudgetError, match=r"in the memory budget of .* \(others 9") as caught,
    ):
        train(other)
    memory.free(9 * MIB, "others")
    assert caught.value.limit_bytes == memory.limit_bytes
