"""A model that is spread over two devices: each has its own account, profile and plan.

The devices are told apart by the type of the elements: what is float64 is on the second one.
"""

import json

import pytest
import torch
from cuda_training import HOST
from torch import nn

from offload_runs import Trace, session_in
from penstock.core.units import MIB
from penstock.observe.events import Mark
from penstock.plan import Action
from penstock.runtime.cuda.outbound import Outbound
from penstock.runtime.devices import Devices
from penstock.runtime.table import SAVED

SECOND = torch.device("cuda", 1)
ROWS, WIDTH, LAYERS = 128, 1024, 6
"""On the first device a layer saves half a MiB, on the second a whole one."""
WORK_NS = 20_000_000


@pytest.fixture
def two(link, monkeypatch):
    """The link of two devices; what the second part saves goes and comes back on the second."""
    of, write = Devices.of, Outbound.write

    def write_there(self, storage, tier, label, after):
        ticket = write(self, storage, tier, label, after)
        if ".second" in label:
            ticket.device = SECOND
        return ticket

    monkeypatch.setattr(Outbound, "write", write_there)
    monkeypatch.setattr(
        Devices,
        "of",
        lambda self, tensor: (
            self._of(SECOND) if tensor.dtype == torch.float64 else of(self, tensor)
        ),
    )
    return link


class Spread(nn.Module):
    """Its layers need some time of the devices, in forward and in backward."""

    def __init__(self, link):
        super().__init__()
        self.first = nn.Sequential(*(nn.Tanh() for _ in range(LAYERS)))
        self.second = nn.Sequential(*(nn.Sigmoid() for _ in range(LAYERS)))

        def work(module, args, result):
            link.work(WORK_NS)
            result.register_hook(lambda gradient: link.work(WORK_NS))

        for layer in (*self.first, *self.second):
            layer.register_forward_hook(work)

    def forward(self, x):
        return self.second(self.first(x).double()).square().mean()


def trained(link, session_of=None, steps=4):
    torch.manual_seed(0)
    model, trace = Spread(link), Trace()
    session = None if session_of is None else session_of(model).__enter__()
    try:
        for step in range(steps):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            loss = model(x)
            loss.backward()
            trace.note(f"step {step}, loss", loss)
            trace.note(f"step {step}, gradient", x.grad)
            if session is not None:
                session.step()
        return trace, session
    finally:
        if session is not None:
            session.close()


def session_on(path, **settings):
    return lambda model: session_in(path, model, **({"host_memory": HOST} | settings))


@pytest.mark.parametrize("policy", ["auto", "all"])
def test_each_device_keeps_to_its_own_budget_and_bits_are_the_same(two, disk_path, policy):
    settings = {"policy": policy, "device_memory": "3MiB"}
    found, session = trained(two, session_on(disk_path, **settings))
    found.assert_same_bits(trained(two)[0])
    first, second = session.devices.all.values()
    assert first is session.executor
    for executor in (first, second):
        assert executor.budget.limit_bytes == 3 * MIB
        assert MIB < executor.budget.peak_bytes <= 3 * MIB
        assert executor.budget.used_by(SAVED) == 0


def test_what_fits_on_one_device_stays_however_full_the_other_is(two, disk_path):
    """3 MiB on the first, 6 on the second, of 4 each: together they would fit, or neither would."""
    _, session = trained(two, session_on(disk_path, policy="auto", device_memory="4MiB"))
    first, second = (executor.orders.plan for executor in session.devices.all.values())
    assert {decision.action for decision in first.decisions} == {Action.KEEP}
    assert second.offloaded_bytes >= 2 * MIB
    assert {d.key.module.split(".")[1] for d in first.decisions} == {"first"}
    assert {d.key.module.split(".")[1] for d in second.decisions} <= {"second", ""}


def test_profiles_are_on_one_axis(two, disk_path):
    """The second device's part begins when the first one's is done, and the other way round."""
    _, session = trained(two, session_on(disk_path, policy="keep"))
    first, second = (planner.profile for planner in session.devices.planners.values())
    assert max(slot.saved_at_ns for slot in first.slots) <= second.passes[0].start_ns
    needed = [slot.needed_at_ns for slot in second.slots]
    assert max(needed) <= min(slot.needed_at_ns for slot in first.slots)
    assert first.passes[0].end_ns == second.passes[0].end_ns


def test_a_device_that_appears_later_is_profiled_then(two, disk_path):
    torch.manual_seed(0)
    model = Spread(two)
    with session_in(
        disk_path, model, host_memory=HOST, policy="auto", device_memory="4MiB"
    ) as session:
        for step in range(5):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            (model.first(x).square().mean() if step < 2 else model(x)).backward()
            session.step()
        assert len(session.devices.all) == 2
        second = session.devices.all[SECOND]
        assert second.orders.plan is not None
        assert session.devices.planners[SECOND].profile.passes[0].index == 2, (
            "the first one was not observed"
        )
        took = [
            each.took_ns
            for each in session.devices.planners[SECOND].profile.operators
            if not each.backward
        ]
        assert set(took) == {WORK_NS}
        assert not session.devices.observing


def test_the_summary_has_a_line_for_each_device(two, disk_path):
    _, session = trained(two, session_on(disk_path, policy="auto", device_memory="4MiB"))
    summary = session.summary()
    lines = {line.memory: line for line in summary.memory}
    assert lines["device"].budget_bytes == lines["device cuda:1"].budget_bytes == 4 * MIB
    assert lines["device cuda:1"].peak_bytes == session.devices.all[SECOND].budget.peak_bytes
    assert summary.saved_peak_bytes == sum(
        planner.profile.peak_saved_bytes for planner in session.devices.planners.values()
    )
    assert sum(place.tensors for place in summary.places) == sum(
        len(executor.orders.plan.decisions) for executor in session.devices.all.values()
    )
    text = str(summary)
    assert "device cpu" in text
    assert "device cuda:1" in text
    assert json.loads(json.dumps(summary.to_json()))["memory"][0]["memory"] == "device"


def test_plans_of_all_devices_can_be_had_by_device(two, disk_path):
    _, session = trained(two, session_on(disk_path, policy="auto", device_memory="4MiB"))
    assert list(session.plans) == ["cpu", "cuda:1"]
    assert session.plans["cpu"] is session.plan
    assert session.plans["cuda:1"] is session.devices.all[SECOND].orders.plan
    plans = [each for each in session.recorder.events() if isinstance(each, Mark)]
    assert {mark.fields["device"] for mark in plans if mark.name == "replan"} == {"cpu", "cuda:1"}


def test_with_one_device_nothing_is_said_of_devices(link, disk_path):
    torch.manual_seed(0)
    model = Spread(link).first
    with session_in(disk_path, model, host_memory=HOST, policy="keep") as session:
        model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean().backward()
        lines = [line.memory for line in session.summary().memory]
        assert [name for name in lines if name.startswith("device")] == ["device"]
        assert " device cpu " not in str(session.summary()).split("\n\n", 1)[1]
