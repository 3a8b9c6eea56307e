"""Recipes in plans: what they are called, what goes together, what they cost and free."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_choices import any_choice, go_together
from plan_profiles import MACHINE, MB, MS, network, networks

from penstock.core.errors import PlanError
from penstock.plan import Action, Budgets, Plan, Profile, SlotKey, policies
from penstock.plan.assembly import draft
from penstock.plan.plan import Decision
from penstock.plan.problem import PlanningProblem
from penstock.plan.recipes import recipe_calls, recipe_members, recipe_name
from penstock.plan.replay import replay
from tries import tries

AMPLE = 10**12
paths = st.lists(st.sampled_from(["a.0", "a.1", "b", "net.relu"]), min_size=1, max_size=3)


@given(paths, st.integers(1, 12))
def test_a_name_tells_its_modules(members, number):
    name = recipe_name(members, number)
    assert recipe_members(name) == tuple(members)
    assert recipe_name(members, number) != recipe_name(members, number + 1)
    assert recipe_members(members[0]) == ()


def test_the_calls_are_those_before_the_save_each_before_the_next():
    calls = {("norm", 0): [(0, 2), (10, 12), (20, 22)], ("relu", 0): [(2, 3), (12, 14), (22, 23)]}
    assert recipe_calls(("norm", "relu"), 0, 13, calls) == [(10, 12), (12, 14)]
    assert recipe_calls(("norm", "relu"), 0, 15, calls) == [(10, 12), (12, 14)]
    assert recipe_calls(("relu", "norm"), 0, 11, calls) == [(2, 3), (10, 12)]
    assert recipe_calls(("relu", "norm"), 0, 1, calls) == []
    assert recipe_calls(("norm",), 1, 13, calls) == []


def test_a_recipe_frees_its_slot_for_the_time_of_its_calls():
    """Slot 1 is dropped when it is saved, and made again, from slot 0, before the need of its layer."""
    profile = network([10, 30, 10], recipes=[1])
    case = PlanningProblem(profile, MACHINE, Budgets(AMPLE, AMPLE, AMPLE))
    assert list(case.recomputing.modules)[-1] == "block.0.0->"
    choice = case.offload({}, ["block.0.0->"])
    found = replay(profile, draft(case, choice), MACHINE, trace=True)
    assert found.recompute_ns == 10 * MS
    assert found.step_ns == 100 * MS
    device = dict(found.trace.memory["device"])
    assert device[20 * MS] == 20 * MB  # it is gone, the third is saved
    assert found.peak_bytes == 40 * MB == case.residency(choice).hard_bytes
    keep = replay(profile, draft(case, case.offload({})), MACHINE)
    assert keep.peak_bytes == 50 * MB


def test_what_it_is_made_from_is_read_first():
    profile = network([10, 30, 10], recipes=[1])
    slow = replace(MACHINE, flash_read_bytes_per_s=0.2e9)  # 10 MB in 50 ms
    case = PlanningProblem(profile, slow, Budgets(AMPLE, 0, AMPLE))
    choice = case.offload({0: "flash"}, ["block.0.0->"])
    plan = draft(case, choice)
    assert [key.module for key in plan.need_order] == ["block.1.0", "block.0.0", "block.0.1"]
    found = replay(profile, plan, slow)
    # asked for at 30 ms, when backward begins; needed at 50 to make slot 1, and there at 80
    assert (found.late_ns, found.recompute_ns) == (30 * MS, 10 * MS)


def test_neighbours_in_a_chain_are_not_made_from_each_other():
    profile = network([10] * 6, width=6, recipes=range(6))
    recomputing = PlanningProblem(profile, MACHINE, Budgets(AMPLE)).recomputing
    chosen = recomputing.recipes()
    makes, reads = ({g for one in chosen for g in getattr(one, of)} for of in ("groups", "reads"))
    assert (len(makes), makes & reads) == (3, set())


@settings(max_examples=tries(200))
@given(networks(), st.randoms(use_true_random=False))
def test_together_says_what_the_note_says(profile, rng):
    case = PlanningProblem(profile, MACHINE, Budgets(AMPLE, AMPLE, AMPLE))
    modules = case.recomputing.modules
    taken = any_choice(case, rng).recomputed
    together = case.recomputing.conflict_set(taken)
    for path, module in modules.items():
        if path in taken:
            continue
        conflicts = {other for other in taken if not go_together(module, modules[other])}
        assert together.conflicts_with(module) == conflicts


@settings(max_examples=tries(100))
@given(networks(), st.floats(0.1, 1.0))
def test_recipes_never_make_a_plan_worse(profile, share):
    device = int(share * profile.peak_saved_bytes)
    bare = replace(
        profile, slots=tuple(replace(slot, recipe=(), source=None) for slot in profile.slots)
    )
    for budgets in (Budgets(device), Budgets(device, AMPLE, AMPLE)):
        plan, without = (
            policies.get("recompute")(one, MACHINE, budgets) for one in (profile, bare)
        )
        assert plan.feasible or not without.feasible
        if without.feasible:
            mine, other = replay(profile, plan, MACHINE), replay(bare, without, MACHINE)
            assert mine.recompute_ns <= other.recompute_ns


def test_a_plan_goes_to_json_and_back():
    profile = network([10, 30, 10], recipes=[1])
    assert Profile.from_json(profile.to_json()) == profile
    plan = policies.get("recompute")(profile, MACHINE, Budgets(40 * MB))
    assert plan.recomputed == ("block.0.0->",)
    assert [one.recipe for one in plan.decisions] == ["", "block.0.0->", ""]
    assert Plan.from_json(plan.to_json()) == plan
    assert "recomputed by block.0.0->; 28.61 MiB in 10.0 ms" in str(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": None}, "it must have both, or neither"),
        ({"recipe": ()}, "it must have both, or neither"),
        ({"source": 3}, "made from slot 3, but there are only 3 slots"),
        ({"source": -1}, "made from slot -1, but there are only 3 slots"),
        ({"source": 1}, "another slot of the same pass"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changes, message):
    profile = network([10, 30, 10], recipes=[1])
    slots = list(profile.slots)
    slots[1] = replace(slots[1], **changes)
    with pytest.raises(PlanError, match=message):
        replace(profile, slots=tuple(slots))


def test_a_decision_has_a_recipe_only_to_recompute():
    with pytest.raises(PlanError, match="action keep cannot have recipe 'a->'"):
        Decision(SlotKey("a", 0, 1), Action.KEEP, "", "", recipe="a->")


def test_a_plan_of_another_profile_is_refused():
    profile = network([10, 30, 10], recipes=[1])
    plan = policies.get("recompute")(profile, MACHINE, Budgets(40 * MB))
    with pytest.raises(
        PlanError, match=r"block\.0\.1#0 .* is to be recomputed, but none .*, block\.0\.0->, recom"
    ):
        replay(network([10, 30, 10]), plan, MACHINE)


def test_auto_takes_them_where_they_cost_less_than_moving():
    """A slot three times as large as the others, and a layer that makes it in a tenth of a write."""
    profile = network([10, 30, 10, 10], step_ms=3, recipes=[1])
    slow = replace(MACHINE, flash_write_bytes_per_s=0.5e9, flash_read_bytes_per_s=0.5e9)
    plan = policies.get("auto")(profile, slow, Budgets(45 * MB, 0, AMPLE))
    assert plan.recomputed == ("block.0.0->",)
