"""A session that only records: every pass in full, and the passes of a step by their kind."""

import itertools

import torch
from torch import nn

from penstock.core.config import OffloadConfig
from penstock.runtime.recording import RecordedPasses, RecordingPlanner
from penstock.session import Session


def recorded(*models, rows=256):
    config = OffloadConfig(policy="keep", codec="none", floor=1)
    with Session(config, make_planner=RecordingPlanner) as session:
        for model in models:
            model(torch.randn(rows, 64)).square().sum().backward()
        assert session.plan is None
        return tuple(session.planner.records)


def test_every_pass_is_recorded_with_its_operators_and_counted_by_kind():
    one = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    other = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64), nn.Sigmoid())
    records = recorded(one, other, one, one)
    assert [record.observed for record in records] == [True] * 4
    assert all(record.operators and record.slots for record in records)
    passes = RecordedPasses(records, device="cpu")
    profile = passes.kinds
    assert sorted(passes.counts) == [1, 3]
    assert len(profile.passes) == 2
    names = {slot.key.module.split(".")[0] for slot in profile.slots}
    assert names == {"Sequential", "Sequential-2", ""}  # the last is the loss
    whole = passes.step(9)
    assert len(whole.passes) == 4
    took = [one.end_ns - one.start_ns for one in whole.passes]
    assert took[0] == took[2] == took[3] == records[3].end_ns - records[3].start_ns
    assert all(one.end_ns <= two.start_ns for one, two in itertools.pairwise(whole.passes))
    starts = [one.start_ns for one in whole.operators]
    assert starts == sorted(starts)
    assert starts[0] == 0
    begin_ns, end_ns = whole.axis_ns
    assert (begin_ns, end_ns) == (0, max(whole.passes[-1].end_ns, whole.operators[-1].end_ns))
    assert len(passes.step(2).passes) == 2
    assert whole.saved_bytes == sum(slot.key.nbytes for r in records for slot in r.slots)
    assert {each.pass_index for each in whole.operators} == {1, 2, 3, 4}
