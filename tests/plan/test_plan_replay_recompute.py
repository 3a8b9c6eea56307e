"""Replaying modules that are run again: when, for how long, with what on the device."""

from dataclasses import replace

import pytest
from plan_profiles import MACHINE, MB, MS, stack

from penstock.core.errors import PlanError
from penstock.plan import Action, Budgets, Decision, Operator, Plan
from penstock.plan.groups import groups_of, need_order
from penstock.plan.replay import replay

AMPLE = 10**12
PATHS = ("a.0", "a.1", "b.0", "b.1", "head")


def network(paths=PATHS, sizes=(10, 10, 10, 10, 1)):
    """Layers of 10 ms each way that save what they make, and their operators."""
    profile = stack(sizes)
    slots = tuple(
        replace(slot, key=replace(slot.key, module=path, ordinal=i), producer=path)
        for i, (slot, path) in enumerate(zip(profile.slots, paths, strict=True))
    )
    count = len(paths)
    there = [
        Operator("op", path, 0, False, 10 * i * MS, 10 * (i + 1) * MS)
        for i, path in enumerate(paths)
    ]
    back = [
        Operator("op", path, 0, True, 10 * (count + i) * MS, 10 * (count + i + 1) * MS)
        for i, path in enumerate(reversed(paths))
    ]
    return replace(profile, slots=slots, operators=(*there, *back))


def plan_of(profile, again, *, flash=(), device=AMPLE, recomputed=("a", "b")):
    def decision(i, key):
        if i in again:
            return Decision(key, Action.RECOMPUTE, "", "")
        if i in flash:
            return Decision(key, Action.OFFLOAD, "flash", "")
        return Decision(key, Action.KEEP, "", "")

    decisions = [decision(one.indices[0], one.key) for one in groups_of(profile)]
    budgets = Budgets(device, AMPLE, AMPLE)
    order = need_order(profile)
    return Plan("by hand", budgets, tuple(decisions), order, AMPLE, recomputed=recomputed)


def test_a_module_is_run_again_once_and_what_it_made_stays_until_it_was_used():
    profile = network()
    found = replay(profile, plan_of(profile, {0, 1, 2, 3}), MACHINE, trace=True)
    assert (found.recompute_ns, found.stall_ns) == (40 * MS, 0)
    assert found.step_ns == 140 * MS
    device = dict(found.trace.memory["device"])
    assert device[20 * MS] == 10 * MB  # the third is saved, the first two are dropped
    assert device[40 * MS] == 1 * MB
    assert device[60 * MS] == 20 * MB  # b is run again until 80, and its last is used at once
    assert device[90 * MS] == 10 * MB
    assert device[100 * MS] == 20 * MB
    assert device[140 * MS] == 0
    assert found.peak_bytes == 20 * MB


def test_what_is_dropped_is_there_until_the_forward_of_its_module_is_over():
    profile = network(sizes=(10, 30, 10, 10, 1))
    slots = tuple(replace(slot, needed_at_ns=None) for slot in profile.slots[:2])
    profile = replace(profile, slots=(*slots, *profile.slots[2:]))
    assert replay(profile, plan_of(profile, {0, 1}), MACHINE).peak_bytes == 40 * MB


def test_inputs_that_were_offloaded_are_read_first():
    profile = network()
    slots = list(profile.slots)
    slots[2] = replace(slots[2], producer="a.1")  # b.0 saves what a.1 has made
    profile = replace(profile, slots=tuple(slots))
    found = replay(profile, plan_of(profile, {3}, flash={2}), MACHINE)
    # head's need at 50 ms begins to read it; b is run again at 60, when it is there
    assert (found.stall_ns, found.recompute_ns) == (0, 20 * MS)
    slow = replace(MACHINE, flash_read_bytes_per_s=0.5e9)
    found = replay(profile, plan_of(profile, {3}, flash={2}), slow)
    assert (found.late_ns, found.step_ns) == (10 * MS, 130 * MS)


def test_an_input_that_another_module_saved_is_read_first_too():
    profile = network()
    # slot 1 was made and saved by a.1, and is first asked for by b.0's backward
    slots = list(profile.slots)
    slots[1] = replace(slots[1], needed_at_ns=75 * MS)
    profile = replace(profile, slots=tuple(slots))
    slow = replace(MACHINE, flash_read_bytes_per_s=0.5e9)
    found = replay(profile, plan_of(profile, {2, 3}, flash={1}), slow)
    # read from 50 to 70, and b is run again at 60
    assert (found.late_ns, found.recompute_ns) == (10 * MS, 20 * MS)


def test_running_again_waits_for_room():
    profile = network()
    slow = replace(MACHINE, flash_write_bytes_per_s=0.2e9)
    plan = plan_of(profile, {2, 3}, flash={0, 1}, device=29 * MB)
    found = replay(profile, plan, slow)
    # written from 0 to 50 and to 100 ms: the third save waits from 20 to 50, the fourth from 60. At 130,
    # b makes 20 MB: what was read ahead is dropped, the first of it at once, the rest when it is there
    assert found.budget_ns == (30 + 40 + 10) * MS
    assert found.flash.read_bytes == 40 * MB
    assert found.feasible


def test_all_calls_of_a_module_are_run_again_together():
    paths = ("m.0", "x", "m.0", "m.0", "head")
    profile = network(paths)
    found = replay(profile, plan_of(profile, {0, 2, 3}, recomputed=("m",)), MACHINE, trace=True)
    assert found.recompute_ns == 30 * MS
    device = dict(found.trace.memory["device"])
    assert device[10 * MS] == 10 * MB  # the first call is over when x saves
    assert device[60 * MS] == 40 * MB  # x's, and all three


def test_what_is_not_needed_is_not_made_again():
    profile = network()
    slots = tuple(replace(slot, needed_at_ns=None) for slot in profile.slots[:2])
    profile = replace(profile, slots=(*slots, *profile.slots[2:]))
    assert replay(profile, plan_of(profile, {0, 1}), MACHINE).recompute_ns == 0


def test_what_nobody_can_make_again_is_an_error():
    profile = network()
    with pytest.raises(PlanError, match=r"slot a\.0#0 .* none of 'recomputed', b, rec"):
        replay(profile, plan_of(profile, {0}, recomputed=("b",)), MACHINE)
    alien = replace(profile, slots=(replace(profile.slots[0], producer=None),))
    with pytest.raises(PlanError, match="made by None"):
        replay(alien, plan_of(alien, {0}), MACHINE)
    with pytest.raises(PlanError, match="and the profile has 0 operators"):
        replay(replace(profile, operators=()), plan_of(profile, {0}), MACHINE)
