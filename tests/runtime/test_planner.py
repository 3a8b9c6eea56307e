"""Records of passes in, orders out: when there is a new plan, and what is asked of the next pass."""

from dataclasses import replace
from itertools import pairwise

import pytest
from pass_records import FAST, ROOMY, SLOW, Pass, Planning, actions, key, sample, unlimited

from penstock.core.config import UNLIMITED
from penstock.core.errors import BudgetError, ConfigError, PlanError
from penstock.core.units import MIB
from penstock.plan import Action, Budgets, Decision, Plan, policies
from penstock.plan.replay import replay
from penstock.runtime import codec_choice, planner, profiling
from penstock.runtime.loader_demand import Loaders
from penstock.runtime.orders import PassRecord, SlotOutcome
from penstock.runtime.profiling import profile_of

SAME = Pass()
MANY = Pass("abcdefghijklmnopqrs")
"""Nineteen slots: one more is 5 % of the bytes."""
WIDER = Pass(nbytes=3 * MIB)
OTHER = Pass("wxyz")


# -- when there is a new plan ----------------------------------------------------------------------

REASONS = {
    "the same pass again": ([SAME] * 4, ["first", "", "", ""]),
    "nothing saved above the floor": ([Pass(""), SAME], ["", "first"]),
    "unknown slots of 5 % of the bytes": ([MANY, Pass(MANY.names + "u")], ["first", ""]),
    "unknown slots of more than 5 %": ([MANY, Pass(MANY.names + "uv")], ["first", "drift"]),
    "a size of the same bucket": ([SAME, Pass(nbytes=MIB + 4096)], ["first", ""]),
    "another batch": ([SAME, WIDER, WIDER, SAME], ["first", "drift", "", ""]),
    "two kinds of passes in turn": ([SAME, OTHER] * 3, ["first", "drift", "", "", "", ""]),
    "a slot that is held elsewhere": (
        [SAME, Pass(held="b"), Pass(held="b"), SAME],
        ["first", "held", "", ""],
    ),
    "slots that disappear": ([SAME, Pass("ab")], ["first", ""]),
}


@pytest.mark.parametrize(("passes", "reasons"), REASONS.values(), ids=REASONS)
def test_a_plan_is_made_when_a_pass_differs(passes, reasons):
    assert Planning().run(*passes) == reasons


def test_the_profile_has_each_kind_of_pass_once_the_last_of_it():
    planning = Planning()
    planning.run(SAME, OTHER, Pass("abcde"))
    profile = planning.planner.profile
    assert [one.index for one in profile.passes] == [2, 3]
    assert "".join(slot.key.module for slot in profile.slots) == "wxyzabcde"


def test_so_many_kinds_of_passes_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr(planner, "FREE_REPLANS", 100)
    planning = Planning()
    planning.run(*(Pass(chr(1000 + n)) for n in range(10)))
    kinds = [one.index for one in planning.planner.profile.passes]
    assert kinds == list(range(11 - profiling.MAX_KINDS, 11))


def test_what_is_held_elsewhere_is_planned_as_held_from_then_on():
    planning = Planning("ranked", budgets=Budgets(device_bytes=3 * MIB, flash_bytes=1 << 40))
    planning.run(SAME, Pass(held="b"))
    held = {slot.key.module for slot in planning.planner.profile.slots if slot.held_elsewhere}
    assert held == {"b"}
    planning.run(Pass("abcdefgh"))  # another plan, of a pass that does not show it
    held = {slot.key.module for slot in planning.planner.profile.slots if slot.held_elsewhere}
    assert held == {"b"}


def test_plans_are_made_ever_more_rarely_where_sizes_change_for_ever():
    planning = Planning()
    reasons = planning.run(*(Pass(chr(1000 + n)) for n in range(100)))
    made = [n for n, reason in enumerate(reasons) if reason]
    assert made[: planner.FREE_REPLANS] == list(range(planner.FREE_REPLANS))
    later = made[planner.FREE_REPLANS - 1 :]
    assert [b - a for a, b in pairwise(later)] == [2, 4, 8, 16, 32]


def test_a_device_that_appears_in_the_middle_of_a_pass_is_planned_from_an_observed_one():
    planning = Planning(only_observed=True)
    assert planning.run(Pass(facts={"observed": False})) == [""]
    assert planning.orders.plan is None
    assert planning.orders.observes
    assert planning.run(SAME) == ["first"]


def test_another_limit_makes_another_plan():
    planning = Planning("ranked", budgets=unlimited(flash_bytes=1 << 40))
    less = Pass(facts={"limit_bytes": 2 * MIB})
    assert planning.run(SAME, SAME, less, SAME) == ["first", "", "memory", ""]
    assert "o" in actions(planning.orders)
    assert planning.orders.request.budgets.device_bytes == 2 * MIB
    assert planning.planner.limit(2 * MIB) is None
    assert planning.planner.limit(8 * MIB) is planning.orders
    assert planning.reasons() == ["first", "memory", "memory"]
    assert "o" not in actions(planning.orders)


def test_a_limit_before_the_first_plan_counts_for_it():
    planning = Planning("ranked", budgets=unlimited(flash_bytes=1 << 40))
    assert planning.planner.limit(3 * MIB) is None
    assert planning.run(Pass(facts={"limit_bytes": 2 * MIB})) == ["first"]
    assert planning.orders.plan.budgets.device_bytes == 2 * MIB


class Feeds:
    read_demand_bytes_per_s = 1e12

    def rest(self):
        pass


def test_what_data_loaders_need_is_left_to_them():
    loaders, feeds = Loaders(), Feeds()
    planning = Planning(loaders=loaders)
    loaders.add(feeds)
    assert planning.run(SAME, SAME) == ["first", ""]
    assert planning.planner.machine.flash_read_bytes_per_s == FAST.flash_read_bytes_per_s - 1e12
    feeds.read_demand_bytes_per_s = 1.4e12  # less than a twentieth of flash more
    assert planning.run(SAME) == [""]
    feeds.read_demand_bytes_per_s = 1.6e12
    assert planning.run(SAME, SAME) == ["demand", ""]
    assert planning.planner.machine.flash_read_bytes_per_s == FAST.flash_read_bytes_per_s - 1.6e12


def test_a_plan_for_loaders_is_made_of_whole_passes():
    loaders, feeds = Loaders(), Feeds()
    planning = Planning("keep", loaders=loaders)
    planning.run(SAME, SAME)
    loaders.add(feeds)
    assert planning.run(SAME) == ["demand"]
    profile = planning.planner.profile
    assert [one.index for one in profile.passes] == [1], "this one recorded no slot"
    assert len(profile.slots) == 4


def test_loaders_do_not_matter_where_nothing_moves():
    loaders, feeds = Loaders(), Feeds()
    planning = Planning("keep", budgets=unlimited(flash_bytes=1 << 40), loaders=loaders)
    planning.run(SAME)
    assert planning.orders.moves_nothing
    loaders.add(feeds)
    assert planning.run(SAME) == [""]


# -- what is kept without a record -----------------------------------------------------------------


def kept(planning):
    return "".join(sorted(module for module, _, _ in planning.orders.kept))


def test_slots_are_kept_unrecorded_once_they_were_seen_under_the_plan():
    planning = Planning("keep")
    planning.run(SAME)
    assert kept(planning) == ""
    planning.run(SAME)
    assert kept(planning) == "abcd"
    before = planning.orders
    assert planning.run(SAME, SAME) == ["", ""]
    assert planning.orders is before


def test_only_what_the_plan_keeps_is():
    planning = Planning("ranked", budgets=Budgets(device_bytes=3 * MIB, flash_bytes=1 << 40))
    planning.run(SAME, SAME)
    plan = planning.orders.plan
    assert 0 < len(plan.decisions) - plan.kept_bytes // MIB < 4
    named = {d.key.module for d in plan.decisions if d.action is Action.KEEP}
    assert set(kept(planning)) == named


DOUBTS = {
    "unknown slots": Pass("abcdef"),
    "room was needed": Pass(facts={"promoted": True}),
}


@pytest.mark.parametrize("doubtful", DOUBTS.values(), ids=DOUBTS)
def test_after_a_pass_that_was_not_as_planned_all_slots_are_recorded(doubtful):
    planning = Planning("keep")
    planning.run(SAME, SAME)
    assert planning.run(doubtful) == [""], "no plan is made of a pass with gaps"
    assert kept(planning) == ""
    if doubtful.names != SAME.names:
        assert planning.run(doubtful) == ["drift"]
        assert kept(planning) == "", "what the new plan keeps is not known yet"
        return
    assert planning.run(*[SAME] * (profiling.FULL_PASSES - 1)) == [""] * 15
    assert kept(planning) == ""
    planning.run(SAME)
    assert kept(planning) == "abcd"


def test_held_slots_of_a_pass_with_gaps_are_found_when_it_is_recorded():
    planning = Planning("keep")
    planning.run(SAME, SAME)
    assert planning.run(Pass("abcde", held="e"), Pass("abcde", held="e")) == ["", "held"]


def test_slots_whose_sizes_change_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(planner, "MAX_KEPT_KEYS", 10)
    planning = Planning("keep")
    for n in range(20):
        planning.learn(Pass(nbytes=MIB + 8 * n))
        assert len(planning.orders.kept) <= 10
    assert planning.orders.plan_number == 1


# -- observed passes, and recomputation ------------------------------------------------------------


@pytest.fixture
def by_hand(monkeypatch):
    """A policy that recomputes a and b, as far as it may, and offloads nothing, or all else."""
    offloads = []

    def policy(profile, machine, budgets):
        base = policies.get("all" if offloads else "keep")(profile, machine, budgets)
        fit = {
            slot.key.module
            for slot in profile.slots
            if slot.producer in ("a", "b") and slot.producer not in profile.unrepeatable
        }
        decisions = tuple(
            Decision(d.key, Action.RECOMPUTE, "", "by hand") if d.key.module in fit else d
            for d in base.decisions
        )
        return replace(base, decisions=decisions, recomputed=tuple(sorted(fit)), notes=())

    monkeypatch.setitem(policies._POLICIES, "by hand", policy)
    return offloads


LACKING = Pass(dropped="ab")


def test_a_pass_that_lacks_what_is_recomputed_is_no_drift(by_hand):
    planning = Planning("by hand", recompute=True)
    assert planning.orders.observes
    assert planning.run(*[LACKING] * 4) == ["first", "", "", ""]
    assert actions(planning.orders) == "rrkk"
    assert not planning.orders.observes
    assert kept(planning) == "", "records name the inputs of recomputed modules"
    assert len(planning.planner.profile.slots) == 4, "the first pass knows what is lacking"


def test_drift_under_recomputation_is_observed_before_it_is_planned(by_hand):
    planning = Planning("by hand", recompute=True)
    wider = replace(LACKING, names="abcdef")
    passes = (LACKING, LACKING, wider, wider, wider)
    seen = [(planning.orders.observes, planning.learn(one)) for one in passes]
    assert seen == [(True, "first"), (False, ""), (False, ""), (True, "drift"), (False, "")]
    assert {slot.pass_index for slot in planning.planner.profile.slots} == {4}


def test_two_kinds_of_passes_are_both_observed(by_hand):
    planning = Planning("by hand", recompute=True)
    other = Pass("bxyz", dropped="b")
    reasons = planning.run(*[LACKING, other] * 5)
    assert reasons == ["first", "", "", "drift", *[""] * 6]
    assert planning.orders.plan.recomputed == ("a", "b")
    assert len(planning.planner.profile.passes) == 2


def test_observing_stops_if_what_is_waited_for_does_not_come_back(by_hand, monkeypatch):
    monkeypatch.setattr(profiling, "MAX_OBSERVED_PASSES", 3)
    planning = Planning("by hand", recompute=True)
    planning.run(LACKING, replace(LACKING, names="abcdef"))
    observed = []
    for _ in range(6):
        observed.append(planning.orders.observes)
        planning.learn(LACKING)
    assert observed == [True, True, True, False, False, False]


def test_modules_that_a_pass_shows_to_be_unfit_are_not_recomputed(by_hand):
    planning = Planning("by hand", recompute=True)
    planning.run(Pass(facts={"unrepeatable": frozenset("a")}))
    assert planning.orders.plan.recomputed == ("b",)
    assert planning.planner.profile.unrepeatable == ("a",)


def test_a_policy_that_ignores_that_is_not_followed(by_hand, monkeypatch):
    honest = policies.get("by hand")
    careless = lambda profile, *rest: honest(replace(profile, unrepeatable=()), *rest)  # noqa: E731
    monkeypatch.setitem(policies._POLICIES, "by hand", careless)
    planning = Planning("by hand", recompute=True)
    planning.run(Pass(facts={"unrepeatable": frozenset("a")}))
    assert planning.orders.plan.recomputed == ()
    assert any("nothing is run again" in note for note in planning.orders.notes)


def test_without_leave_nothing_is_recomputed(by_hand):
    planning = Planning("by hand")
    planning.run(SAME)
    assert planning.orders.plan.recomputed == ()
    assert planning.orders.notes == ()


def test_a_kind_of_pass_that_was_planned_unobserved_is_observed(by_hand):
    """As after a first backward that saved nothing: then the next pass is not observed."""
    by_hand.append(True)
    planning = Planning("by hand", recompute=True)
    assert planning.run(Pass(facts={"observed": False}), LACKING, LACKING) == [
        "first",
        "observed",
        "",
    ]


# -- sampled passes --------------------------------------------------------------------------------

SAMPLED = {
    "a network that stays the same": ([SAME] * 6, ".s....", ["first", "sampled"]),
    "less sparse than planned": (
        [SAME] * 3 + [Pass(ratio=0.9)] * 4,
        ".s..s..",
        ["first", "sampled", "sampled"],
    ),
    "more sparse than planned": (
        [Pass(ratio=0.7)] * 3 + [SAME] * 4,
        ".s..s..",
        ["first", "sampled", "sampled"],
    ),
    "noise": (
        [Pass(ratio=0.25 + n / 100) for n in (0, 0, 5, -5, 10, 14)],
        ".s....",
        ["first", "sampled"],
    ),
    "slots that appear later": (
        [MANY] * 3 + [Pass(MANY.names + "uvw")] * 3,
        ".s..s.",
        ["first", "sampled", "drift", "sampled"],
    ),
    "what no codec takes": ([Pass(ratio=None)] * 3, ".ss", ["first"]),
    "a shortage": (
        [SAME, SAME, Pass(facts={"shortage": True}), SAME, SAME],
        ".s.s.",
        ["first", "sampled", "sampled"],
    ),
}


def looks(planning, passes):
    found = ""
    for one in passes:
        found += "s" if planning.orders.samples else "."
        planning.learn(one)
    return found


@pytest.mark.parametrize(("passes", "looked", "reasons"), SAMPLED.values(), ids=SAMPLED)
def test_a_pass_is_sampled_when_codecs_could_win_and_are_not_known(passes, looked, reasons):
    planning = Planning(machine=SLOW, codec="auto")
    assert looks(planning, passes) == looked
    assert planning.reasons() == reasons
    encoded = [bool(each.codec) for each in planning.orders.plan.decisions]
    assert all(encoded) if passes[-1].ratio else not any(encoded)


def test_a_devices_plan_has_no_codecs_if_it_is_foretold_to_be_quicker_without():
    """By a replay, which knows what is forwarded; codecs are chosen by how busy the channels are."""
    planning = Planning(machine=SLOW, codec="auto", device="cuda:0")
    looks(planning, [MANY] * 3)
    request = planning.orders.request
    with_codecs = request._ask(
        request.profile, request.machine, request.budgets, name=request.policy
    )
    assert any(each.codec for each in with_codecs.decisions)
    times = [
        replay(request.profile, each, request.machine).step_ns
        for each in (planning.orders.plan, with_codecs)
    ]
    assert times[0] < 0.7 * times[1]
    assert not any(each.codec for each in planning.orders.plan.decisions)


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("slow", [True, False])
def test_codecs_of_a_device_are_given_up_if_passes_take_longer_than_foretold_without(device, slow):
    """A worker beside a network may be far slower than alone; on a CPU samples tell how fast it is."""
    planning = Planning(machine=SLOW, codec="auto", device=device)
    looks(planning, [SAME] * 2)
    request = planning.orders.request
    without_ns = int(request.step_ns(request.without_codecs().plan()))
    encoded = lambda: any(each.codec for each in planning.orders.plan.decisions)  # noqa: E731
    assert encoded()
    passes = [Pass(facts={"took_ns": without_ns * (2 if slow else 1)})] * 4
    given_up = slow and device != "cpu"
    assert planning.run(*passes) == ["", "", "", "slow codecs" if given_up else ""]
    assert encoded() is not given_up
    assert looks(planning, [Pass(ratio=0.9)] * 4).count("s") == (0 if given_up else 1)
    if given_up:
        assert not encoded()
        assert planning.marks("no_codecs")[0].fields["reason"].startswith("passes took longer")


NOT_SAMPLED = {
    "flash is fast": {"machine": FAST},
    "no codec is to be chosen": {"codec": "none"},
    "one codec is used everywhere": {"codec": "zero-value"},
    "nothing is offloaded": {"policy": "keep"},
    "the budget has no room for codecs": {
        "budgets": Budgets(device_bytes=4 * MIB, flash_bytes=1 << 40)
    },
}


@pytest.mark.parametrize("settings", NOT_SAMPLED.values(), ids=NOT_SAMPLED)
def test_no_pass_is_sampled_in_vain(settings):
    planning = Planning(**{"machine": SLOW, "codec": "auto", **settings})
    assert looks(planning, [SAME] * 5) == "....."
    assert planning.opened == (settings.get("codec") == "zero-value")


def test_tiers_that_are_too_small_for_bytes_as_they_are_are_a_reason_to_sample():
    tight = Budgets(device_bytes=64 * MIB, host_bytes=3 * MIB)
    planning = Planning(budgets=tight, codec="auto")
    assert looks(planning, [SAME] * 4) == ".s.."
    roomy = Planning(budgets=replace(tight, host_bytes=5 * MIB), codec="auto")
    assert looks(roomy, [SAME] * 4) == "...."


def test_passes_are_sampled_so_often_and_no_more(monkeypatch):
    monkeypatch.setattr(codec_choice, "MAX_SAMPLED_PASSES", 4)
    monkeypatch.setattr(planner, "FREE_REPLANS", 100)
    planning = Planning(machine=SLOW, codec="auto")
    changing = [Pass(ratio=(0.1, 0.8)[n // 3 % 2]) for n in range(40)]
    assert looks(planning, changing).count("s") == 4
    never = Planning(machine=SLOW, codec="auto")
    assert looks(never, [Pass(ratio=None)] * 40) == ".ssss" + "." * 35, "nothing can be measured"
    assert never.orders.plan_number == 1


def test_no_pass_is_sampled_or_observed_whose_plan_would_not_be_made(by_hand):
    by_hand.append(True)
    planning = Planning("by hand", machine=SLOW, codec="auto", recompute=True)
    planned = 0
    for n in range(100):
        looked = planning.orders.samples or planning.orders.observes
        planned += looked
        made = planning.learn(Pass(chr(1000 + n) + chr(2000 + n)))
        if looked and n > 10:
            assert made
    assert planned < 15


def test_sampling_also_observes():
    planning = Planning(machine=SLOW, codec="auto", recompute=True)
    planning.run(SAME)
    assert planning.orders.samples
    assert planning.orders.observes


# -- memory of codecs ------------------------------------------------------------------------------


def test_codecs_get_their_memory_when_a_plan_has_some():
    planning = Planning(machine=SLOW, codec="auto", budgets=replace(ROOMY, device_bytes=64 * MIB))
    planning.run(SAME)
    assert (planning.opened, planning.orders.can_encode) == (0, False)
    planning.run(SAME)
    assert (planning.opened, planning.orders.can_encode) == (1, True)
    assert planning.orders.request.budgets.device_bytes == 62 * MIB
    assert planning.orders.request.scratch_bytes == 2 * MIB
    planning.run(*[SAME] * 5)
    assert planning.opened == 1


def test_without_room_for_it_bytes_go_as_they_are():
    planning = Planning(machine=SLOW, codec="auto", scratch=0)
    assert looks(planning, [SAME] * 6) == ".s...."
    assert planning.opened == 1
    assert not planning.orders.can_encode
    assert not any(each.codec for each in planning.orders.plan.decisions)
    (mark,) = planning.marks("no_codecs")
    assert "no room" in mark.fields["reason"]


@pytest.mark.parametrize("scratch_bytes", [2 * MIB, 0])
def test_memory_taken_in_the_middle_of_a_crowded_pass_is_noted(scratch_bytes):
    planning = Planning(machine=SLOW, codec="auto", budgets=replace(ROOMY, device_bytes=64 * MIB))
    assert planning.orders.samples_when_crowded
    planning.run(Pass(facts={"sampled": True, "scratch_bytes": scratch_bytes}))
    assert planning.opened == 0
    assert planning.orders.can_encode == bool(scratch_bytes)
    assert planning.orders.request.budgets.device_bytes == 64 * MIB - scratch_bytes
    assert len(planning.marks("no_codecs")) == (not scratch_bytes)
    assert planning.orders.samples == bool(scratch_bytes)
    assert not planning.orders.samples_when_crowded


def test_a_forced_codec_has_its_memory_from_the_beginning_and_is_in_every_decision():
    planning = Planning(codec="zero-value")
    assert planning.opened == 1
    assert planning.orders.default.forced_codec == "zero-value"
    assert not planning.orders.can_encode, "no other is chosen, nor is it for want of room"
    planning.run(SAME)
    assert planning.orders.decision_for(key("a")).codec == "zero-value"
    assert not planning.orders.samples_when_crowded


REFUSED = {
    "zip": (ConfigError, r"zip.*there are zero-value.*bfloat16"),
    "zero-value+zip": (ConfigError, r"zip.*there are zero-value.*bfloat16"),
    "positive": (ConfigError, r"'positive' keeps only signs.*codec='auto'"),
    "zero-value": (BudgetError, "has no room for what codec 'zero-value'"),
}


@pytest.mark.parametrize("codec", REFUSED)
def test_a_codec_that_cannot_be_forced_is_refused(codec):
    error, message = REFUSED[codec]
    with pytest.raises(error, match=message):
        Planning(codec=codec, scratch=0)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="unknown policy 'best'"):
        Planning("best")


# -- user plans ------------------------------------------------------------------------------------


def user_plan(names="abcd", **fields):
    decisions = tuple(Decision(key(n), Action.OFFLOAD, "flash", "by hand") for n in names)
    needs = tuple(key(n) for n in reversed(names))
    return Plan("by hand", Budgets(device_bytes=MIB), decisions, needs, 2 * MIB, **fields)


def test_a_user_plan_is_followed_from_the_first_pass_and_never_replaced():
    planning = Planning(user_plan=user_plan(), codec="auto", machine=SLOW)
    first = planning.orders
    assert first.plan.decisions == user_plan().decisions
    assert (first.strict, first.observes, first.samples) == (True, False, False)
    assert planning.run(SAME, WIDER, Pass(facts={"limit_bytes": MIB})) == ["", "", ""]
    assert planning.orders.plan is first.plan
    assert not planning.orders.strict
    assert planning.planner.profile is None
    assert planning.counted("unknown_slots") == 4
    assert planning.planner.limit(2 * MIB) is None


def test_a_user_plan_is_replayed_on_the_passes_that_it_meets():
    planning = Planning(user_plan=user_plan())
    assert planning.planner.foreseen is None
    planning.run(SAME, SAME)
    assert planning.planner.foreseen.passes == 1
    planning.run(OTHER)
    assert planning.planner.foreseen.passes == 2


def test_slots_that_a_user_plan_keeps_are_kept_unrecorded_after_its_first_pass():
    plan = user_plan()
    keeping = tuple(Decision(d.key, Action.KEEP, "", "by hand") for d in plan.decisions)
    planning = Planning(user_plan=replace(plan, decisions=keeping))
    assert kept(planning) == ""
    planning.run(SAME)
    assert kept(planning) == "abcd"


def test_a_user_plan_with_codecs_takes_their_memory_at_once():
    plan = user_plan()
    coded = tuple(replace(d, codec="zero-value", ratio=0.5) for d in plan.decisions)
    assert Planning(user_plan=replace(plan, decisions=coded), codec="auto").opened == 1
    assert Planning(user_plan=plan, codec="auto").opened == 0


def test_a_user_plan_without_its_tier_is_refused():
    with pytest.raises(PlanError, match=r"sends slot a#0.* to the flash tier"):
        Planning(user_plan=user_plan(), budgets=unlimited(host_bytes=1 << 40))


def test_a_user_plan_for_more_memory_has_a_note():
    plan = user_plan(notes=("its own",))
    decisions = tuple(replace(d, prefetch_at=3) for d in plan.decisions)
    budgets = replace(plan.budgets, device_bytes=2 * MIB)
    larger = replace(plan, decisions=decisions, budgets=budgets)
    planning = Planning(user_plan=larger, budgets=replace(ROOMY, device_bytes=MIB))
    note, own = planning.orders.notes
    assert "made for 2.00 MiB of device memory, the session has 1.00 MiB" in note
    assert own == "its own"
    planning.run(Pass(waits_ms={"a": 3}))
    assert planning.orders.plan is not larger
    assert planning.orders.notes == (note, own), "also after a read was moved"


# -- reads that come late --------------------------------------------------------------------------


def test_late_reads_are_moved_under_the_same_plan(monkeypatch):
    monkeypatch.setattr(planner, "MAX_IMPROVEMENTS", 2)
    decisions = tuple(replace(d, prefetch_at=3) for d in user_plan().decisions)
    planning = Planning(user_plan=replace(user_plan(), decisions=decisions))
    late = Pass(waits_ms={"a": 3})
    found = []
    for _ in range(4):
        planning.learn(late)
        found.append(dict(planning.orders.triggers))
    assert found[0] != dict.fromkeys(found[0], 3)
    assert found[1] != found[0]
    assert found[3] == found[2] == found[1], "so often and no more"
    assert planning.orders.plan_number == 0
    assert planning.counted("prefetch.moved_earlier") > 0
    assert len(planning.marks("read_earlier")) == 2


def test_a_read_that_moves_forgets_no_kept_slot():
    a, b, *others = user_plan().decisions
    staying = tuple(Decision(d.key, Action.KEEP, "", "by hand") for d in others)
    decisions = (replace(a, prefetch_at=3), replace(b, prefetch_at=2), *staying)
    planning = Planning(user_plan=replace(user_plan(), decisions=decisions))
    planning.run(SAME)
    assert kept(planning) == "cd"
    before = planning.orders
    planning.run(Pass(waits_ms={"a": 3}))
    assert planning.orders.triggers != before.triggers
    assert planning.orders.kept == before.kept


def test_an_observed_pass_moves_no_reads():
    decisions = tuple(replace(d, prefetch_at=3) for d in user_plan().decisions)
    planning = Planning(user_plan=replace(user_plan(), decisions=decisions))
    planning.run(Pass(waits_ms={"a": 3}, facts={"observed": True}))
    assert set(planning.orders.triggers.values()) == {3}


# -- profiles --------------------------------------------------------------------------------------


def outcome(name, saved_at, needed_at, **facts):
    return SlotOutcome(key(name), "Linear", "float32", saved_at, needed_at, **facts)


def profiled(*slots, **facts):
    record = PassRecord(1, 0, 50, 100, slots, **facts)
    return profile_of([record], device="cpu").slots


def test_what_is_small_and_saved_last_counts_beside_the_first_slot_that_is_needed():
    slots = (
        outcome("a", 0, 90, small_bytes=0),
        outcome("b", 10, 60, small_bytes=5),
        outcome("c", 20, 60, small_bytes=7),
    )
    found = profiled(*slots, small_bytes=4096, small_count=3)
    assert [slot.small_bytes_at_need for slot in found] == [None, None, 4096]
    assert [slot.small_bytes for slot in found] == [0, 5, 7]
    found = profiled(outcome("a", 0, 90, small_bytes=9), small_bytes=4)
    assert found[0].small_bytes_at_need == 9


def test_signs_count_only_where_they_are_proven_to_be_enough():
    samples = (sample(0.03, "positive"), sample(0.5))
    slots = (
        outcome("a", 0, 90, codecs=samples, signs_suffice=True),
        outcome("b", 0, 90, codecs=samples),
    )
    proven, not_proven = profiled(*slots)
    assert proven.codecs == samples
    assert not_proven.codecs == samples[1:]


def test_recipes_refer_to_the_slot_of_their_own_pass():
    first = PassRecord(1, 0, 50, 100, (outcome("x", 0, 90),))
    slots = (
        outcome("a", 0, 90),
        outcome("b", 10, 80, recipe=("b",), source=0),
        outcome("c", 20, 70, recipe=("c",)),
    )
    second = PassRecord(2, 200, 250, 300, slots)
    found = profile_of([second, first], device="cpu").slots
    assert [slot.key.module for slot in found] == ["x", "a", "b", "c"]
    assert [slot.source for slot in found] == [None, None, 1, None]
    assert [slot.recipe for slot in found] == [(), (), ("b",), ()], "no recipe without its input"


def test_times_that_another_threads_stall_took_back_are_in_order():
    record = PassRecord(1, 100, 40, 30, (outcome("a", 90, 20),))
    profile = profile_of([record], device="cpu")
    (one,) = profile.passes
    assert one.start_ns <= one.backward_start_ns <= one.end_ns
    assert profile.slots[0].needed_at_ns == 90


def test_samples_of_a_pass_are_remembered_where_a_later_one_has_none():
    planning = Planning(machine=SLOW, codec="auto")
    planning.run(MANY, MANY, Pass(MANY.names + "uvw"))
    samples = {slot.key.module: bool(slot.codecs) for slot in planning.planner.profile.slots}
    assert samples == {name: name not in "uvw" for name in MANY.names + "uvw"}


# -- what the orders tell others -------------------------------------------------------------------


def test_the_least_budget_counts_what_codecs_and_pages_take():
    slack = lambda device_bytes: device_bytes // 10  # noqa: E731
    budgets = Budgets(device_bytes=64 * MIB, flash_bytes=1 << 40)
    plain = Planning("auto", budgets=budgets)
    assert plain.orders.min_budget_bytes() is None
    plain.run(SAME)
    least = plain.orders.min_budget_bytes()
    assert 0 < least < 4 * MIB
    slacker = Planning("auto", budgets=budgets, slack_bytes=slack)
    slacker.run(SAME)
    assert slacker.orders.min_budget_bytes() == least + 4 * MIB // 10
    coded = Planning("auto", budgets=budgets, codec="zero-value")
    coded.run(SAME)
    assert coded.orders.min_budget_bytes() == least + 2 * MIB
    assert plain.orders.suggestion().least_bytes >= least
    tierless = Planning("auto", budgets=Budgets(device_bytes=UNLIMITED))
    tierless.run(SAME)
    assert tierless.orders.suggestion() is None


def test_slack_is_left_out_of_a_plan_that_fits_without_it():
    def peak(device_bytes):
        budgets = Budgets(device_bytes=device_bytes, flash_bytes=1 << 40)
        planning = Planning("ranked", budgets=budgets, slack_bytes=lambda _: MIB)
        planning.run(SAME)
        return planning.orders.plan.budgets.device_bytes

    assert peak(4 * MIB) == 3 * MIB
    assert peak(3 * MIB // 2) == 3 * MIB // 2, "none fits in half a MiB"
