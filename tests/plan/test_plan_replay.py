"""A replayed step, by hand: what waits for what, and how long."""

from dataclasses import replace

import pytest
from plan_profiles import MACHINE, MB, MS, encodable, network, stack

from penstock.plan import (
    Action,
    Budgets,
    CodecSample,
    Decision,
    Machine,
    PassProfile,
    Plan,
    Profile,
    SlotKey,
    SlotProfile,
    Transient,
    policies,
)
from penstock.plan.groups import need_order
from penstock.plan.replay import replay
from penstock.plan.service import Service

AMPLE = 10**12


def plan_of(profile, tiers, *, device=AMPLE, window=AMPLE, codecs=(), prefetch_at=(), budgets=None):
    """Slots by index to the tier they go to, the others kept."""
    codecs, prefetch_at = dict(codecs), dict(prefetch_at)
    decisions = []
    for i, slot in enumerate(profile.slots):
        if i in tiers:
            codec = codecs.get(i, "")
            ratio = next((s.ratio for s in slot.codecs if s.codec == codec), 1.0)
            one = Decision(slot.key, Action.OFFLOAD, tiers[i], "", codec, ratio, prefetch_at.get(i))
        else:
            one = Decision(slot.key, Action.KEEP, "", "")
        decisions.append(one)
    return Plan(
        "by hand",
        budgets or Budgets(device, AMPLE, AMPLE),
        tuple(decisions),
        need_order(profile),
        window,
    )


def flash(*indices):
    return dict.fromkeys(indices, "flash")


def test_what_is_kept_costs_no_time_and_all_its_memory():
    profile = stack([3, 4, 5], small_bytes=7)
    found = replay(profile, policies.get("keep")(profile, MACHINE, Budgets(AMPLE)), MACHINE)
    assert found.step_ns == found.ideal_ns == 60 * MS
    assert (found.peak_bytes, found.feasible) == (12 * MB + 7, True)
    # from its save until the next node, or the end: 60, 40 and 20 ms
    assert found.average_bytes == 7 + (3 * 60 + 4 * 40 + 5 * 20) * MB // 60
    assert found.flash.written_bytes == found.stall_ns == 0


def test_a_first_need_is_read_while_backward_waits_and_the_others_ahead():
    # 10 MB are 10 ms on flash, as long as a layer takes
    profile = stack([10, 10, 10, 1])
    found = replay(profile, plan_of(profile, flash(0, 1, 2)), MACHINE)
    # slot 3 is kept, and needed first, at 40 ms: then slot 2 is read, until 50, when it is needed
    assert (found.step_ns, found.stall_ns) == (80 * MS, 0)
    assert found.flash.read_bytes == found.flash.written_bytes == 30 * MB
    found = replay(profile, plan_of(profile, flash(0, 1, 2, 3)), MACHINE)
    # nothing is asked for before slot 3 at 40 ms, whose write goes on until 31: 1 ms of waiting
    assert (found.demand_ns, found.late_ns, found.step_ns) == (MS, 0, 81 * MS)


def test_a_late_read_is_waited_for_to_its_end():
    slow = replace(MACHINE, flash_read_bytes_per_s=0.5e9)  # 20 ms for 10 MB
    profile = stack([10, 10, 10, 1])
    found = replay(profile, plan_of(profile, flash(0, 1, 2)), slow)
    # asked for at 40, 50, 60 and 70 ms; reads end 60, 80 and 100; each is waited for 10 ms
    assert (found.late_ns, found.demand_ns, found.step_ns) == (30 * MS, 0, 110 * MS)
    assert found.flash_read_ns == 60 * MS


def test_latency_is_waited_for_and_occupies_nothing():
    slow = replace(MACHINE, flash_latency_s=0.003)
    profile = stack([10, 10, 10, 1])
    found = replay(profile, plan_of(profile, flash(0, 1, 2)), slow)
    # read from 40 to 50, 60, 70, each there 3 ms later; after the first wait all is 3 ms later
    assert (found.late_ns, found.step_ns) == (3 * MS, 83 * MS)
    assert found.flash_read_ns == found.flash_write_ns == 30 * MS


def test_a_flat_service_curve_is_a_bandwidth_and_a_slow_one_is_slower():
    profile = stack([8, 8, 8])
    plan = plan_of(profile, flash(0, 1))
    machine = replace(MACHINE, flash_latency_s=1e-3)
    rates = machine.flash_write_bytes_per_s, machine.flash_read_bytes_per_s

    def curve(slower):
        sizes = (1, 64 * MB)
        times = (tuple(slower * (1e-3 + size / rate) for size in sizes) for rate in rates)
        return replace(machine, flash_service=Service(sizes, *times))

    flat, same, slow = (replay(profile, plan, each) for each in (machine, curve(1), curve(20)))
    assert same.step_ns == pytest.approx(flat.step_ns, abs=10)
    assert slow.flash_write_ns > 10 * flat.flash_write_ns  # so late that nothing is read back
    assert slow.forwarded_bytes > 0 == flat.forwarded_bytes


def test_a_full_budget_waits_until_a_write_has_ended():
    slow = replace(MACHINE, flash_write_bytes_per_s=0.5e9)
    profile = stack([10, 10, 10, 1])
    found = replay(profile, plan_of(profile, flash(0, 1), device=20 * MB), slow)
    # writes end at 20 and 40; the third slot fits at 20, when it is saved; the last one at 40
    assert found.budget_ns == 10 * MS
    assert found.peak_bytes == 20 * MB
    assert found.feasible


def test_reads_stay_within_the_window_and_the_budget():
    profile = stack([10, 10, 10, 1])
    narrow = replay(profile, plan_of(profile, flash(0, 1, 2), window=10 * MB), MACHINE)
    # one at a time: 2 is read ahead, 1 and 0 only when the one before is done with
    assert (narrow.late_ns, narrow.demand_ns) == (0, 20 * MS)
    tight = replay(profile, plan_of(profile, flash(0, 1, 2), device=11 * MB), MACHINE)
    assert (tight.peak_bytes, tight.feasible) == (11 * MB, True)
    assert tight.stall_ns > 0


def test_a_read_does_not_begin_before_its_trigger():
    profile = stack([10, 10, 1, 1])
    free = replay(profile, plan_of(profile, flash(0, 1)), MACHINE, trace=True)
    assert free.trace.busy["flash_read"] == ((40 * MS, 60 * MS),)
    plan = plan_of(
        profile, flash(0, 1), prefetch_at={1: 1}
    )  # when slot 2, the second, is asked for
    held = replay(profile, plan, MACHINE, trace=True)
    assert held.trace.busy["flash_read"] == ((50 * MS, 70 * MS),)
    assert held.stall_ns == 0


def test_what_is_needed_while_it_is_written_stays():
    slow = replace(MACHINE, flash_write_bytes_per_s=0.2e9)  # 50 ms for 10 MB
    profile = stack([10, 10, 10])
    found = replay(profile, plan_of(profile, flash(0, 1, 2)), slow)
    # written from 0 and 50 ms; needed at 50 (slot 0), 40 (1), 30 (2)
    assert found.forwarded_bytes == 20 * MB
    assert found.flash.written_bytes == 10 * MB  # that of 1 and 2 never began
    assert found.flash.read_bytes == 10 * MB
    assert found.demand_ns == 10 * MS


def test_a_write_that_has_begun_keeps_its_bytes_until_it_ends():
    slow = replace(MACHINE, flash_write_bytes_per_s=0.1e9)  # 100 ms for 10 MB
    profile = stack([10, 1, 1])
    found = replay(profile, plan_of(profile, flash(0)), slow, trace=True)
    assert found.forwarded_bytes == found.flash.written_bytes == 10 * MB
    assert found.trace.memory["device"][-1] == (50 * MS, 10 * MB)  # slot 1 is gone, slot 0 is not


def test_both_ways_share_a_flash_that_is_shared():
    apart = stack([10, 10, 1], passes=2)
    tiers = flash(0, 1)
    own = replay(apart, plan_of(stack([10, 10, 1]), tiers), MACHINE)
    both = replay(apart, plan_of(stack([10, 10, 1]), tiers), replace(MACHINE, flash_shared=True))
    assert own.step_ns == both.step_ns  # one after the other, nothing meets
    overlapping = replace(
        apart, passes=(apart.passes[0], PassProfile(1, 30 * MS, 60 * MS, 90 * MS))
    )
    late = tuple(
        replace(s, saved_at_ns=s.saved_at_ns - 30 * MS, needed_at_ns=s.needed_at_ns - 30 * MS)
        if s.pass_index
        else s
        for s in overlapping.slots
    )
    overlapping = replace(overlapping, slots=late)
    plan = plan_of(stack([10, 10, 1]), tiers)
    assert replay(overlapping, plan, MACHINE).stall_ns == 0
    assert replay(overlapping, plan, replace(MACHINE, flash_shared=True)).stall_ns > 0


def test_flash_over_the_link_leaves_the_link_for_what_it_does_not_need():
    machine = Machine("gpu", 1e9, 1e9, 0.0, 4e9, 4e9, flash_over_link=True)
    profile = stack([20, 20, 20, 1])
    tiers = {0: "flash", 1: "flash", 2: "host"}
    found = replay(profile, plan_of(profile, tiers), machine, trace=True)
    # flash takes 20 ms of itself and 5 of the link for each; the host's copy 5 of the link
    assert found.flash_write_ns == 40 * MS
    assert found.link_out_ns == 15 * MS
    assert found.trace.busy["flash_write"] == ((0, 40 * MS),)
    assert found.trace.busy["link_out"] == ((0, 5 * MS), (20 * MS, 30 * MS))
    slow = replace(machine, host_write_bytes_per_s=0.5e9)  # now the link is what flash waits for
    found = replay(profile, plan_of(profile, tiers), slow, trace=True)
    assert found.trace.busy["flash_write"] == ((0, 20 * MS), (40 * MS, 60 * MS))
    assert found.flash.written_bytes == 40 * MB


def test_one_encoder_stands_before_the_writes_and_after_the_reads():
    sample = CodecSample("half", 0.5, 1e9, 2e9)
    profile = encodable(stack([10, 10, 1]), sample)
    plan = plan_of(profile, flash(0, 1), codecs={0: "half", 1: "half"})
    found = replay(profile, plan, MACHINE, trace=True)
    assert found.flash.written_bytes == found.flash.read_bytes == 10 * MB
    # encoded from 0 and from 10 ms; each written when it is encoded, and read at 30; decoded in 5 ms
    assert found.trace.busy["codec"] == (
        (0, 20 * MS),
        (35 * MS, 45 * MS),
    )
    assert found.trace.busy["flash_write"] == ((10 * MS, 15 * MS), (20 * MS, 25 * MS))
    assert found.trace.busy["flash_read"] == ((30 * MS, 40 * MS),)
    assert found.codec_ns == 30 * MS
    assert found.stall_ns == 0


def test_compute_is_slower_while_bytes_move():
    machine = replace(MACHINE, interference=0.5)
    profile = stack([9, 1, 1])
    found = replay(profile, plan_of(profile, flash(0)), machine)
    # 9 ms out and 9 ms back: 6 ms of work are done in each
    assert found.interference_ns == 6 * MS
    assert found.step_ns == found.ideal_ns + 6 * MS


def test_what_is_beside_a_slot_at_its_need_is_not_there_when_it_is_saved():
    profile = stack([10, 10, 10])
    first = replace(profile.slots[0], small_bytes=1 * MB, small_bytes_at_need=20 * MB)
    profile = replace(profile, slots=(first, *profile.slots[1:]))
    assert profile.peak_saved_bytes == 30 * MB
    found = replay(profile, plan_of(profile, {}), MACHINE)
    assert found.peak_bytes == 30 * MB  # at the first one's need the others are gone
    assert found.step_ns == found.ideal_ns
    more = replace(profile, slots=(replace(first, small_bytes_at_need=21 * MB), *profile.slots[1:]))
    assert more.peak_saved_bytes == 31 * MB
    assert replay(more, plan_of(more, {}), MACHINE).peak_bytes == 31 * MB
    early = replace(profile, slots=(replace(first, small_bytes=21 * MB), *profile.slots[1:]))
    assert early.peak_saved_bytes == 31 * MB


def test_each_write_and_each_read_make_computing_later():
    machine = replace(MACHINE, write_work_s=2e-3, read_work_s=1e-3, read_work_s_per_byte=2e-9)
    profile = stack([1, 1, 1])
    for gone, window in ((0,), AMPLE), ((0, 1), AMPLE), ((0, 1), 0):
        plan = plan_of(profile, flash(*gone), window=window)
        quiet, found = replay(profile, plan, MACHINE), replay(profile, plan, machine)
        assert found.flash.written_bytes == found.flash.read_bytes == len(gone) * MB
        assert quiet.interference_ns == 0
        assert found.interference_ns == (2 + 1 + 2) * len(gone) * MS
        assert quiet.step_ns < found.step_ns <= quiet.step_ns + found.interference_ns


def test_what_was_read_ahead_gives_way_to_a_save_and_is_read_again():
    def slot(name, saved, needed, mb):
        key = SlotKey(name, 0, mb * MB)
        return SlotProfile(key, 0, saved * MS, needed * MS, "", False, "")

    slots = (slot("a", 0, 70, 10), slot("b", 10, 30, 1), slot("c", 50, 60, 8))
    profile = Profile("cpu", slots, (PassProfile(0, 0, 30 * MS, 80 * MS),))
    found = replay(profile, plan_of(profile, flash(0), device=12 * MB), MACHINE)
    # a is read from 30 to 40, dropped at 50 for c, and read again at 70, when it is asked for
    assert found.flash.read_bytes == 20 * MB
    assert found.demand_ns == 10 * MS
    assert found.feasible


def test_a_plan_that_cannot_keep_its_budget_is_not_feasible():
    profile = stack([10, 10, 10])
    found = replay(profile, plan_of(profile, {}, device=29 * MB), MACHINE)
    assert (found.peak_bytes, found.feasible) == (30 * MB, False)
    plan = plan_of(profile, flash(0, 1), budgets=Budgets(AMPLE, 0, 19 * MB))
    assert not replay(profile, plan, MACHINE).feasible
    assert replay(profile, plan, MACHINE).flash.peak_bytes >= 20 * MB


def test_what_is_held_elsewhere_is_not_read():
    profile = stack([10, 10, 1], held=(0,))
    found = replay(profile, plan_of(profile, flash(0, 1)), MACHINE)
    assert found.flash.written_bytes == 20 * MB
    assert found.flash.read_bytes == 10 * MB


def test_what_is_never_needed_is_written_and_never_read():
    profile = stack([10, 10, 1], never=(0,))
    found = replay(profile, plan_of(profile, flash(0, 1)), MACHINE)
    assert found.flash.written_bytes == 20 * MB
    assert found.flash.read_bytes == 10 * MB


def test_slots_that_the_plan_does_not_know_are_kept():
    plan = plan_of(stack([10], module="other"), flash(0))
    assert replay(stack([10, 10]), plan, MACHINE).peak_bytes == 20 * MB


def test_each_pass_moves_its_own():
    profile = stack([10, 10, 1], passes=3)
    plan = plan_of(stack([10, 10, 1]), flash(0, 1))
    found = replay(profile, plan, MACHINE)
    assert found.flash.written_bytes == found.flash.read_bytes == 60 * MB
    assert (found.step_ns, found.stall_ns) == (180 * MS, 0)


def test_an_empty_profile_takes_no_time():
    profile = Profile("cpu", (), ())
    found = replay(profile, plan_of(profile, {}), MACHINE, trace=True)
    assert (found.step_ns, found.average_bytes, found.slowdown) == (0, 0, 1.0)
    assert found.trace.busy["compute"] == ()


def test_transients_are_in_the_average_and_move_with_what_is_waited_for():
    slow = replace(MACHINE, flash_read_bytes_per_s=0.5e9)
    profile = replace(
        stack([10, 1]),
        fixed_bytes=100 * MB,
        transients=(Transient(0, 0), Transient(20 * MS, 30 * MB), Transient(35 * MS, 0)),
    )
    found = replay(profile, plan_of(profile, flash(0)), slow, trace=True)
    # slot 1 is asked for at 20; slot 0 is read from there, asked for at 30, there at 40
    assert found.late_ns == 10 * MS
    slots = 10 * 10 + 10 * 30 + (20 - 0)  # MB ms: written by 10; from 20 to the end; slot 1
    beside = 100 * 50 + 30 * 25
    assert found.average_bytes == (slots + beside) * MB // 50
    assert found.trace.memory["device"][-1] == (50 * MS, 100 * MB)
    assert (45 * MS, 110 * MB) in found.trace.memory["device"]


def test_the_trace_tells_when_backward_waited():
    slow = replace(MACHINE, flash_read_bytes_per_s=0.5e9)
    profile = stack([10, 1])
    found = replay(profile, plan_of(profile, flash(0)), slow, trace=True)
    assert found.trace.busy["compute"] == ((0, 30 * MS), (40 * MS, 50 * MS))
    assert found.trace.memory["flash"][0] == (0, 10_002_432)
    assert found.trace.memory["host"] == ()


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_ten_thousand_slots_are_replayed_at_once(policy):
    profile = stack([1] * 10_000, step_ms=1)
    plan = policies.get(policy)(profile, MACHINE, Budgets(3000 * MB, AMPLE, AMPLE))
    found = replay(profile, plan, MACHINE)
    assert found.feasible
    assert found.slowdown < 1.01


def test_a_joined_layer_is_over_when_what_is_written_under_it_is():
    profile = replace(network([20, 20, 20, 1]), device="cuda")
    # 20 ms to write, each layer takes 10, then 20
    plan = plan_of(profile, flash(0, 1, 2), window=20 * MB, prefetch_at={0: 3, 1: 2, 2: 0})
    behind, joined = (replay(profile, replace(plan, joined=one), MACHINE) for one in (False, True))
    # slot 0 is saved at 0 and written by 20: its layer, over at 10, waits as long; so do two more
    assert joined.budget_ns == 30 * MS
    assert behind.budget_ns == 0
    assert joined.step_ns == joined.ideal_ns + joined.stall_ns
    # one slot is there at a time, and the one that is kept
    assert joined.peak_bytes == 21 * MB < behind.peak_bytes
    assert joined.average_bytes < behind.average_bytes
    kept = replay(profile, replace(plan_of(profile, {}), joined=True), MACHINE)
    assert kept.stall_ns == 0


def test_the_read_window_does_not_hold_joined_plans():
    profile = replace(network([20, 20, 20, 1]), device="cuda")
    # one slot fills the window; slots 1 and 0 are to be read when 2 is asked for
    plan = plan_of(profile, flash(0, 1, 2), window=20 * MB, prefetch_at=dict.fromkeys((0, 1), 1))
    assert replay(profile, plan, MACHINE).demand_ns == 60 * MS
    joined = replace(plan, joined=True)
    found = replay(profile, joined, MACHINE)
    assert found.late_ns == found.demand_ns == 0
    assert found.peak_bytes == 60 * MB
    narrow = replay(profile, replace(joined, budgets=Budgets(50 * MB, AMPLE, AMPLE)), MACHINE)
    assert narrow.peak_bytes == 40 * MB
    assert narrow.feasible
