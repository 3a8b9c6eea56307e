"""Notes of a policy that cannot keep a budget."""

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import COMPUTE, MACHINE, MB, network, networks, stack

from penstock.plan import Budgets, policies
from penstock.plan.min_budget import min_budget
from tries import tries

AMPLE = 10**12


def test_an_infeasible_plan_tells_the_least_that_would_do_and_what_binds():
    profile = stack([10, 10, 30, 10, 5], small_bytes=MB)
    plan = policies.get("ranked")(profile, MACHINE, Budgets(20 * MB, 0, AMPLE))
    assert plan.notes[0] == (
        "infeasible: kept and used slots reach 29.56 MiB (31000000 bytes) at slot layer.2#0"
        " (28.61 MiB), the device budget is 19.07 MiB (20000000 bytes); give at least 31000000 bytes;"
        " resident then: layer.2#0 (28.61 MiB), 976.56 KiB outside of slots"
    )
    assert policies.get("ranked")(profile, MACHINE, Budgets(31 * MB, 0, AMPLE)).feasible


def test_of_many_slots_that_bind_the_largest_are_named():
    plan = policies.get("keep")(stack([10, 30, 5, 20, 1]), MACHINE, Budgets(20 * MB))
    assert plan.notes[0].endswith(
        "resident then: layer.1#0 (28.61 MiB), layer.3#0 (19.07 MiB), layer.0#0 (9.54 MiB),"
        " 2 more slots (5.72 MiB)"
    )


def test_what_a_module_makes_again_binds_as_well():
    plan = policies.get("recompute")(network([10, 40, 10, 40], width=2), MACHINE, Budgets(20 * MB))
    named = plan.notes[0].partition("resident then: ")[2]
    assert named == "block.1.1#0 (38.15 MiB), block.0.0#0 (9.54 MiB), block.1.0#0 (9.54 MiB)"


@settings(max_examples=tries(40), deadline=None)
@given(networks(max_layers=8), st.sampled_from(policies.names()), st.sampled_from([0, AMPLE]))
def test_the_least_budget_does_and_is_what_the_note_says(profile, name, host):
    policy = policies.get(name)
    budgets = Budgets(0, host, AMPLE)
    least = min_budget(profile, MACHINE, budgets, policy)
    assert policy(profile, MACHINE, Budgets(least, host, AMPLE)).feasible
    short = policy(profile, MACHINE, Budgets(least - 1, host, AMPLE))
    if not short.feasible:
        (said,) = re.findall(r"give at least (\d+) bytes", " ".join(short.notes))
        assert int(said) == least


@settings(max_examples=tries(40), deadline=None)
@given(networks(max_layers=8), st.floats(0.05, 0.9))
def test_the_least_that_recompute_names_does_with_convolutions_too(profile, share):
    machine = replace(MACHINE, compute=COMPUTE)
    policy = policies.get("recompute")
    plan = policy(profile, machine, Budgets(int(share * profile.peak_saved_bytes)))
    if not plan.feasible:
        (said,) = re.findall(r"give at least (\d+) bytes", " ".join(plan.notes))
        assert policy(profile, machine, Budgets(int(said))).feasible


def test_a_network_that_saves_nothing_needs_nothing():
    assert min_budget(stack([]), MACHINE, Budgets(0), policies.get("auto")) == 0
