"""How short a step can be: no replay is shorter than what the bounds say."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_choices import any_choice, every_choice, real_machines, small_problem
from plan_profiles import MB, machines, network, networks, profiles, stack

from penstock.lab.step_bound import min_step_ns
from penstock.plan import Budgets, Machine
from penstock.plan.assembly import draft
from penstock.plan.choice_bound import min_step_ns as least_under
from penstock.plan.problem import PlanningProblem
from penstock.plan.replay import replay
from tries import tries

AMPLE = 10**12


@settings(max_examples=tries(150), deadline=None)
@given(
    networks() | profiles(),
    real_machines() | machines(),
    st.floats(0.1, 1.1),
    st.sampled_from([0.0, 0.0, 0.3, 0.6, 2.0]),
    st.randoms(use_true_random=False),
)
def test_no_replay_of_a_choice_is_shorter_than_its_bound_nor_than_that_of_all(
    profile, machine, share, staging, rng
):
    device_bytes = int(share * profile.peak_saved_bytes)
    staging_bytes = int(staging * max(4096, profile.saved_bytes))
    budgets = Budgets(device_bytes, AMPLE, AMPLE, staging_bytes)
    case = PlanningProblem(profile, machine, budgets)
    least_ns = min_step_ns(profile, machine, budgets)
    for _ in range(4):
        choice = any_choice(case, rng)
        found = replay(profile, draft(case, choice), machine)
        if case.fits(choice) and found.feasible:
            assert found.step_ns >= least_under(case, choice)
            assert found.step_ns >= least_ns


def test_no_choice_at_all_is_shorter_than_the_bound():
    rng = random.Random(7)
    for _ in range(8):
        profile, machine, budgets = small_problem(rng, most=4)
        case = PlanningProblem(profile, machine, budgets)
        least_ns = min_step_ns(profile, machine, budgets)
        for choice in every_choice(case):
            if case.fits(choice):
                found = replay(profile, draft(case, choice), machine)
                assert not found.feasible or found.step_ns >= least_ns


def test_what_must_pass_a_channel_takes_as_long_as_that():
    profile = stack(
        [10] * 10, step_ms=1
    )  # 100 MB saved in 10 ms, and nothing can be computed again
    machine = Machine("slow", 1e8, 1e8, 0.0, 1e8, 1e8, flash_over_link=True)
    budgets = Budgets(40 * MB, AMPLE, AMPLE)
    # 60 MB must be written by the last save, after 9 ms, and be read again by the last need, after 19
    waits_ms = (600 - 9) + (600 - 10)
    assert min_step_ns(profile, machine, budgets) == pytest.approx((20 + waits_ms) * 1e6, rel=1e-6)
    all_kept = Budgets(100 * MB, AMPLE, AMPLE)
    assert min_step_ns(profile, machine, all_kept) == 20_000_000


def test_what_staging_memory_holds_passes_only_the_link():
    profile = stack([10] * 10, step_ms=1)
    machine = Machine("slow", 1e8, 1e8, 0.0, 1e9, 1e9)
    budgets = Budgets(40 * MB, 0, AMPLE, staging_bytes=20 * MB)
    # of 60 MB 20 may be in staging memory at the end of forward; the link takes 60 ms for all of them
    waits_ms = (400 - 9) + (400 - 10)
    assert min_step_ns(profile, machine, budgets) == pytest.approx((20 + waits_ms) * 1e6, rel=1e-6)
    roomy = replace(budgets, staging_bytes=60 * MB)
    waits_ms = (60 - 9) + (60 - 10)
    assert min_step_ns(profile, machine, roomy) == pytest.approx((20 + waits_ms) * 1e6, rel=1e-6)


def test_what_can_be_computed_again_bounds_less():
    profile = network([10] * 12, step_ms=1, width=3)
    slow = Machine("slow", 1e8, 1e8, 0.0, 1e8, 1e8)
    budgets = Budgets(60 * MB, AMPLE, AMPLE)
    again_ns = min_step_ns(profile, slow, budgets)
    moved_ns = min_step_ns(replace(profile, operators=()), slow, budgets)
    assert 36_000_000 < again_ns < 60_000_000 < moved_ns


def test_the_bound_of_a_choice_is_near_its_replay():
    profile = network([10] * 40, step_ms=5, width=4)
    for host, flash in ((1e9, 4e8), (4e8, 1e9), (3e8, 3e8)):
        machine = Machine("any", flash, flash, 0.0, host, host)
        case = PlanningProblem(profile, machine, Budgets(120 * MB, AMPLE, AMPLE))
        for tier in ("host", "flash"):
            choice = case.offload(dict.fromkeys(range(32), tier))
            step_ns = replay(profile, draft(case, choice), machine).step_ns
            assert 0.85 * step_ns < least_under(case, choice) <= step_ns
