"""What a session says of itself: summary, plan, profile, steps, timeline, trace, log."""

import json
import signal
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

import penstock
from offload_runs import assert_within_budget, wait_for_writes
from penstock.core.errors import ClosedError, ConfigError
from penstock.core.units import KIB
from penstock.observe import Level, Mark, Span, Stage, read_events
from penstock.report.trace import write_trace

TINY = 1536
"""Floats of a storage below the floor."""


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(10)]
    return torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())])


def train(net, steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        net(torch.randn(8, 3, 64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_limit_that_varies_is_no_budget_that_was_exceeded(session_for):
    """Of one limit for all memory saved tensors have what others leave, which is less in the end."""
    net = network()
    with session_for(net, memory="4GiB") as session:
        train(net, 2)
        session.budget.limit_bytes = 1 << 20
        (line,) = [each for each in session.summary().memory if each.memory == "device"]
    assert line.peak_bytes > 1 << 20
    assert line.budget_bytes is None
    with session_for(net, memory="4GiB", device_memory="8MiB") as session:
        train(net, 2)
        (line,) = [each for each in session.summary().memory if each.memory == "device"]
    assert line.budget_bytes == 8 << 20


def test_the_summary_adds_up(session_for):
    net = network()
    with session_for(net, device_memory="8MiB", policy="auto", tbw="1TB") as session:
        train(net, 4)
        wait_for_writes(session)
        summary = session.summary()
        assert_within_budget(session)
    assert summary.steps == 4
    memory = {line.memory: line for line in summary.memory}
    assert memory["device"].peak_bytes == session.budget.peak_bytes <= 8 << 20
    assert memory["device"].budget_bytes == 8 << 20
    assert 0 < memory["device"].average_bytes < memory["device"].peak_bytes
    # what it held at most is what it could not keep, at least
    assert memory["flash"].peak_bytes >= summary.saved_peak_bytes - (8 << 20)
    flows = {line.stage: line for line in summary.flows}
    assert flows["write"].nbytes == summary.ssd_written_bytes > 0
    assert flows["read"].nbytes > 0
    assert summary.tbw_share == summary.ssd_written_bytes / 1e12
    assert summary.steps_to_wear_out == 4 * 10**12 // summary.ssd_written_bytes
    planned = {line.action: line for line in summary.places}
    assert planned["offload"].nbytes == session.plan.offloaded_bytes
    json.dumps(summary.to_json())
    text = str(summary)
    assert "tail of forward" in text


def test_it_can_be_inspected_at_any_moment(session_for):
    """A frozen value: what is held, what moves, how full tiers are, and what is planned."""
    weight = torch.randn(16 * KIB, requires_grad=True)
    session = session_for()
    with pytest.raises(ClosedError, match="inspect: the session has not been opened"):
        session.inspect()
    with session:
        before = session.inspect()
        assert before.steps == before.device.pass_index == 0
        assert before.device.slots == ()
        assert before.device.orders.plan is None
        loss = (weight * 2).sin().sum() + (weight[:TINY] * 3).pow(2).sum()
        wait_for_writes(session)
        state = session.inspect()
        (slot,) = state.device.slots
        assert (slot.state, slot.tier, slot.codec) == ("spilled", "flash", "")
        assert (slot.key.nbytes, slot.handles, slot.pending, slot.pass_index) == (64 * KIB, 1, 1, 1)
        assert state.device.small_count == 1
        assert state.device.small_bytes == TINY * 4
        assert state.device.writes == state.device.reads == state.device.writing_bytes == 0
        assert state.device.used_bytes == sum(state.device.holdings.values())
        flash = state.tiers["flash"]
        assert 64 * KIB <= flash.held_bytes <= flash.taken_bytes <= flash.capacity_bytes
        loss.backward()
        assert session.inspect().device.orders.plan is session.plan is not None
        del loss
        assert session.inspect().tiers["flash"].held_bytes == 0
        assert state.tiers["flash"].held_bytes > 0, "it is of the moment when it was made"
        with pytest.raises(FrozenInstanceError):
            state.steps = 1
        with pytest.raises(TypeError):
            state.tiers["flash"] = flash
    assert not before.suspended
    assert set(state.devices) == {"cpu"}


def test_plan_and_profile_come_with_the_first_backward(session_for):
    net = network()
    with session_for(net, device_memory="8MiB", policy="auto") as session:
        out = net(torch.randn(8, 3, 64, 64)).square().mean()
        assert session.plan is None
        assert session.profile is None
        out.backward()
        plan, profile = session.plan, session.profile
        assert plan.feasible
        assert [d.key.module for d in plan.decisions if d.action == "offload"]
        train(net, 3)
        decided = [
            [(d.key, d.action, d.tier) for d in one.decisions] for one in (session.plan, plan)
        ]
        assert decided[0] == decided[1], "nothing has changed, so no slot goes elsewhere"
        assert session.profile is profile
        assert session.planner.replans == 1


def test_without_an_optimizer_of_torch_steps_are_told(session_for):
    net = network()
    with session_for(net) as session:
        for _ in range(3):
            net(torch.randn(2, 3, 32, 32)).square().mean().backward()
            session.step()
        assert session.summary().steps == 3
        assert len(session.recorder.steps()) == 3


def test_paused_saves_as_if_there_were_no_session(session_for):
    net = network()
    with session_for(net) as session:
        with session.paused():
            loss = net(torch.randn(2, 3, 32, 32)).square().mean()
        assert session.budget.used_bytes == 0
        loss.backward()


def test_log_and_trace_tell_the_same_story(session_for, tmp_path):
    net = network()
    log = tmp_path / "events.jsonl"
    with session_for(net, device_memory="8MiB", policy="auto", event_log=log) as session:
        train(net, 3)
        wait_for_writes(session)
        write_trace(session.recorder, tmp_path / "trace.json")
        kept = session.recorder.events()
    logged = read_events(log)
    spans = [event for event in logged if isinstance(event, Span)]
    assert {Stage.WRITE, Stage.READ, Stage.STEP, Stage.PLAN, Stage.PACK} <= {s.stage for s in spans}
    assert {event.memory for event in logged if isinstance(event, Level)} == {"device", "flash"}
    assert [event.name for event in logged if isinstance(event, Mark)].count("replan") == 1
    assert len(logged) >= len(kept)
    trace = json.loads((tmp_path / "trace.json").read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    writes = [
        event for event in complete if event["args"].get("nbytes") and event["cat"] == "write"
    ]
    assert len(writes) == sum(e.stage == Stage.WRITE for e in kept if isinstance(e, Span))


def test_rss_is_sampled_when_asked(session_for):
    net = network()
    with session_for(net, sample_rss=True) as session:
        train(net, 2)
        memory = {line.memory: line for line in session.summary().memory}
    assert memory["rss"].peak_bytes > 50 << 20


def test_what_is_no_model_or_optimizer_is_refused():
    with pytest.raises(ConfigError, match="model is a str, but must be of type Module"):
        penstock.offload("model")
    with pytest.raises(ConfigError, match="optimizer is a list, but must be of type Optimizer"):
        penstock.offload(None, [])


class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # as if Ctrl-C had waited for this line


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_that_a_finalizer_swallows_comes_at_the_end_of_the_step(session_for):
    hook = sys.unraisablehook
    net = torch.nn.Conv2d(3, 8, 3)
    with session_for(net, policy="keep"):
        Finalized()
        with pytest.raises(KeyboardInterrupt):
            train(net, 1)
        train(net, 1)  # once
    assert sys.unraisablehook is hook
