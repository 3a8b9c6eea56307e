"""What is resident: counted over all steps at once as it is step by step, and nothing stays for ever."""

from collections import deque
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_choices import any_choice
from plan_profiles import MACHINE, MB, network, networks, profiles
from plan_walk import Returned

from penstock.plan import Budgets
from penstock.plan.problem import PlanningProblem
from penstock.plan.profile import Event
from penstock.plan.residency import OFFLOADED, ResidencyModel, Residents, residency
from tries import tries


def step_by_step(profile, mask, segments):
    """The same, and what is back when the step is over."""
    sizes = [slot.key.nbytes for slot in profile.slots]
    back, kept, most_used = Returned(sizes, mask, segments), 0, 0
    hard, worst, most_kept = profile.small_bytes, -1, profile.small_bytes
    small = Residents(profile, mask, segments).small_bytes.tolist()
    drops = deque(sorted(drop for one in segments for drop in one.drops))
    for place, (_, event, i) in enumerate(profile.steps):
        while drops and drops[0][0] <= place:
            kept -= sizes[drops.popleft()[1]]
        if event is Event.FREE:
            kept -= 0 if mask[i] else sizes[i]
            back.free(i)
            continue
        if event is Event.USE:
            back.use(i)
            most_used = max(most_used, back.read if mask[i] else 0)
            most_kept = max(most_kept, kept + back.made + small[place])
        saved = sizes[i] if event is Event.SAVE else 0
        if kept + back.read + back.made + saved + small[place] > hard:
            hard, worst = kept + back.read + back.made + saved + small[place], i
        kept += 0 if mask[i] == OFFLOADED else saved
    return ResidencyModel(hard, worst, most_kept, most_used), back.read + back.made


def in_any_order(profile, rng):
    """With the same needs of other slots, so that what is an input may be freed before it is wanted."""
    needs = [slot.needed_at_ns for slot in profile.slots]
    rng.shuffle(needs)
    pairs = zip(profile.slots, needs, strict=True)
    return replace(profile, slots=tuple(replace(slot, needed_at_ns=need) for slot, need in pairs))


@settings(max_examples=tries(100))
@given(networks(), st.randoms(use_true_random=False), st.booleans())
def test_all_at_once_is_as_step_by_step(profile, rng, shuffled):
    check(in_any_order(profile, rng) if shuffled else profile, rng)


@settings(max_examples=tries(60))
@given(profiles(), st.randoms(use_true_random=False))
def test_so_it_is_of_any_profile(profile, rng):
    check(profile, rng)


def check(profile, rng):
    case = PlanningProblem(profile, MACHINE, Budgets(0))
    choice = any_choice(case, rng)
    mask, segments = case.mask(choice), case.segments(choice)
    found, left = step_by_step(profile, mask, segments)
    assert residency(profile, mask, segments) == found
    assert left == 0


def test_outputs_that_count_as_inputs_do_not_pile_up():
    # as in-place ones: the next block is the first to ask for them, and frees them before the rerun
    profile = network([10] * 16, width=4)
    slots = [
        replace(
            slot, key=replace(slot.key, module=f"block.{i // 4 - 1}.3", ordinal=1), producer="block"
        )
        if i and i % 4 == 0
        else slot
        for i, slot in enumerate(profile.slots)
    ]
    case = PlanningProblem(replace(profile, slots=tuple(slots)), MACHINE, Budgets(0))
    every = [f"block.{b}" for b in range(4)]
    assert set(every) <= set(case.recomputing.modules)
    choice = case.offloaded(case.movable, every)
    assert case.residency(choice).hard_bytes <= 60 * MB
