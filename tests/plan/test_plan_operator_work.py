"""How much work planning is: counted. How long it takes, ``benchmarks/micro/planning.py`` says."""

import sys

import pytest
from plan_profiles import MACHINE, MS, encodable, network, stack

from penstock.plan import Budgets, CodecSample, policies, search
from penstock.plan.replay import replay
from penstock.plan.replay.lanes import READ, ReplayChannel, ReplayLane

AMPLE = 10**12
CODECS = (CodecSample("zero-value", 0.5, 8e9, 8e9), CodecSample("exponent", 0.25, 5e8, 1e9))
SLOTS = 500


def sizes(count):
    return [1 + i % 7 for i in range(count)]


PROBLEMS = {
    "hidden behind the network": lambda count: stack(sizes(count)),
    "longer than the network": lambda count: stack(sizes(count), step_ms=1),
    "encoded": lambda count: encodable(stack(sizes(count), step_ms=1), *CODECS),
    "with operators": lambda count: network(sizes(count), step_ms=1),
}


def plan_of(profile):
    budgets = Budgets(profile.saved_bytes // 10, profile.saved_bytes // 5, AMPLE)
    return policies.get("auto")(profile, MACHINE, budgets)


def calls_of(run):
    """How many functions are called, ours and built-in ones."""
    count = 0

    def counted(_frame, event, _):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("problem", PROBLEMS)
def test_twice_the_slots_are_twice_the_work(problem, monkeypatch):
    """Beside the search, whose work is limited."""
    monkeypatch.setattr(search, "WORK_SLOTS", 0)
    calls = []
    for count in (SLOTS, 2 * SLOTS):
        profile = PROBLEMS[problem](count)
        calls.append(calls_of(lambda profile=profile: plan_of(profile)))
    assert calls[1] < 2.3 * calls[0]


def test_of_ten_thousand_encodable_slots_no_more_than_work_are_replayed(monkeypatch):
    replayed = []

    def counted(profile, *rest):
        replayed.append(len(profile.slots))
        return replay(profile, *rest)

    monkeypatch.setattr(search, "replay", counted)
    plan = plan_of(PROBLEMS["encoded"](10_000))
    assert plan.feasible
    assert any(decision.codec for decision in plan.decisions)
    assert 0 < sum(replayed) <= search.WORK_SLOTS


def test_a_job_that_has_begun_does_not_go_first():
    done = [-1] * 4
    lane = ReplayLane((ReplayChannel(), [10 * MS] * 4), precedence=READ, done=done)
    for slot in range(3):
        lane.add(0, slot)
    lane.run(0)
    lane.go_first(0)  # it is under way
    lane.go_first(3)  # it was never added
    assert [slot for _, slot in lane.queue] == [1, 2]
    lane.go_first(2)
    lane.add_first(0, 3)
    assert [slot for _, slot in lane.queue] == [3, 2, 1]
    lane.run(50 * MS)
    assert [slot for _, slot in lane.log] == [0, 3, 2, 1]
