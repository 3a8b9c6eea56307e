"""Reads that came late begin earlier: ``prefetch_tuning``, and the triggers that it moves."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from offload_runs import GatedTier, counted, wait_for_writes
from penstock.core.units import MIB
from penstock.observe.events import Mark
from penstock.plan import Action, Budgets, Decision, Plan, SlotKey
from penstock.runtime.orders import PassRecord, SlotOutcome
from penstock.runtime.prefetch_tuning import improve
from penstock.store.throttled import ThrottledTier
from recompute_plans import FLASH, following, profiled

MS = 1_000_000


def key(name):
    return SlotKey(name, 0, MIB)


def plan_of(triggers, *, window_bytes=2 * MIB, device_bytes=8 * MIB):
    """Slots a, b, c, ... in the order of need; ``triggers`` by name, those not named are kept."""
    decisions = []
    for name in "abcdefgh":
        if name in triggers:
            at = triggers[name]
            decisions.append(Decision(key(name), Action.OFFLOAD, FLASH, "", prefetch_at=at))
        else:
            decisions.append(Decision(key(name), Action.KEEP, "", ""))
    return Plan(
        policy="by hand",
        budgets=Budgets(device_bytes=device_bytes, flash_bytes=1 << 40),
        decisions=tuple(decisions),
        need_order=tuple(key(name) for name in "abcdefgh"),
        window_bytes=window_bytes,
    )


def finished(waits=(), *, window_full=False):
    """A pass whose backward asks for a slot every 10 ms, from 10 ms on."""
    waits = dict(waits)
    slots = tuple(
        SlotOutcome(key(name), "Linear", "float32", 0, 10 * MS * (n + 1), waits.get(name, 0))
        for n, name in enumerate("abcdefgh")
    )
    return PassRecord(1, 0, 10 * MS, 100 * MS, slots, window_full=window_full)


def triggers(plan):
    return {d.key.module: d.prefetch_at for d in plan.decisions if d.action is Action.OFFLOAD}


def test_what_came_in_time_changes_nothing():
    assert improve(plan_of({"f": 4, "g": 5}), finished()) is None


def test_a_wait_that_is_nothing_beside_the_pass_changes_nothing():
    assert improve(plan_of({"f": 4}), finished({"f": 300_000})) is None


@pytest.mark.parametrize(("waited_ms", "place"), [(1, 3), (9, 2), (20, 1), (24, 1), (60, None)])
def test_a_late_read_begins_earlier_by_the_wait_and_a_quarter(waited_ms, place):
    """Its trigger was at place 4, which backward came to at 50 ms."""
    found = improve(plan_of({"f": 4}), finished({"f": waited_ms * MS}))
    assert triggers(found.plan) == {"f": place}
    assert found.moved == 1
    assert found.window_grown_bytes == 0


def test_what_is_read_before_it_does_not_begin_later():
    found = improve(plan_of({"e": 3, "f": 3, "g": 4, "h": 6}), finished({"g": 15 * MS}))
    assert triggers(found.plan) == {"e": 2, "f": 2, "g": 2, "h": 6}
    assert found.moved == 3


def test_a_read_that_may_begin_at_once_cannot_begin_earlier():
    assert improve(plan_of({"f": None}), finished({"f": 20 * MS})) is None


def test_the_window_grows_by_what_came_late_where_it_was_full():
    found = improve(plan_of({"f": None}), finished({"f": 20 * MS}, window_full=True))
    assert found.plan.window_bytes == 3 * MIB
    assert found.window_grown_bytes == MIB
    assert found.moved == 0


def test_the_window_does_not_grow_over_the_budget():
    plan = plan_of({"f": None}, window_bytes=2 * MIB, device_bytes=2 * MIB)
    assert improve(plan, finished({"f": 20 * MS}, window_full=True)) is None


def test_the_window_leaves_room_for_what_is_made_again_in_backward():
    plan = replace(plan_of({"f": None}), widest_bytes=2 * MIB + 4096)
    found = improve(plan, finished({"f": 20 * MS}, window_full=True))
    assert found.window_grown_bytes == 4096
    assert improve(found.plan, finished({"f": 20 * MS}, window_full=True)) is None


def test_slots_that_were_not_planned_to_move_are_no_reason():
    """Evicted because memory was full: no trigger is theirs."""
    assert improve(plan_of({}), finished({"f": 50 * MS}, window_full=True)) is None


# -- in sessions ----------------------------------------------------------------------------------


@pytest.fixture
def disk(disk_path, small_knobs, one_thread):
    return disk_path


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh())))


def run(model, steps=1):
    for step in range(steps):
        rows = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
        model(rows).square().mean().backward()


def offloading(session_for, at):
    """A plan by which everything goes to flash, and comes back from place ``at(rank)`` on."""
    model = layers()
    plan, profile = profiled(session_for, model, lambda: run(model))
    ranks = {slot.match_key: rank for rank, slot in enumerate(plan.need_order)}
    decisions = tuple(
        Decision(d.key, Action.OFFLOAD, FLASH, "", prefetch_at=at(ranks[d.key.match_key]))
        for d in plan.decisions
    )
    return replace(plan, decisions=decisions, window_bytes=profile.saved_bytes)


def test_reads_begin_no_sooner_than_their_trigger(session_for, disk):
    """Each when the one before it is asked for: never two ahead, though the window has room for all."""
    plan = offloading(session_for, lambda rank: max(0, rank - 1))
    model = layers()
    places = {key.match_key: rank for rank, key in enumerate(plan.need_order)}
    with following(disk, plan, model) as session:
        loss = model(torch.randn(512, 64)).square().mean()
        wait_for_writes(session)
        asked, early = [], []
        executor = session.executor
        note, fetch = executor._note_need, executor._transfers.fetch

        def needing(saved):
            asked.append(places[saved.record.key.match_key])
            return note(saved)

        def fetching(saved, priority, **options):
            early.append(places[saved.record.key.match_key] - max(asked))
            return fetch(saved, priority, **options)

        executor._note_need, executor._transfers.fetch = needing, fetching
        loss.backward()
        assert set(early) == {0, 1}


def test_without_triggers_reads_begin_as_soon_as_the_window_has_room(session_for, disk):
    plan = offloading(session_for, lambda rank: None)
    model = layers()
    with following(disk, plan, model) as session:
        loss = model(torch.randn(512, 64)).square().mean()
        wait_for_writes(session)
        begun = []
        executor = session.executor
        fetch, note = executor._transfers.fetch, executor._note_need

        def fetching(saved, priority, **options):
            begun.append(needs[0])
            return fetch(saved, priority, **options)

        def needing(saved):
            needs[0] += 1
            return note(saved)

        needs = [0]
        executor._note_need, executor._transfers.fetch = needing, fetching
        loss.backward()
        assert begun.count(1) >= len(plan.decisions) - 1, "all at the first need"


def test_reads_ahead_keep_to_the_window(session_for, disk):
    """While backward waits for the first of many slots, no more are on their way than have room."""
    slot_bytes, most = 512 * 64 * 4, 4
    plan = replace(offloading(session_for, lambda rank: None), window_bytes=most * slot_bytes)
    assert len(plan.decisions) > 2 * most
    gates, begun = [], []

    def wrap(tier):
        gates.append(GatedTier(tier, "read"))
        return gates[0]

    def open_later():
        gate = gates[0]
        gate.arrived["read"].wait(20)
        for _ in range(30):  # as long as there could come more
            begun.append(gate.waiting("read"))
            time.sleep(0.01)
        gate.open("read")

    model = layers()
    session = following(disk, plan, model)
    session.wrap_tier = wrap
    with session:
        loss = model(torch.randn(512, 64)).square().mean()
        wait_for_writes(session)
        opener = threading.Thread(target=open_later)
        opener.start()
        loss.backward()
        opener.join()
    assert 1 < max(begun) <= most


def test_triggers_that_are_too_late_move_and_the_summary_tells(session_for, disk, tmp_path):
    """Flash so slow that a read of 128 KiB takes 4 ms; each begins only when it is needed."""
    plan = offloading(session_for, lambda rank: rank)
    model = layers()
    slow = lambda tier: ThrottledTier(  # noqa: E731
        tier, write_bytes_per_s=1e9, read_bytes_per_s=32 * MIB, latency_s=0
    )
    log = tmp_path / "events.jsonl"
    session = following(disk, plan, model, event_log=log)
    session.wrap_tier = slow
    with session:
        for _ in range(4):
            loss = model(torch.randn(512, 64)).square().mean()
            wait_for_writes(session)
            loss.backward()
        summary = session.summary()
        assert summary.triggers_moved > 0
        assert summary.to_json()["triggers_moved"] == counted(session, "prefetch.moved_earlier")
        assert "moved to begin earlier" in str(summary)
        marks = [e for e in session.recorder.events() if isinstance(e, Mark)]
        assert [mark.name for mark in marks].count("read_earlier") >= 1
        first = {d.key: d.prefetch_at for d in plan.decisions}
        now = {d.key: d.prefetch_at for d in session.plan.decisions}
        assert any(now[k] is None or now[k] < first[k] for k in first)
        assert not any(now[k] is not None and now[k] > first[k] for k in first)
    assert '"read_earlier"' in log.read_text()
