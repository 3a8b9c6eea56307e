"""Who computes and who sleeps: never more than the budget, everybody in the end, each by its weight."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from policy_world import TICK_S, World, job, limits

from penstock.core.units import MIB
from penstock.jobs.policy import (
    LEAST_SLICE_S,
    MOVING_SHARE,
    JobPhase,
    PolicyTurn,
    decide,
    next_to_wake,
    prefetch_allowance,
)
from tries import tries

WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 3.0])


@given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=5),
    ticks_to_move=st.integers(1, 4),
    slice_s=st.sampled_from([0.5, 1.0, 3.0]),
)
@settings(max_examples=tries(60))
def test_who_cannot_be_together_share_time_by_weight_within_a_slice(
    weights, ticks_to_move, slice_s
):
    jobs = [job(f"j{i}", weight=weight) for i, weight in enumerate(weights)]
    world = World(limits(slice_s=slice_s, patience_s=1e9), jobs, ticks_to_move=ticks_to_move)
    for _ in range(300):
        world.tick()
        assert len(world.awake) <= 1
        begun = [each for each in jobs if each.turns]
        if len(begun) == len(jobs):
            shares = [each.awake_s / each.entry.weight for each in jobs]
            # one slice of the lightest, and the ticks in which a decision is carried out
            bound = (slice_s + 2 * TICK_S) / min(weights)
            assert max(shares) - min(shares) <= bound
    assert all(each.turns for each in jobs)


@given(ticks_to_move=st.integers(1, 6), count=st.integers(2, 3))
@settings(max_examples=8, deadline=None)
def test_unless_a_slice_is_given_moving_takes_a_small_part_of_the_time(ticks_to_move, count):
    move_s = 2 * ticks_to_move * TICK_S
    jobs = [job(f"j{i}", move_s=move_s) for i in range(count)]
    world = World(limits(slice_s=None, patience_s=1e9), jobs, ticks_to_move=ticks_to_move)
    slice_s = max(LEAST_SLICE_S, move_s / MOVING_SHARE)
    for _ in range(int(6 * count * slice_s / TICK_S)):
        world.tick()
    turns = sum(each.turns for each in jobs)
    assert 4 * count <= turns <= 6 * count
    lost_s = move_s + 2 * TICK_S  # and the ticks in which a decision is carried out
    assert world.idle_s <= lost_s * (turns + 1)


@given(slice_s=st.sampled_from([None, 30.0]), weight=st.sampled_from([2.0, 3.0]))
def test_weights_and_priorities_count_though_turns_are_long(slice_s, weight):
    shared = limits(slice_s=slice_s, patience_s=None)
    jobs = [job("heavy", weight=weight, move_s=2.0), job("light", move_s=2.0)]
    jobs.append(job("low", priority=-1, move_s=2.0))
    world = World(shared, jobs)
    for _ in range(int(1500 / TICK_S)):
        world.tick()
    heavy, light, low = (each.awake_s for each in jobs)
    assert heavy == pytest.approx(weight * light, rel=0.2)
    assert 0 < low < 0.2 * light


def test_a_turn_of_several_is_as_long_as_the_moving_of_all_of_them_asks_for():
    entries = [job(name, 45, move_s=2.0, phase=JobPhase.AWAKE).entry for name in "ab"]
    waits = job("c", 60, phase=JobPhase.ASLEEP).entry
    shared = limits(slice_s=None)

    def chosen_after(spent_s):
        turn = PolicyTurn(chosen=frozenset("ab"), spent_s=spent_s)
        tired = [replace(each, virtual_s=100.0) for each in entries]
        return decide([*tired, waits], turn, shared).turn.chosen

    assert chosen_after(4.0 / MOVING_SHARE - 0.1) == {"a", "b"}
    assert chosen_after(4.0 / MOVING_SHARE) == {"c"}


@given(
    needs=st.lists(st.integers(5, 85), min_size=1, max_size=6),
    rests=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    priorities=st.lists(st.integers(-1, 1), min_size=6, max_size=6),
    ticks_to_move=st.integers(1, 3),
    flash=st.sampled_from([10**6, 200, 100]),
)
@settings(max_examples=tries(200))
def test_all_come_to_an_end_within_the_budget_and_nobody_waits_too_long(
    needs, rests, priorities, ticks_to_move, flash
):
    jobs = [
        job(f"j{i}", need, rest=rests[i], priority=priorities[i], left_s=6.0)
        for i, need in enumerate(needs)
    ]
    shared = limits(slice_s=1.0, patience_s=8.0, flash=flash)
    world = World(shared, jobs, ticks_to_move=ticks_to_move)
    turn_s = shared.slice_s + (2 * ticks_to_move + 2) * TICK_S
    bound = shared.patience_s + (len(jobs) + 1) * turn_s
    for _ in range(1000):
        world.tick()
        assert world.charged_bytes <= shared.memory_bytes
        assert sum(each.held_bytes for each in world.entries) <= shared.memory_bytes
        begun = [each for each in jobs if each.entry.phase not in (JobPhase.WAITING, JobPhase.OVER)]
        assert sum(each.entry.need_bytes for each in begun) <= flash or len(begun) == 1
        for each in begun:  # who may not begin yet waits for others to be over
            if each.awake_s:
                assert each.entry.waited_s <= bound
        if all(each.entry.phase is JobPhase.OVER for each in jobs):
            return
    raise AssertionError([(each.name, each.entry.phase, each.left_s) for each in jobs])


def test_who_comes_second_waits_for_its_turn_from_the_first_decision_on():
    """And is not told of a machine that has room: who comes first is about to take it."""
    world = World(limits(), [job("a", 60), job("b", 60)])
    world.tick()
    assert world.decision.wake == ("a",)
    assert world.decision.notes["b"] == "waits for its turn"


def test_two_small_ones_are_awake_together():
    world = World(limits(), [job("a", 45), job("b", 45), job("c", 60)])
    together = 0
    for _ in range(200):
        world.tick()
        together += world.awake == {"a", "b"}
    assert together > 50
    assert all(each.awake_s > 10 for each in world.jobs.values())


def test_a_large_one_is_not_passed_over_for_ever_by_small_ones():
    world = World(limits(), [job("small", 30), job("other", 30), job("large", 95)])
    for _ in range(400):
        world.tick()
    shares = {name: each.awake_s for name, each in world.jobs.items()}
    assert shares["large"] >= 0.4 * shares["small"]


def test_a_higher_priority_goes_first_at_once_and_alone():
    world = World(limits(slice_s=50.0, patience_s=1000.0), [job("low"), job("low too")])
    for _ in range(20):
        world.tick()
    assert world.awake
    world.add(job("high", priority=1, left_s=20.0))
    for _ in range(6):
        world.tick()
    assert world.awake == {"high"}
    while world.jobs["high"].entry.phase is not JobPhase.OVER:
        assert world.awake <= {"high"}
        world.tick()
    for _ in range(10):
        world.tick()
    assert world.awake <= {"low", "low too"}
    assert world.awake


def test_a_low_priority_has_a_turn_when_it_has_waited_long_enough():
    shared = limits(slice_s=2.0, patience_s=10.0)
    world = World(shared, [job("low"), job("high", priority=5)])
    for _ in range(1000):
        world.tick()
    low, high = world.jobs["low"], world.jobs["high"]
    assert low.longest_wait_s <= shared.patience_s + shared.slice_s + 6 * TICK_S
    assert low.turns > 10
    assert low.awake_s >= low.turns * (shared.slice_s - TICK_S)  # whole turns, not cut short
    assert high.awake_s > 3 * low.awake_s


def test_nobody_is_woken_before_the_memory_is_seen_to_be_back():
    leaving = job("a", phase=JobPhase.SUSPENDING).entry
    waits = job("b", phase=JobPhase.ASLEEP).entry
    turn = PolicyTurn(chosen=frozenset("b"))
    assert decide([leaving, waits], turn, limits()).wake == ()
    holds_still = job("a", phase=JobPhase.ASLEEP, held_bytes=50).entry
    assert decide([holds_still, waits], turn, limits()).wake == ()
    gone = job("a", phase=JobPhase.ASLEEP, held_bytes=3, rest=3).entry
    assert decide([gone, waits], turn, limits()).wake == ("b",)


def test_who_cannot_sleep_goes_on_and_others_are_told_why():
    stuck = job("a", phase=JobPhase.AWAKE, fixed=True, virtual_s=99.0, held_bytes=60).entry
    decided = decide([stuck, job("b").entry], PolicyTurn(), limits())
    assert decided.sleep == decided.wake == ()
    assert "'a', which cannot sleep now" in decided.notes["b"]


def test_a_job_that_holds_more_than_there_is_puts_another_to_sleep():
    grown = job("a", 70, phase=JobPhase.AWAKE, held_bytes=70, virtual_s=5.0).entry
    other = job("b", 40, phase=JobPhase.AWAKE, held_bytes=40).entry
    decided = decide([grown, other], PolicyTurn(chosen=frozenset("ab")), limits())
    assert len(decided.sleep) == 1


def test_without_flash_nobody_sleeps_and_others_wait():
    world = World(limits(flash=None), [job("a", left_s=5.0), job("b", left_s=5.0)])
    for _ in range(10):
        world.tick()
        assert world.awake <= {"a"}
    assert "without flash" in world.decision.notes["b"]
    for _ in range(60):
        world.tick()
    assert world.jobs["b"].entry.phase is JobPhase.OVER
    assert world.jobs["a"].turns == 1


def test_who_would_block_others_for_ever_does_not_begin():
    world = World(limits(), [job("a", 90, rest=5, left_s=3.0), job("b", 20, rest=15, left_s=3.0)])
    world.tick()
    assert "'a' would no longer fit" in world.decision.notes["b"]
    for _ in range(60):
        world.tick()
    assert all(each.entry.phase is JobPhase.OVER for each in world.jobs.values())


def test_more_jobs_than_flash_are_told_the_figures():
    world = World(limits(flash=100), [job("a"), job("b")])
    world.tick()
    assert "up to 120 B of memory would go to flash, which has 100 B" in world.decision.notes["b"]


def test_memory_of_a_device_is_shared_out_too():
    jobs = [job("a", 10, device_bytes=60), job("b", 10, device_bytes=60), job("c", 10)]
    world = World(limits(device=100), jobs)
    for _ in range(100):
        world.tick()
        assert not {"a", "b"} <= world.awake
    assert min(each.awake_s for each in jobs[:2]) > 5
    assert jobs[2].awake_s > 20


def test_who_is_next_can_be_told():
    now = job("a", phase=JobPhase.AWAKE, held_bytes=60, virtual_s=1.0).entry
    later = [job(n, phase=JobPhase.ASLEEP, virtual_s=v).entry for n, v in (("b", 3.0), ("c", 2.0))]
    turn = PolicyTurn(chosen=frozenset("a"), spent_s=1.5)
    assert next_to_wake([now, *later], turn, limits(slice_s=5.0)).name == "c"


def test_what_is_spare_is_lent_to_who_is_next():
    now = job("a", 600 * MIB, phase=JobPhase.AWAKE, held_bytes=600 * MIB, virtual_s=1.0).entry
    sleeps = {"phase": JobPhase.ASLEEP, "rest": 20 * MIB, "held_bytes": 20 * MIB}
    later = [job(n, 600 * MIB, virtual_s=v, **sleeps).entry for n, v in (("b", 3.0), ("c", 2.0))]
    turn, machine = PolicyTurn(chosen=frozenset("a"), spent_s=0.5), limits(1000 * MIB)
    rests = {"a": 0, "b": 580 * MIB, "c": 580 * MIB}
    name, nbytes = prefetch_allowance([now, *later], turn, machine, rests)
    assert (name, nbytes) == ("c", 344 * MIB)
    lent = [now, later[0], replace(later[1], fetch_bytes=nbytes)]
    assert sum(each.charge_bytes for each in lent) <= machine.memory_bytes
    assert prefetch_allowance(lent, turn, machine, rests) == ("c", nbytes)
    assert prefetch_allowance([now, *later], turn, limits(700 * MIB), rests) is None
    assert prefetch_allowance([now], turn, machine, rests) is None


class Meddling(RuleBasedStateMachine):
    """Whatever is done to jobs, the budget holds and who can run does."""

    def __init__(self):
        super().__init__()
        self.world = World(limits(slice_s=1.0, patience_s=5.0), [])
        self.count = 0

    def named(self, phase=None):
        return [
            each
            for each in self.world.jobs.values()
            if each.entry.phase is not JobPhase.OVER and phase in (None, each.entry.phase)
        ]

    @rule(need=st.integers(5, 90), priority=st.integers(0, 2), weight=WEIGHTS)
    def comes(self, need, priority, weight):
        self.count += 1
        made = job(f"j{self.count}", need, rest=2, priority=priority, weight=weight)
        self.world.add(made)

    @rule(ticks=st.integers(1, 12))
    def passes(self, ticks):
        for _ in range(ticks):
            self.world.tick()
            assert self.world.charged_bytes <= 100

    @precondition(lambda self: self.named())
    @rule(data=st.data(), back=st.booleans())
    def is_held_back_or_not(self, data, back):
        data.draw(st.sampled_from(self.named())).set(held_back=back)

    @precondition(lambda self: self.named())
    @rule(data=st.data(), cannot=st.booleans())
    def cannot_sleep_or_can(self, data, cannot):
        data.draw(st.sampled_from(self.named())).set(fixed=cannot)

    @precondition(lambda self: self.named(JobPhase.AWAKE) or self.named(JobPhase.ASLEEP))
    @rule(data=st.data())
    def ends(self, data):
        able = self.named(JobPhase.AWAKE) + self.named(JobPhase.ASLEEP)
        self.world.end(data.draw(st.sampled_from(able)).name)

    @precondition(lambda self: self.named(JobPhase.ASLEEP))
    @rule(data=st.data())
    def is_to_be_stopped(self, data):
        chosen = data.draw(st.sampled_from(self.named(JobPhase.ASLEEP)))
        chosen.set(urgent=True)
        for each in self.named():
            each.set(fixed=False)
        for _ in range(40):
            self.world.tick()
            if chosen.entry.phase is JobPhase.AWAKE:
                break
        assert chosen.entry.phase is JobPhase.AWAKE
        self.world.end(chosen.name)

    @invariant()
    def somebody_runs(self):
        able = [each for each in self.named() if not each.entry.held_back]
        if not able:
            return
        for _ in range(12):
            self.world.tick()
            if self.world.awake:
                return
        raise AssertionError([each.entry for each in able])


class TestMeddling(Meddling.TestCase):
    settings = settings(max_examples=tries(60), stateful_step_count=30)


@pytest.mark.parametrize("phase", list(JobPhase))
def test_there_is_a_decision_in_every_phase(phase):
    entries = [job("a", phase=phase).entry, job("b", phase=phase, held_back=True).entry]
    decided = decide(entries, PolicyTurn(), limits())
    assert not set(decided.sleep) & set(decided.wake)
