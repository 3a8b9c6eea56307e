"""A plan compiled into orders: lookups, and the rules that depend on the state of the running pass."""

import threading
from dataclasses import replace

import pytest
from pass_records import key, sample

from penstock.core.config import UNLIMITED
from penstock.core.errors import PlanError
from penstock.core.units import MIB
from penstock.observe.recorder import Recorder
from penstock.plan import Action, Budgets, Decision, Plan
from penstock.plan.profile import PassProfile, Profile, SlotProfile
from penstock.plan.slots import SlotKey
from penstock.runtime.active_orders import ActiveOrders
from penstock.runtime.orders import DefaultRule, Orders
from penstock.runtime.storage import INPUT, Encoding, Origin, Pass, SlotRecord
from penstock.store.account import Account

FLASH = Budgets(device_bytes=8 * MIB, flash_bytes=1 << 40)


def keep(name, **fields):
    return Decision(key(name), Action.KEEP, "", "", **fields)


def offload(name, tier="flash", **fields):
    return Decision(key(name), Action.OFFLOAD, tier, "", **fields)


def recompute(name, **fields):
    return Decision(key(name), Action.RECOMPUTE, "", "", **fields)


def plan_of(*decisions, budgets=FLASH, **fields):
    needs = tuple(d.key for d in reversed(decisions))
    return Plan("by hand", budgets, decisions, needs, 3 * MIB, **fields)


def orders_of(*decisions, budgets=FLASH, profile=None, forced_codec="", **fields):
    plan = plan_of(*decisions, budgets=budgets, **fields)
    return Orders.of(plan, budgets=budgets, profile=profile, forced_codec=forced_codec)


# -- lookups ---------------------------------------------------------------------------------------

PLAN = orders_of(
    keep("k"),
    offload("o", prefetch_at=2),
    recompute("m.r"),
    recompute("p", recipe="recipe"),
    offload("o2"),
    Decision(key("m.r", ordinal=1), Action.OFFLOAD, "flash", "", prefetch_at=None),
    recomputed=("m", "recipe"),
)
LOOKUPS = {
    "kept": (key("k"), "keep"),
    "offloaded": (key("o"), "offload"),
    "about the same size": (key("o", MIB + 4096), "offload"),
    "another ordinal of the same module and size": (key("o", ordinal=7), "offload"),
    "another size": (key("o", 2 * MIB), None),
    "another module": (key("x"), None),
    "of a recomputed module, saved all the same": (key("m.r"), None),
    "another one of that, which is saved": (key("m.r", ordinal=2), "offload"),
    "recomputed by a recipe": (key("p"), "recompute"),
    "another ordinal of that, of which there is no recipe": (key("p", ordinal=1), None),
    "the input of a recomputed module": (key("m" + INPUT), "keep"),
}


@pytest.mark.parametrize(("slot", "action"), LOOKUPS.values(), ids=LOOKUPS)
def test_a_slot_is_looked_up(slot, action):
    found = PLAN.decision_for(slot)
    assert (found and str(found.action)) == action


def test_which_slots_are_known():
    known = {name for name in ("k", "o", "m.r", "p", "x") if PLAN.knows(key(name))}
    assert known == {"k", "o", "m.r", "p"}
    assert PLAN.knows(key("m.r", 5 * MIB)), "of whatever size"
    assert not Orders().knows(key("k"))


def test_the_order_of_need_and_what_waits_for_which_place():
    assert PLAN.ranks[key("k").match_key] == 5
    assert PLAN.ranks[key("o2").match_key] == 1
    assert PLAN.triggers == {key("o").match_key: 2}
    assert PLAN.first_ranks == {"m": 0}
    assert PLAN.recomputed == {("m.r", 0)}
    assert PLAN.window_bytes == 3 * MIB
    assert Orders().window_bytes is None


MOVES = {
    "kept, no budget": ((keep("a"),), Budgets(UNLIMITED, flash_bytes=1), True),
    "kept, no tier": ((keep("a"),), Budgets(MIB), True),
    "kept, but it could have to go": ((keep("a"),), Budgets(MIB, flash_bytes=1), False),
    "offloaded": ((offload("a"),), Budgets(UNLIMITED, flash_bytes=1), False),
    "recomputed": ((recompute("a"),), Budgets(UNLIMITED), False),
}


@pytest.mark.parametrize(("decisions", "budgets", "nothing"), MOVES.values(), ids=MOVES)
def test_whether_anything_moves(decisions, budgets, nothing):
    paths = tuple(d.key.module for d in decisions if d.action is Action.RECOMPUTE)
    orders = orders_of(*decisions, budgets=budgets, recomputed=paths)
    assert orders.moves_nothing is nothing
    assert not Orders().moves_nothing


def test_a_forced_codec_is_in_every_decision_that_offloads():
    orders = orders_of(keep("a"), offload("b"), forced_codec="zero-value")
    rule = DefaultRule("flash", 1 << 40, always=True, forced_codec="zero-value")
    assert orders.decision_for(key("a")).codec == ""
    assert orders.decision_for(key("b")).codec == "zero-value"
    assert orders.decision_for(key("b", ordinal=3)).codec == "zero-value"
    found = rule.decide(key("x"), half_free=True, offloaded_bytes=0)
    assert found.codec == "zero-value"


CHECKS = {
    key("a"): None,
    key("a" + INPUT): None,
    key("a", MIB + 4): "another batch or model: a saves 1048580 bytes .* the plan says 1048576",
    key("b"): "another model: slot b#0 .* does not know it",
    SlotKey("", 0, 9): "another model: slot <root>#0",
}


@pytest.mark.parametrize("slot", CHECKS)
def test_slots_are_checked_against_a_plan(slot):
    orders = orders_of(offload("a"))
    if CHECKS[slot] is None:
        orders.check(slot)
    else:
        with pytest.raises(PlanError, match=CHECKS[slot]):
            orders.check(slot)


# -- fallback codecs -------------------------------------------------------------------------------


def profile(samples):
    slots = tuple(
        SlotProfile(key(name), 1, 0, 1, "Linear", False, "float32", codecs=codecs)
        for name, codecs in samples.items()
    )
    return Profile("cpu", slots, (PassProfile(1, 0, 1, 2),))


BEFORE = profile(
    {
        "a": (sample(0.5), sample(0.3, "exponent")),
        "b": (sample(0.95),),
        "c": (sample(0.1, "positive"),),
    }
)
FALLBACKS = {
    "what made it shortest before": ("a", "float32", (), "exponent"),
    "what makes it shortest now": ("a", "float32", (sample(0.2),), "zero-value"),
    "too little to win": ("b", "float32", (), ""),
    "not proven": ("c", "float32", (), ""),
    "not proven now": ("x", "float32", (sample(0.1, "positive"),), ""),
    "never sampled": ("x", "float32", (), ""),
    "another type": ("a", "float64", (), ""),
}


@pytest.mark.parametrize(("name", "dtype", "codecs", "codec"), FALLBACKS.values(), ids=FALLBACKS)
def test_the_fallback_codec_is_the_one_that_makes_a_slot_shortest(name, dtype, codecs, codec):
    orders = orders_of(offload("a"), profile=BEFORE)
    assert orders.fallback_codec(key(name), dtype, codecs) == codec


# -- slots without a plan --------------------------------------------------------------------------

FULL = Budgets(device_bytes=8 * MIB, host_bytes=1 << 40, flash_bytes=8 * MIB)
DEFAULTS = {
    "keep": ("keep", FULL, {"half_free": False}, ("keep", "", "")),
    "no tier": ("all", Budgets(MIB), {"half_free": False}, ("keep", "", "")),
    "half the budget is free": ("auto", FULL, {"half_free": True}, ("keep", "", "")),
    "it is not": ("auto", FULL, {"half_free": False}, ("offload", "flash", "")),
    "all": ("all", FULL, {"half_free": True}, ("offload", "flash", "")),
    "host memory only": (
        "all",
        Budgets(MIB, host_bytes=4 * MIB),
        {"half_free": True},
        ("offload", "host", ""),
    ),
    "half of the tier is left": (
        "all",
        FULL,
        {"offloaded_bytes": 3 * MIB},
        ("offload", "flash", ""),
    ),
    "and less than half": (
        "all",
        FULL,
        {"offloaded_bytes": 3 * MIB + 1},
        ("offload", "flash", "zero-value"),
    ),
}


@pytest.mark.parametrize(("policy", "budgets", "state", "wanted"), DEFAULTS.values(), ids=DEFAULTS)
def test_a_slot_that_no_plan_knows(policy, budgets, state, wanted):
    rule = DefaultRule.of(policy, budgets)
    state = {"half_free": False, "offloaded_bytes": 0, "codecs": (sample(0.5),), **state}
    found = rule.decide(key("x"), **state)
    assert (str(found.action), found.tier, found.codec) == wanted
    assert found.ratio == (0.5 if found.codec else 1)
    assert "not in the plan" in found.reason


# -- the running pass ------------------------------------------------------------------------------


def record(name="x", nbytes=MIB, codecs=(), dtype="float32"):
    return SlotRecord(key(name, nbytes), Origin(name, "Linear", dtype), 0, 0, codecs=codecs)


class Running:
    """Active orders of a device with 8 MiB, and a tier of 8 MiB."""

    def __init__(self, *, scratch=MIB, policy="all", **fields):
        self.account = Account(8 * MIB)
        self.recorder = Recorder()
        self.opened = 0
        self.scratch = scratch
        self.active = ActiveOrders(
            budget=self.account, recorder=self.recorder, open_codecs=self._open
        )
        rule = DefaultRule.of(policy, FULL)
        self.active.follow(Orders(default=rule, samples_when_crowded=True, **fields))

    def _open(self):
        self.opened += 1
        return self.scratch

    def offload(self, nbytes, **facts):
        return self.active.decide(record(nbytes=nbytes, **facts))

    def end_pass(self):
        finished = Pass(1, 0, 0)
        finished.end_ns = 1
        return self.active.end_pass(finished)


def test_half_of_the_budget_is_asked_of_the_account_at_each_slot():
    running = Running(policy="auto")
    assert running.offload(MIB).action is Action.KEEP
    running.account.force(4 * MIB, "saved")
    assert running.offload(MIB).action is Action.KEEP
    running.account.force(1, "saved")
    assert running.offload(MIB).action is Action.OFFLOAD


def test_a_pass_that_fills_half_of_a_tier_is_sampled_from_then_on():
    running = Running()
    active = running.active
    running.offload(4 * MIB)
    assert not active.crowded
    running.offload(1)
    assert active.crowded
    assert not active.sampling
    active.sample_now()
    assert (running.opened, active.sampling, active.crowded) == (1, True, False)
    found = running.offload(MIB, codecs=(sample(0.5),))
    assert found.codec == "zero-value"
    assert not active.crowded
    ended = running.end_pass()
    assert (ended.sampled, ended.scratch_bytes) == (True, MIB)
    assert not active.sampling
    assert running.offload(4 * MIB, codecs=(sample(0.5),)).codec == "", "the tier is empty again"
    assert running.end_pass().scratch_bytes is None


def test_without_room_for_codecs_a_crowded_pass_asks_once():
    running = Running(scratch=0)
    running.offload(5 * MIB)
    running.active.sample_now()
    running.offload(MIB, codecs=(sample(0.5),))
    assert (running.opened, running.active.crowded, running.active.sampling) == (1, False, False)
    assert running.end_pass().scratch_bytes == 0


def test_several_threads_find_a_pass_crowded_and_take_memory_once():
    running = Running()
    running.offload(5 * MIB)
    threads = [threading.Thread(target=running.active.sample_now) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert running.opened == 1


def test_crowding_is_ignored_where_no_codec_is_to_be_chosen_or_all_is_sampled():
    for changes in ({"samples_when_crowded": False}, {"samples": True}):
        running = Running()
        running.active.follow(replace(running.active.orders, **changes))
        running.offload(5 * MIB)
        assert not running.active.crowded


def test_codecs_without_memory_encode_nothing():
    running = Running()
    assert running.offload(5 * MIB, codecs=(sample(0.5),)).codec == ""


ENCODABLE = {"can_encode": True, "shortest": {key("a").match_key: sample(0.5)}}


def test_what_tiers_refuse_is_encoded_and_begins_a_shortage():
    running = Running(**ENCODABLE)
    active = running.active
    assert active.encoding_when_refused(record("a")) == Encoding("zero-value", "float32")
    assert active.shortage
    assert active.encoding_when_refused(record("b")) is None
    assert active.fallback_encoding(record("a")) == Encoding("zero-value", "float32")
    assert running.recorder.snapshot().counted("shortage") == 1
    assert running.end_pass().shortage
    assert not active.shortage
    assert not running.end_pass().shortage


def test_without_codecs_there_is_no_shortage():
    running = Running(**{**ENCODABLE, "can_encode": False})
    assert running.active.encoding_when_refused(record("a")) is None
    assert running.active.fallback_encoding(record("a")) is None
    assert not running.active.shortage


def test_slots_are_checked_while_orders_are_strict():
    running = Running()
    strict = replace(orders_of(offload("a")), strict=True, default=DefaultRule("flash", 1, True))
    running.active.follow(strict)
    assert running.active.decide(record("a")).tier == "flash"
    with pytest.raises(PlanError, match="another model"):
        running.active.decide(record("b"))
    running.active.follow(replace(strict, strict=False))
    assert running.active.decide(record("b")).reason == "not in the plan"


def test_the_input_of_a_recomputed_module_is_kept_until_it_has_a_name():
    running = Running()
    orders = orders_of(offload("b"), recompute("a"), recomputed=("a",))
    running.active.follow(replace(orders, default=DefaultRule("flash", 1 << 40, always=True)))
    unnamed = record("a" + INPUT)
    assert running.active.decide(unnamed).action is Action.KEEP
    assert running.active.decide_input(unnamed).reason == "not in the plan"
    assert running.active.decide_input(record("b")).reason == ""


def test_a_backward_without_saved_slots_ends_observing_until_another_pass_ends():
    running = Running(observes=True)
    assert running.active.observing
    running.active.end_empty_pass()
    assert not running.active.observing
    running.end_pass()
    assert running.active.observing
    running.active.follow(replace(orders_of(keep("a")), observes=True))
    running.active.end_empty_pass()
    assert running.active.observing, "there is a plan"


def test_the_record_of_a_pass_has_what_its_slots_have_shown():
    running = Running()
    finished = Pass(7, 10, 0)
    one = record("a", codecs=(sample(0.5),))
    one.needed_at_ns, one.waited_ns, one.frame_bytes, one.held_elsewhere = 90, 5, 100, True
    other = record("b")
    other.handles, other.sign_only_handles, other.source, other.recipe = 2, 2, one, ("b",)
    lost = record("c")
    lost.handles, lost.sign_only_handles = 2, 1
    lost.source, lost.recipe, lost.producer = record("gone"), ("c",), "c"
    finished.records = [one, other, lost]
    finished.kept_bytes, finished.small_bytes, finished.small_count = 3, 4, 5
    finished.promoted = finished.window_full = finished.observed = True
    finished.backward_start_ns, finished.end_ns = 50, 100
    finished.unrepeatable = frozenset("x")
    found = running.active.end_pass(finished, limit_bytes=9)
    first, second, third = found.slots
    assert (found.index, found.start_ns, found.backward_start_ns, found.end_ns) == (7, 10, 50, 100)
    assert (found.kept_bytes, found.small_bytes, found.small_count) == (3, 4, 5)
    assert found.promoted
    assert found.window_full
    assert found.observed
    assert (found.unrepeatable, found.limit_bytes) == ({"x"}, 9)
    assert (first.key, first.kind, first.dtype) == (key("a"), "Linear", "float32")
    assert (first.needed_at_ns, first.waited_ns, first.frame_bytes) == (90, 5, 100)
    assert first.held_elsewhere
    assert (first.codecs, first.signs_suffice, second.signs_suffice) == (
        (sample(0.5),),
        False,
        True,
    )
    assert (second.source, second.recipe) == (0, ("b",))
    assert (third.source, third.producer, third.signs_suffice) == (None, "c", False)
