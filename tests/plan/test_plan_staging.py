"""Plans for devices where all that goes to flash is staged in pinned host memory."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import MACHINE, MB, MS, encodable, profiles, stack
from test_plan_replay import flash, plan_of
from test_plan_replay_properties import odd_machines, plans

from penstock.core.errors import ConfigError
from penstock.plan import (
    Action,
    Budgets,
    CodecSample,
    Machine,
    PassProfile,
    Plan,
    SlotKey,
    policies,
)
from penstock.plan.min_budget import hard_bytes, min_budget
from penstock.plan.replay import TierUse, replay
from penstock.runtime.codec_choice import codecs_pay
from tries import tries

AMPLE = 10**12
SLOW = replace(MACHINE, flash_write_bytes_per_s=0.25e9, flash_read_bytes_per_s=0.5e9)
"""10 MB take 40 ms to flash, 20 ms back, and 2.5 ms over the link each way."""


def staged(profile, tiers, nbytes, **options):
    """A plan by hand with so much staging memory."""
    plan = plan_of(profile, tiers, **options)
    return replace(plan, budgets=replace(plan.budgets, staging_bytes=nbytes))


def whole_pages(nbytes):
    return -(-nbytes // 4096) * 4096


PAGES = whole_pages(10 * MB)
"""Bytes of the buffer of a slot of 10 MB."""


def test_memory_is_free_once_it_is_staged():
    profile = stack([10, 10, 1, 1])
    plan = staged(profile, flash(0, 1), 2 * PAGES)
    found = replay(profile, plan, SLOW, trace=True)
    assert found.trace.busy["link_out"] == ((0, 2_500_000), (10 * MS, 12_500_000))
    assert (2_500_000, 0) in found.trace.memory["device"]
    assert (12_500_000, 0) in found.trace.memory["device"]
    # to flash from 2.5 to 42.5 and on to 82.5 ms
    assert found.trace.busy["flash_write"] == ((2_500_000, 82_500_000),)
    assert found.staging_peak_bytes == 2 * PAGES
    unstaged = replay(profile, plan_of(profile, flash(0, 1)), SLOW)
    assert unstaged.staging_peak_bytes == 0


def test_a_save_that_waited_for_flash_does_not_wait_where_there_is_staging_memory():
    profile = stack([10, 10, 10, 1])
    without = replay(profile, plan_of(profile, flash(0, 1), device=20 * MB), SLOW)
    # slot 2 is saved at 20, and slot 0 written at 40; the last at 50, and slot 1 written at 80
    assert without.budget_ns == 50 * MS
    plan = staged(profile, flash(0, 1), 2 * PAGES, device=20 * MB)
    found = replay(profile, plan, SLOW)
    assert found.budget_ns == 0
    assert found.feasible


def test_what_finds_no_room_waits_on_the_device_until_a_buffer_is_free():
    profile = stack([10, 10, 1, 1, 1, 1])
    plan = staged(profile, flash(0, 1), PAGES)
    found = replay(profile, plan, SLOW, trace=True)
    # the buffer is free at 42.5, when slot 0 is on flash
    assert found.trace.busy["link_out"] == ((0, 2_500_000), (42_500_000, 45 * MS))
    assert found.staging_peak_bytes == PAGES
    short = replay(stack([10, 10, 1]), staged(stack([10, 10, 1]), flash(0, 1), PAGES), SLOW)
    # slot 1 is needed at 40, while it waits: it stays, and is never copied
    assert short.link_out_ns == 2_500_000
    assert short.forwarded_bytes >= 10 * MB
    assert short.flash.peak_bytes == PAGES
    tight = staged(stack([10, 10, 1]), flash(0, 1), PAGES, budgets=Budgets(AMPLE, 0, PAGES))
    assert not replay(stack([10, 10, 1]), tight, SLOW).feasible  # it was promised room on flash


def test_what_is_needed_while_it_is_staged_is_neither_written_nor_read():
    profile = stack([10, 10, 1])
    plan = staged(profile, flash(0, 1), 2 * PAGES)
    found = replay(profile, plan, SLOW, trace=True)
    # slot 0 goes to flash from 2.5 to 42.5, then slot 1, which is in use from 40 to 50
    assert found.flash.written_bytes == 20 * MB
    assert found.flash.read_bytes == 0
    assert found.forwarded_bytes == 20 * MB
    slower = replace(SLOW, flash_write_bytes_per_s=0.2e9)  # 50 ms: from 2.5 to 52.5
    found = replay(profile, plan, slower, trace=True)
    assert found.flash.written_bytes == 10 * MB  # slot 1 is freed at 50
    assert found.flash.read_bytes == found.flash_read_ns == 0
    assert found.link_in_ns == 5 * MS
    assert found.stall_ns == 0
    assert found.trace.memory["staging"][-1] == (52_500_000, 0)


def test_what_is_not_staged_any_more_is_read_to_a_buffer_and_copied():
    profile = stack([10, 1, 1, 1, 1])
    found = replay(profile, staged(profile, flash(0), PAGES), SLOW, trace=True)
    # on flash at 42.5; slot 4 is asked for at 50
    assert found.flash.read_bytes == found.flash.written_bytes == 10 * MB
    assert found.forwarded_bytes == 0
    assert found.trace.busy["flash_read"] == ((50 * MS, 70 * MS),)
    assert found.trace.busy["link_in"] == ((70 * MS, 72_500_000),)
    assert found.trace.memory["staging"] == (
        *((0, PAGES), (42_500_000, 0)),
        *((50 * MS, PAGES), (72_500_000, 0)),
    )


def test_a_read_comes_before_what_waits_to_be_staged():
    profile = replace(
        stack([10, 10, 1, 1, 1, 1]),
        passes=(PassProfile(0, 0, 60 * MS, 120 * MS),),
    )
    # slot 0 is on flash; slot 1 is saved late, when a read has the buffer and the next one waits
    late = replace(profile.slots[1], saved_at_ns=61 * MS, needed_at_ns=None)
    again = replace(profile.slots[2], key=SlotKey("layer.2", 0, 10 * MB), needed_at_ns=90 * MS)
    profile = replace(profile, slots=(profile.slots[0], late, again, *profile.slots[3:]))
    quick = replace(SLOW, flash_write_bytes_per_s=1e9)
    found = replay(profile, staged(profile, flash(0, 1, 2), PAGES), quick, trace=True)
    # slots 2 and 0 are read from 60 to 80 and from 82.5 to 102.5, each with the only buffer; then slot 1
    # is copied
    assert found.trace.busy["flash_read"] == ((60 * MS, 80 * MS), (82_500_000, 102_500_000))
    assert found.trace.busy["link_out"][-1] == (105 * MS, 107_500_000)


def test_codecs_stand_before_the_copy_out_and_behind_the_copy_in():
    sample = CodecSample("half", 0.5, 1e9, 2e9)
    profile = encodable(stack([10, 1, 1, 1]), sample)
    half = whole_pages(5 * MB)
    plan = staged(profile, flash(0), half, codecs={0: "half"})
    found = replay(profile, plan, SLOW, trace=True)
    # encoded by 10, copied by 11.25, on flash by 31.25; read from 40 to 50, copied by 51.25, decoded
    assert found.trace.busy["link_out"] == ((10 * MS, 11_250_000),)
    assert found.trace.busy["flash_write"] == ((11_250_000, 31_250_000),)
    assert found.trace.busy["flash_read"] == ((40 * MS, 50 * MS),)
    assert found.trace.busy["link_in"] == ((50 * MS, 51_250_000),)
    assert found.trace.busy["codec"] == ((0, 10 * MS), (51_250_000, 56_250_000))
    assert found.staging_peak_bytes == half


def test_no_slow_codec_relieves_flash_of_what_staging_memory_holds():
    slow = CodecSample("half", 0.5, 0.25e9, 0.25e9)  # 40 ms each way, as long as flash
    profile = encodable(stack([10] * 8), slow)

    def encoded(staging_bytes):
        plan = policies.get("all")(profile, SLOW, Budgets(AMPLE, 0, AMPLE, staging_bytes))
        assert codecs_pay(plan, profile, SLOW, plan.budgets) == (staging_bytes < 80 * MB)
        return sum(bool(one.codec) for one in plan.decisions)

    assert encoded(0) > encoded(40 * MB) > encoded(8 * PAGES) == 0


def test_a_slot_that_is_longer_than_the_staging_memory_is_kept():
    profile = stack([10, 10, 1])
    plan = staged(profile, flash(0, 1), PAGES - 4096, device=15 * MB)
    found = replay(profile, plan, SLOW)
    assert found.flash == TierUse()
    assert not found.feasible
    assert hard_bytes(profile, plan, SLOW) == 21 * MB


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize("host", [0, 60 * MB])
def test_no_policy_sends_to_flash_what_cannot_be_staged(policy, host):
    profile = stack([10, 50, 10, 50, 10])
    budgets = Budgets(125 * MB, host, AMPLE, staging_bytes=20 * MB)
    plan = policies.get(policy)(profile, MACHINE, budgets)
    large = [one for one in plan.decisions if one.key.nbytes == 50 * MB]
    assert {one.tier for one in large} <= {"", "host"}
    assert replay(profile, plan, MACHINE).feasible == plan.feasible
    told = [one.reason for one in large if one.action is Action.KEEP and not host]
    assert all("longer than the staging memory of 19.07 MiB" in each for each in told)


def test_a_note_on_waits_leaves_out_what_staging_memory_holds():
    profile = stack([10, 10, 10, 10, 1])
    for staging_bytes, notes in ((0, 2), (20 * MB, 1), (40 * MB, 0)):
        budgets = Budgets(30 * MB, 0, AMPLE, staging_bytes)
        plan = policies.get("all")(profile, SLOW, budgets)
        assert sum("flash is slower" in each for each in plan.notes) == notes


def test_what_cannot_be_staged_goes_to_host_memory():
    profile = stack([10, 50, 10, 50, 10])
    for device, host, feasible in ((80, 60, True), (80, 40, False), (125, 40, True)):
        budgets = Budgets(device * MB, host * MB, AMPLE, staging_bytes=20 * MB)
        plan = policies.get("auto")(profile, MACHINE, budgets)
        assert plan.feasible is feasible
        assert replay(profile, plan, MACHINE).feasible is feasible


def test_the_least_budget_is_the_one_that_holds_what_cannot_be_staged():
    profile = stack([10, 50, 10, 50, 10])
    budgets = Budgets(1, 0, AMPLE, staging_bytes=20 * MB)
    least = min_budget(profile, MACHINE, budgets, policies.get("ranked"))
    assert least is not None
    assert least >= 100 * MB
    assert policies.get("ranked")(profile, MACHINE, replace(budgets, device_bytes=least)).feasible


def test_plans_that_were_written_without_staging_memory_are_read():
    profile = stack([10, 10])
    plan = staged(profile, flash(0), PAGES)
    assert Plan.from_json(plan.to_json()) == plan
    old = plan_of(profile, flash(0))
    text = re.sub(r',\s*"staging_bytes": 0', "", old.to_json())
    assert "staging" not in text
    assert Plan.from_json(text) == old


def test_staging_memory_cannot_be_negative():
    with pytest.raises(ConfigError, match="staging_bytes"):
        Budgets(1, 0, 0, staging_bytes=-1)


def without_staging(plan):
    return replace(plan, budgets=replace(plan.budgets, staging_bytes=0))


@settings(max_examples=tries(150))
@given(st.data(), profiles(beside=False), odd_machines(), st.integers(1, 40))
def test_buffers_are_given_back_and_never_more_than_there_are(data, profile, machine, pages):
    plan = data.draw(plans(profile))
    plan = replace(plan, budgets=replace(plan.budgets, staging_bytes=4096 * pages))
    found = replay(profile, plan, machine, trace=True)
    levels = [held for _, held in found.trace.memory.get("staging", ())]
    assert levels[-1:] in ([], [0])
    assert all(0 <= held <= 4096 * pages for held in levels)
    assert max(levels, default=0) <= found.staging_peak_bytes <= 4096 * pages
    unstaged = replay(profile, without_staging(plan), machine)
    assert found.flash.written_bytes <= unstaged.flash.written_bytes + unstaged.forwarded_bytes
    assert min(level for _, level in found.trace.memory["device"]) >= 0


@settings(max_examples=tries(150))
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.sampled_from([0.2, 0.5, 0.8, 1.0]),
    st.tuples(st.floats(1e8, 2e9), st.floats(1e8, 2e9)),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_more_staging_memory_never_makes_a_step_longer(sizes, share, speeds, some, more):
    """Where all goes to flash, and a link takes no time: what waits on the device needs no copy back."""
    profile = stack(sizes)
    machine = Machine("any", *speeds, 0.0, 1e300, 1e300)
    largest = whole_pages(max(sizes) * MB)
    device = max(max(sizes) * MB, int(share * sum(sizes) * MB))
    steps = [
        replay(profile, staged(profile, flash(*range(len(sizes))), nbytes, device=device), machine)
        for nbytes in (largest * (1 + some), largest * (1 + some + more))
    ]
    assert steps[1].step_ns <= steps[0].step_ns
