"""Storages that a plan keeps: only counted, until room is needed; then as ready to go as any other."""

import gc
import re
import threading

import pytest
import torch

from offload_runs import (
    assert_nothing_held,
    assert_within_budget,
    counted,
    gradients,
    movable,
    promote_kept,
    read_bytes,
    same_bits,
    slots,
    wait_for_writes,
    written_bytes,
)
from penstock.core.errors import InPlaceError
from penstock.core.units import KIB, MIB
from penstock.observe.recorder import Stage
from penstock.runtime.storage import Residency

ROOMY = {"policy": "auto", "device_memory": 4 * MIB, "codec": "none"}
"""The chain of eight below fits, with as much again to spare."""
TIGHT = {"policy": "auto", "device_memory": 10 * MIB, "codec": "none"}
"""Of eight storages of 2 MiB some fit."""
WIDE = 64 * KIB
"""Floats of a storage of 256 KiB."""


def leaf(seed=0, count=WIDE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).requires_grad_()


def chain(start, length=8, saved=lambda: None):
    """Saves ``length`` storages, which nobody else holds, and none twice; calls ``saved`` after each."""
    value = start * 1.5
    for _ in range(length):
        value = torch.sin(value)
        saved()
    return value.sum()


def learnt(session, start, passes=2):
    """A session that has its plan, and has been asked for every slot once."""
    for _ in range(passes):
        found = gradients(lambda: chain(start), [start])
    assert session.executor.orders.kept
    return found


def kept_of(session):
    return [slot for slot in slots(session) if slot.state == "kept"]


def test_what_the_plan_keeps_is_only_counted(session_for):
    start = leaf()
    expected = gradients(lambda: chain(start), [start])
    with session_for(**ROOMY) as session:
        learnt(session, start)
        loss = chain(start)
        assert len(kept_of(session)) == 8
        assert len(slots(session)) == 8
        assert session.budget.used_bytes == 8 * WIDE * 4
        assert same_bits(gradients(loss, [start])[0], expected[0])
        assert written_bytes(session) == 0
        assert session.planner.replans == 1
        del loss
        assert_nothing_held(session)
        assert not kept_of(session)


def test_they_go_when_room_is_needed(session_for):
    """The plan knows nothing of what comes after: what it kept makes room, to the last bit."""
    start, other = leaf(), leaf(1, 2 * WIDE)
    expected = gradients(lambda: chain(start) + chain(other, 7), [start, other])
    with session_for(**{**ROOMY, "policy": "keep"}) as session:
        learnt(session, start)
        loss = chain(start)
        assert len(kept_of(session)) == 8
        loss = loss + chain(other, 7)
        assert not kept_of(session), "one had to go, so all are ready to"
        assert counted(session, "evicted") > 0
        assert written_bytes(session) > 0
        found = gradients(loss, [start, other])
        assert all(map(same_bits, found, expected))
        assert_within_budget(session)
        del loss
        assert_nothing_held(session)


def test_what_is_needed_last_goes_first(session_for):
    """In forward that is what was saved first: it has the longest way back."""
    start, other = leaf(), leaf(1, 2 * WIDE)
    with session_for(**{**ROOMY, "policy": "keep"}) as session:
        learnt(session, start)
        loss = chain(start)
        loss = loss + chain(other, 7)
        wait_for_writes(session)
        spans = [e for e in session.recorder.events() if getattr(e, "stage", "") == Stage.WRITE]
        written = sorted(int(re.search(r"#(\d+)", span.slot)[1]) for span in spans)
        assert len(written) >= 3
        assert written == list(range(len(written)))
        gradients(loss, [start, other])


def test_after_that_all_slots_are_recorded_again(session_for):
    start, other = leaf(), leaf(1, 2 * WIDE)
    with session_for(**ROOMY) as session:
        learnt(session, start)
        gradients(lambda: chain(start) + chain(other, 7), [start, other])
        assert session.planner.replans == 1, "no plan is made of a pass with gaps"
        assert not session.executor.orders.kept
        gradients(lambda: chain(start) + chain(other, 7), [start, other])
        assert session.planner.replans == 2
        assert len(session.profile.slots) == 15


def test_a_pass_that_only_differs_is_recorded_again_too(session_for):
    start, other = leaf(), leaf(1, 2 * WIDE)
    with session_for(**{**ROOMY, "device_memory": 16 * MIB}) as session:
        learnt(session, start)
        for _ in range(2):
            gradients(lambda: chain(start) + chain(other, 3), [start, other])
        assert written_bytes(session) == 0
        assert session.planner.replans == 2
        assert len(session.profile.slots) == 11


def test_two_kinds_of_passes_in_turn(session_for):
    """A GAN's: neither loses its plan by the other, and both end up counted only."""
    start, other = leaf(), leaf(1, 2 * WIDE)
    with session_for(**{**ROOMY, "device_memory": 16 * MIB}) as session:
        for _ in range(24):
            gradients(lambda: chain(start), [start])
            gradients(lambda: chain(other, 5), [other])
        replans = session.planner.replans
        one = chain(start)
        assert len(kept_of(session)) == 8
        one.backward()
        del one
        two = chain(other, 5)
        assert len(kept_of(session)) == 5
        two.backward()
        assert session.planner.replans == replans <= 3


def test_in_a_mixed_plan_reads_are_issued_on_time(session_for):
    """The tail is kept and needed first: its unpacking is when reading has to begin.

    Writes end at once here, and no idle page takes room: else some of the tail may not be kept, and what
    is being written when it is looked at is not read ahead.
    """
    start = leaf(count=8 * WIDE)
    expected = gradients(lambda: chain(start), [start])
    with session_for(**TIGHT) as session:
        learnt(session, start, passes=3)
        missed = counted(session, "prefetch.missed")
        for _ in range(4):
            session.executor._mover.trim(session.budget.limit_bytes)
            loss = chain(start, saved=lambda: wait_for_writes(session))
            kept = [slot.key.ordinal for slot in kept_of(session)]
            assert kept == list(range(kept[0], 8))  # how many depends on what was measured
            assert kept[0] > 0
            assert any(slot.tier for slot in slots(session))
            assert same_bits(gradients(loss, [start])[0], expected[0])
            del loss
        assert counted(session, "prefetch.missed") == missed
        assert read_bytes(session) > 0
        assert_within_budget(session)
        assert_nothing_held(session)


def test_nothing_goes_if_room_has_come_meanwhile(session_for, monkeypatch):
    """A write may end between the moment when there was no room and that when some is to be made."""
    start = leaf()
    with session_for(**ROOMY) as session:
        learnt(session, start)
        loss = chain(start)
        budget, executor = session.budget, session.executor
        filler = budget.free_bytes
        assert budget.try_take(filler, "filler")

        def trim(nbytes):
            if budget.used_by("filler"):
                budget.free(filler, "filler")
            return 0

        monkeypatch.setattr(executor._mover, "trim", trim)
        executor._eviction.take(KIB, "test", name="it", of_pass=executor._pass, saved=None)
        assert len(kept_of(session)) == 8
        assert counted(session, "evicted") == 0
        budget.free(KIB, "test")
        del loss
        assert_nothing_held(session)


def test_several_handles_are_one_storage(session_for):
    start = leaf()

    def twice():
        value = start * 1.5
        return (value.sin() + value.cos() + value.view(-1, 2).exp().view(-1)).sum()

    expected = gradients(twice, [start])
    with session_for(**ROOMY) as session:
        for _ in range(2):
            gradients(twice, [start])
        loss = twice()
        handles = sorted(kept.handles for kept in kept_of(session))
        assert handles == [1, 2], "sine and cosine share one; exp saved what it returned"
        assert same_bits(gradients(loss, [start])[0], expected[0])
        del loss
        assert_nothing_held(session)


@pytest.mark.parametrize("promoted", [False, True])
def test_trap_1_a_kept_tensor_that_was_modified_is_found_out(session_for, promoted):
    start = leaf()
    with session_for(**ROOMY) as session:

        def changed(change):
            value = start * 1.5
            loss = value.sin().sum()
            if promoted and session.executor.orders.kept:
                promote_kept(session)
            if change:
                value.mul_(2.0)
            return loss

        for _ in range(2):
            gradients(lambda: changed(False), [start])
        loss = changed(True)
        with pytest.raises(InPlaceError, match="modified by an inplace"):
            loss.backward()
        del loss
        gc.collect()


@pytest.mark.parametrize("promoted", [False, True])
def test_a_storage_at_two_versions_is_two(session_for, promoted):
    """The later one is right although the earlier is still held, and the earlier is found out."""
    weight = leaf()

    def run(session=None):
        value = leaf(1).detach() * 2.0
        early = (value * weight).sum()
        value.add_(1.0)
        late = (value * weight).sum()
        if session is not None:
            assert len(kept_of(session)) == 2
            if promoted:
                promote_kept(session)
        found = gradients(late, [weight])[0]
        with pytest.raises((InPlaceError, RuntimeError), match="modified by an inplace"):
            early.backward()
        return found

    expected = run()
    with session_for(**ROOMY) as session:
        for _ in range(2):
            run()
        assert same_bits(run(session), expected)


@pytest.mark.parametrize("promoted", [False, True])
def test_a_graph_can_be_walked_twice(session_for, promoted):
    start = leaf()
    expected = gradients(lambda: chain(start), [start])
    with session_for(**ROOMY) as session:
        learnt(session, start)
        loss = chain(start)
        loss.backward(retain_graph=True)
        if promoted:
            promote_kept(session)
        start.grad = None
        loss.backward()
        assert same_bits(start.grad, expected[0])
        del loss
        assert_nothing_held(session)


def test_a_graph_that_is_dropped_gives_everything_back(session_for):
    start = leaf()
    with session_for(**ROOMY) as session:
        learnt(session, start)
        index = session.inspect().device.pass_index
        loss = chain(start)
        del loss
        assert_nothing_held(session)
        gradients(lambda: chain(start), [start])
        assert session.inspect().device.pass_index == index + 2, (
            "the dropped one was a pass of its own"
        )
        assert session.planner.replans == 1


def test_a_graph_outlives_its_session(session_for):
    start = leaf()
    expected = gradients(lambda: chain(start), [start])
    with session_for(**ROOMY) as session:
        learnt(session, start)
        loss = chain(start)
    assert same_bits(gradients(loss, [start])[0], expected[0])


def test_promotion_while_others_unpack(session_for):
    """Promoted and spilled between any two unpackings by another thread: the same bits."""
    start = leaf()
    expected = gradients(lambda: chain(start, 40), [start])
    with session_for(**{**ROOMY, "device_memory": 64 * MIB}) as session:
        for _ in range(2):
            gradients(lambda: chain(start, 40), [start])
        executor = session.executor
        orders = executor.orders
        done = threading.Event()

        def disturb():
            while not done.is_set():
                promote_kept(session)
                victims = [
                    saved
                    for saved in movable(session).values()
                    if saved.state is Residency.RESIDENT
                ]
                for saved in victims:
                    executor._eviction._evict(saved)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            for _ in range(20):
                executor.follow(orders)
                loss = chain(start, 40)
                assert same_bits(gradients(loss, [start])[0], expected[0])
                del loss
        finally:
            done.set()
            thread.join()
        assert written_bytes(session) > 0
        assert_nothing_held(session)


def test_one_pass_of_several_losses(session_for):
    """What was kept first makes room for what comes last."""
    start, other = leaf(), leaf(1, 2 * WIDE)
    expected = gradients(lambda: chain(start) + chain(start) + chain(other, 7), [start, other])
    with session_for(**{**ROOMY, "policy": "keep"}) as session:
        learnt(session, start)
        first = chain(start)
        assert len(kept_of(session)) == 8
        total = first + chain(start) + chain(other, 7)
        assert not kept_of(session)
        assert all(map(same_bits, gradients(total, [start, other]), expected))
        assert_within_budget(session)
        del first, total
        assert_nothing_held(session)
