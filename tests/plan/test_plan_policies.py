"""What policies promise: the budget, purity, the least traffic, reasons that a person can read."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import MACHINE, MB, MS, machines, profiles, stack
from plan_walk import peak_bytes

from penstock.core.errors import ConfigError
from penstock.plan import (
    Action,
    Budgets,
    Machine,
    PassProfile,
    Plan,
    Profile,
    SlotKey,
    SlotProfile,
    policies,
)
from penstock.plan.assembly import mask_of
from penstock.plan.groups import groups_of
from penstock.plan.residency import residency
from penstock.plan.window import least_window, returning
from tries import tries

AMPLE = 10**12
auto = policies.get("auto")
ranked = policies.get("ranked")


def offloaded_bytes(profile, plan):
    return sum(
        slot.key.nbytes for slot in profile.slots if plan.lookup(slot.key).action is Action.OFFLOAD
    )


def actions(plan):
    return {decision.key.module: decision.tier or "keep" for decision in plan.decisions}


def test_policies_are_found_by_name():
    assert policies.names() == (
        "all",
        "auto",
        "flashneuron",
        "keep",
        "lifetime",
        "ranked",
        "recompute",
        "vdnn-all",
        "vdnn-conv",
        "vdnn-dyn",
    )
    with pytest.raises(ConfigError, match="unknown policy 'best'; known are all, auto, fl"):
        policies.get("best")


@given(
    profiles(),
    machines(),
    st.integers(0, 8000),
    st.integers(0, 3000),
    st.sampled_from([0, 900, AMPLE]),
)
def test_every_plan_is_pure_total_and_survives_json(profile, machine, device, host, flash):
    budgets = Budgets(device, host, flash)
    for name in policies.names():
        plan = policies.get(name)(profile, machine, budgets)
        assert plan == policies.get(name)(profile, machine, budgets)
        assert Plan.from_json(plan.to_json()) == plan
        for slot in profile.slots:
            assert plan.lookup(slot.key) is not None
        assert all(decision.reason for decision in plan.decisions)
        needed = {profile.slots[i].key.match_key for i in profile.needs}
        assert {key.match_key for key in plan.need_order} == needed
        assert len(plan.need_order) == len(needed)


@given(profiles(), machines(), st.integers(0, 8000), st.integers(0, 2000))
def test_a_plan_keeps_its_budget_or_says_that_it_cannot(profile, machine, device, host):
    for name in policies.names():
        plan = policies.get(name)(profile, machine, Budgets(device, host, AMPLE))
        assert (peak_bytes(profile, plan, machine) <= device) == plan.feasible
        if name == "ranked" and plan.feasible and plan.offloaded_bytes and not plan.notes:
            # then there is room to read ahead at every moment of backward
            mask = mask_of(profile, (g for g in groups_of(profile) if plan.lookup(g.key).tier))
            need = residency(profile, mask)
            room = least_window(returning(profile, mask), need.working_bytes)
            assert need.kept_bytes + room <= device


@settings(max_examples=tries(60))
@given(profiles(max_slots=4, max_passes=2), machines(), st.integers(0, 3000))
def test_auto_finds_a_plan_wherever_any_choice_would_do(profile, machine, device):
    """But for choices that offload what something else holds, which it never does."""

    def possible(groups):
        choices = itertools.chain.from_iterable(
            itertools.combinations(groups, k) for k in range(len(groups) + 1)
        )
        return any(residency(profile, mask_of(profile, c)).hard_bytes <= device for c in choices)

    groups = groups_of(profile)
    feasible = auto(profile, machine, Budgets(device, 0, AMPLE)).feasible
    assert feasible or not possible([group for group in groups if not group.held_elsewhere])
    assert possible(groups) or not feasible


@given(profiles(), machines(), st.integers(0, 500))
def test_auto_keeps_everything_that_fits(profile, machine, spare):
    plan = auto(profile, machine, Budgets(profile.peak_saved_bytes + spare, AMPLE, AMPLE))
    assert plan.feasible
    assert plan.offloaded_bytes == 0
    assert plan.window_bytes == 0
    assert all(decision.reason.startswith("fits: everything") for decision in plan.decisions)


@given(
    profiles(),
    machines(),
    st.lists(st.integers(0, 8000), min_size=2, max_size=6),
    st.integers(0, 4000),
)
def test_a_larger_budget_never_offloads_more(profile, machine, budgets, host):
    moved = [
        offloaded_bytes(profile, ranked(profile, machine, Budgets(device, host, AMPLE)))
        for device in sorted(budgets)
    ]
    assert moved == sorted(moved, reverse=True)


def test_keep_and_all_do_what_they_say():
    profile = stack([10, 10, 10], held={0})
    kept = policies.get("keep")(profile, MACHINE, Budgets(5 * MB, 0, AMPLE))
    assert set(actions(kept).values()) == {"keep"}
    assert not kept.feasible
    assert "at slot layer.2#0 (9.54 MiB)" in kept.notes[0]
    gone = policies.get("all")(profile, MACHINE, Budgets(20 * MB, 0, AMPLE))
    assert set(actions(gone).values()) == {"flash"}
    assert gone.window_bytes == 20 * MB


def test_ranked_offloads_the_head_and_keeps_the_tail():
    profile = stack([10] * 10)  # 100 MB; each takes 10 ms to write and to read
    plan = ranked(profile, MACHINE, Budgets(60 * MB, 0, AMPLE))
    assert actions(plan) == {
        **{f"layer.{i}": "flash" for i in range(6)},
        **{f"layer.{i}": "keep" for i in range(6, 10)},
    }
    assert plan.window_bytes == 60 * MB  # at first 20 MB are free, later more
    first, last = plan.decisions[0], plan.decisions[-1]
    assert first.reason == "long idle; 190.0 ms, written in 10.0 ms, read in 10.0 ms"
    assert last.reason == "tail of forward; needed 10.0 ms after it was saved"
    assert plan.notes == ()


def test_ranked_prefers_what_frees_most_byte_time_per_channel_time():
    # with 20 ms of latency a small slot costs nearly as much as a large one
    machine = Machine("slow start", 1e9, 1e9, 0.02, 1e9, 1e9)
    profile = stack([1, 50, 50, 50, 50, 50], step_ms=100)
    plan = ranked(profile, machine, Budgets(201 * MB, 0, AMPLE))
    assert actions(plan)["layer.0"] == "keep"
    assert actions(plan)["layer.1"] == "flash"


def test_slots_that_something_else_holds_stay_and_say_so():
    plan = ranked(stack([10] * 6, held={0}), MACHINE, Budgets(40 * MB, 0, AMPLE))
    assert actions(plan)["layer.0"] == "keep"
    assert plan.decisions[0].reason == "held elsewhere: offload frees nothing"
    assert actions(plan)["layer.1"] == "flash"


def test_slots_that_were_never_needed_go_last():
    some = ranked(stack([10] * 6, never={0}), MACHINE, Budgets(45 * MB, 0, AMPLE))
    assert actions(some)["layer.0"] == "keep"
    assert some.decisions[0].reason == "not needed in the profiled step"
    every = ranked(stack([10] * 6, never={0}), MACHINE, Budgets(10 * MB, 0, AMPLE))
    assert actions(every)["layer.0"] == "flash"
    assert "layer.0" not in {key.module for key in every.need_order}


def test_slots_that_nothing_asks_for_are_offloaded_if_forward_does_not_fit():
    profile = stack([10] * 4, never={0, 1, 2, 3})
    plan = ranked(profile, MACHINE, Budgets(15 * MB, 0, AMPLE))
    assert plan.feasible
    assert offloaded_bytes(profile, plan) == 30 * MB


def test_what_can_be_hidden_goes_before_what_cannot():
    # 200 MB need 400 ms for both ways, but come back after 390 ms: whoever asks would wait
    profile = stack([200, 40, 40, 40, 40, 40, 40], step_ms=30)
    plan = ranked(profile, MACHINE, Budgets(360 * MB, 0, AMPLE))
    assert actions(plan)["layer.0"] == "keep"
    assert actions(plan)["layer.1"] == actions(plan)["layer.2"] == "flash"


def test_the_shortest_idle_time_of_equal_slots_counts():
    def slot(p, saved_ms, needed_ms):
        return SlotProfile(
            SlotKey("l", 0, 10 * MB), p, saved_ms * MS, needed_ms * MS, "", False, ""
        )

    spans = (PassProfile(0, 0, 100 * MS, 500 * MS), PassProfile(1, 600 * MS, 700 * MS, 900 * MS))
    profile = Profile("cpu", (slot(0, 0, 450), slot(1, 610, 710)), spans)
    plan = policies.get("all")(profile, MACHINE, Budgets(20 * MB, 0, AMPLE))
    assert plan.decisions[0].reason.startswith("long idle; 100.0 ms")


def test_small_slots_still_go_where_large_ones_have_no_room():
    profile = stack([30, 30, 30, 10, 10, 10])
    plan = ranked(profile, MACHINE, Budgets(110 * MB, 0, 25 * MB))
    assert [decision.tier for decision in plan.decisions] == ["", "", "", "flash", "flash", ""]
    assert plan.feasible


def test_the_host_tier_takes_what_comes_back_soonest():
    plan = ranked(stack([10] * 10), MACHINE, Budgets(60 * MB, 25 * MB, AMPLE))
    assert [actions(plan)[f"layer.{i}"] for i in range(7)] == ["flash"] * 4 + ["host"] * 2 + [
        "keep"
    ]
    assert plan.decisions[5].reason == "long idle; 90.0 ms, written in 2.5 ms, read in 2.5 ms"


def test_full_tiers_keep_the_rest_and_the_plan_says_that_it_does_not_fit():
    plan = policies.get("all")(stack([10] * 4), MACHINE, Budgets(15 * MB, 0, 21 * MB))
    assert actions(plan) == {f"layer.{i}": "flash" if i < 2 else "keep" for i in range(4)}
    assert plan.decisions[3].reason == "no room: host tier 0 B, flash tier 20.03 MiB"
    assert not plan.feasible
    assert offloaded_bytes(stack([10] * 4), ranked(stack([10] * 4), MACHINE, Budgets(15 * MB))) == 0


def test_equal_passes_share_their_decisions_and_their_room_in_a_tier():
    once = ranked(stack([10] * 10), MACHINE, Budgets(60 * MB, 21 * MB, 42 * MB))
    thrice = ranked(stack([10] * 10, passes=3), MACHINE, Budgets(60 * MB, 21 * MB, 42 * MB))
    assert thrice.decisions == once.decisions
    assert thrice.need_order == once.need_order
    assert thrice.window_bytes == once.window_bytes


def test_a_burst_of_needs_makes_kept_slots_give_way_to_reads():
    # layers 0..9 are needed within 5 ms of each other, though each takes 10 ms to read
    def slot(i, needed_ms):
        return SlotProfile(
            SlotKey(f"l{i}", 0, 10 * MB), 0, i * 10 * MS, needed_ms * MS, "", False, ""
        )

    burst = [slot(i, 600 - 5 * i) for i in range(10)]
    calm = [slot(i, 1000 - 30 * i) for i in range(10)]
    tail = [slot(10 + i, 400 - 15 * i) for i in range(10)]
    span = (PassProfile(0, 0, 205 * MS, 1100 * MS),)
    wide = ranked(Profile("cpu", (*burst, *tail), span), MACHINE, Budgets(120 * MB, 0, AMPLE))
    flat = ranked(Profile("cpu", (*calm, *tail), span), MACHINE, Budgets(120 * MB, 0, AMPLE))
    assert 120 * MB - flat.kept_bytes == 20 * MB
    assert 120 * MB - wide.kept_bytes == 30 * MB  # a quarter of the budget


def test_reads_run_ahead_no_further_than_is_useful():
    plan = ranked(stack([10] * 40), MACHINE, Budgets(200 * MB, 0, AMPLE))
    assert plan.window_bytes == 80 * MB  # four times what one slot and the next take


def test_reads_that_run_ahead_leave_room_for_what_backward_saves():
    def slot(i, saved_ms, needed_ms):
        key = SlotKey(f"l{i}", 0, 10 * MB)
        return SlotProfile(key, 0, saved_ms * MS, needed_ms * MS, "", False, "")

    forward = [slot(i, 10 * i, 1000 - 100 * i) for i in range(6)]
    recomputed = [slot(10 + i, 500 + i, 590 - i) for i in range(2)]
    span = (PassProfile(0, 0, 70 * MS, 1100 * MS),)
    plain = ranked(Profile("cpu", tuple(forward), span), MACHINE, Budgets(45 * MB, 0, AMPLE))
    saving = Profile("cpu", (*forward, *recomputed), span)
    plan = ranked(saving, MACHINE, Budgets(45 * MB, 0, AMPLE))
    assert plain.window_bytes == 40 * MB
    assert actions(plan)["l10"] == actions(plan)["l11"] == "keep"
    assert plan.window_bytes == 15 * MB  # beside these two and l5, which is in use then
    assert plan.widest_bytes == 15 * MB  # nor does it become wider where reads come late


def test_flash_that_is_too_slow_is_noted():
    slow = Machine("slow", 1e8, 2e8, 0.0, 1e9, 1e9)
    plan = ranked(stack([10] * 10), slow, Budgets(50 * MB, 0, AMPLE))
    assert plan.feasible
    assert plan.notes == (
        "flash is slower than forward: it takes 700.0 ms to write what forward has 100.0 ms for",
        "flash is slower than backward: it takes 350.0 ms to read what backward has 100.0 ms for",
    )


def test_a_window_without_room_to_read_ahead_is_noted():
    plan = ranked(stack([10] * 5), MACHINE, Budgets(15 * MB, 0, AMPLE))
    assert plan.feasible
    assert plan.window_bytes == 15 * MB
    (note,) = plan.notes
    assert note.startswith("only 14.31 MiB of the budget are left beside kept slots, too little to")


def test_writes_in_flight_make_pack_wait_and_never_exceed_the_budget():
    slow = Machine("slow", 1e6, 1e6, 0.0, 1e9, 1e9)
    profile = stack([10] * 8)
    plan = policies.get("all")(profile, slow, Budgets(25 * MB, 0, AMPLE))
    assert peak_bytes(profile, plan, slow) == 25 * MB
    roomy = policies.get("all")(profile, slow, Budgets(90 * MB, 0, AMPLE))
    assert peak_bytes(profile, roomy, slow) == 90 * MB  # nothing waits: all in flight, reads ahead


def test_writes_that_have_ended_and_a_small_window_leave_memory_free():
    profile = stack([10] * 8)  # each is written when the next is saved
    plan = policies.get("all")(profile, MACHINE, Budgets(500 * MB, 0, AMPLE))
    assert peak_bytes(profile, plan, MACHINE) == 80 * MB  # reads run ahead as far as they like
    narrow = replace(plan, window_bytes=30 * MB)
    assert peak_bytes(profile, narrow, MACHINE) == 30 * MB


def test_an_empty_step_plans():
    empty = Profile("cpu", (), (PassProfile(0, 0, 0, 0),), small_bytes=5)
    for name in policies.names():
        assert policies.get(name)(empty, MACHINE, Budgets(5)).feasible
        assert not policies.get(name)(empty, MACHINE, Budgets(4)).feasible


def test_tiers_are_filled_by_whole_pages():
    """Two slots that would fit a tier byte by byte, but not page by page, do not both go there."""
    profile = stack([0.25, 0.25])
    nbytes = profile.slots[0].key.nbytes
    exact = policies.get("all")(profile, MACHINE, Budgets(1, 2 * nbytes, 0))
    assert sorted(decision.tier for decision in exact.decisions) == ["", "host"]
    pages = policies.get("all")(profile, MACHINE, Budgets(1, 2 * -(-nbytes // 4096) * 4096, 0))
    assert [decision.tier for decision in pages.decisions] == ["host", "host"]
