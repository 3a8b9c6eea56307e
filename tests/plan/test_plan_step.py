"""A whole training step with weights on flash: bytes to the page, bounds, T*, memory, and refusals."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import MB, MS, stack

from penstock.core.errors import BudgetError, NoSpaceError, PlanError
from penstock.core.units import round_up
from penstock.plan import (
    Budgets,
    Compute,
    Machine,
    Operator,
    PassProfile,
    Profile,
    policies,
)
from penstock.plan.micro_batches import accumulated, micro_batched
from penstock.plan.ranks import PARALLEL, Ranks
from penstock.plan.replay.step_walk import replay_step
from penstock.plan.step_profile import forward_part, without_weights
from penstock.plan.training_step import FLYING_BYTES, StepPlanner, least_window
from penstock.plan.weights import (
    IN_BACKWARD,
    IN_STEP,
    LEAST_SPILLED_BYTES,
    SMALL_BYTES,
    ModuleWeights,
    StepBytes,
    WeightsChoice,
    WeightUse,
    forward_only,
    resting_on_host,
    share_of,
    spilled_gradients,
    step_bytes,
    updated_in_step,
    with_records,
)
from tries import tries

PAGE = 4096
BOX = Machine("two cores", 5e9, 3.5e9, 0.0, 17e9, 17e9, flash_shared=True)
"""The disk of the calculation below: reads 3.5 GB/s, writes 5 GB/s, of one bandwidth."""
TERA = 0.55e12
"""Operations a second of the same machine in bfloat16."""
PER_PARAMETER = {"exact": 12.0, "split": 10.125, "bf16": 6.0, "int8": 2 + 2 * (1 + 1 / 256)}
"""Bytes of the records of AdamW beside a bfloat16 weight."""


def chain(times, *, saved_mb=0, backward=2):
    """Modules in a row that take these ns forward and twice as long backward; each saves a slot."""
    operators, clock = [], 0
    for i, took in enumerate(times):
        operators.append(Operator("mm", f"m{i}", 0, False, clock, clock + took))
        clock += took
    turn = clock
    for i, took in reversed(list(enumerate(times))):
        operators.append(Operator("mm", f"m{i}", 0, True, clock, clock + backward * took))
        clock += backward * took
    slots = ()
    if saved_mb:
        count = len(times)
        slots = tuple(
            replace(
                slot,
                saved_at_ns=operators[i].start_ns,
                needed_at_ns=operators[2 * count - 1 - i].start_ns,
                pass_index=0,
            )
            for i, slot in enumerate(stack([saved_mb] * count).slots)
        )
    return Profile("cpu", slots, (PassProfile(0, 0, turn, clock),), operators=tuple(operators))


def weights_of(sizes, *, trained=True, element=2, records=0.0):
    """Weights of the modules of ``chain``: used forward and backward, once each."""
    count = len(sizes)
    return tuple(
        ModuleWeights(
            f"m{i}",
            nbytes,
            nbytes if trained else 0,
            nbytes // element if trained else 0,
            "bfloat16",
            (WeightUse(i, i, False), WeightUse(2 * count - 1 - i, 2 * count - 1 - i, True)),
            WeightUse(2 * count - 1 - i, 2 * count - 1 - i, True) if trained else None,
            round_up(int(nbytes // element * records), PAGE) if trained else 0,
        )
        for i, nbytes in enumerate(sizes)
    )


def planner(profile, weights, machine=BOX, policy="keep", **settings):
    return StepPlanner(profile, weights, machine, policy=policies.get(policy), **settings)


def test_a_trained_bias_beside_a_frozen_weight_is_planned():
    weights = tuple(
        replace(each, trained_bytes=0, trained=512, record_bytes=PAGE, gradient=each.uses[-1])
        for each in weights_of([2 << 20] * 4, trained=False)
    )
    found = planner(chain([1000] * 4), weights)
    moved = {found.replay(one).moved.records_written for one in found.candidates}
    assert moved == {part * PAGE for part in range(5)}


# -- the hand calculation ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "ns", "tokens", "seconds", "written_gb"),
    [
        ("exact", 7.4, 676, 49, 94),
        ("split", 6.5, 592, 43, 81),
        ("bf16", 4.5, 409, 30, 54),
        ("int8", 3.5, 320, 23, 40),
    ],
)
def test_seven_billion_parameters_on_two_cores(form, ns, tokens, seconds, written_gb):
    """R = 2 w + s and W = w + s bytes a parameter; T* = (C / 6) x (R / r + W / w)."""
    layers, each = 64, 104_857_600  # 6.7 B parameters
    parameters = layers * each
    batch = 1024
    forward_ns = round(2 * each * batch / TERA * 1e9)
    weights = weights_of([2 * each] * layers, records=PER_PARAMETER[form])
    found = planner(chain([forward_ns] * layers), weights)
    plan = found.plan(found.least.total)
    flash_ns = plan.bounds.flash
    assert flash_ns / parameters == pytest.approx(ns, rel=0.015)
    assert plan.hidden_factor * batch == pytest.approx(tokens, rel=0.008)
    assert flash_ns / 1e9 == pytest.approx(seconds, rel=0.02)
    assert plan.written_bytes / 1e9 == pytest.approx(written_gb, rel=0.01)
    assert plan.bounds.compute / 1e9 == pytest.approx(75, rel=0.01)
    assert plan.bounds.binds == "compute"
    assert plan.parameters == parameters
    assert plan.disk_bytes == pytest.approx((2 + PER_PARAMETER[form]) * parameters, rel=1e-4)
    # with room to read ahead the step is compute, a first read, and the last updates
    roomy = found.plan(found.least.total + 5 * 2 * each)
    assert roomy.replayed.step_ns / roomy.bounds.step == pytest.approx(1, abs=0.03)
    assert plan.replayed.step_ns > roomy.replayed.step_ns


@pytest.mark.parametrize(
    ("forward_ms", "rate"), [(0.001, 2e9), (1000, 1e9)], ids=["decoding a token", "prefill"]
)
def test_flash_is_as_fast_as_the_computing_beside_it_allows(forward_ms, rate):
    """It reads 2 GB/s while nothing computes, and half of that beside computing."""
    machine = replace(
        BOX,
        flash_read_bytes_per_s=1e9,
        flash_read_alone_bytes_per_s=2e9,
        flash_write_alone_bytes_per_s=6e9,
    )
    step = forward_part(chain([round(forward_ms * MS)] * 8))
    weights = forward_only(weights_of([100 * MB] * 8))
    found = planner(step, weights, machine)
    plan = found.plan(found.least.total)
    assert plan.replayed.read_ns / 1e9 == pytest.approx(800 * MB / rate, rel=0.07)
    slow = planner(step, weights, replace(machine, flash_read_alone_bytes_per_s=0.0))
    both = [each.plan(each.least.total).hidden_factor for each in (found, slow)]
    assert both[0] == both[1]  # where flash is hidden, the processor always computes


@pytest.mark.parametrize("forward_ms", [10, 40, 80])
def test_flash_is_as_fast_as_the_share_of_computing_in_the_step_that_results(forward_ms):
    """Flash binds: its time is that of its bytes at the mean of both rates over this step."""
    beside, alone = 1e9, 2e9
    machine = replace(
        BOX,
        flash_read_bytes_per_s=beside,
        flash_read_alone_bytes_per_s=alone,
        flash_write_alone_bytes_per_s=6e9,
    )
    step, weights = chain([forward_ms * MS] * 16), weights_of([200 * MB] * 16)
    found = planner(forward_part(step), forward_only(weights), machine)
    replayed = found.plan(found.least.total).replayed
    share = replayed.compute_ns / replayed.step_ns
    expected_ns = replayed.moved.read / (share * beside + (1 - share) * alone) * 1e9
    assert replayed.read_ns == pytest.approx(expected_ns, rel=0.01)


def test_a_frozen_base_is_read_twice_and_prefill_once():
    """T* = C / r: with c = 4 for the base of an adapter, and c = 2 for a forward."""
    each, layers, batch = 104_857_600, 64, 1024
    forward_ns = round(2 * each * batch / TERA * 1e9)
    frozen = weights_of([2 * each] * layers, trained=False)
    found = planner(chain([forward_ns] * layers, backward=1), frozen)
    plan = found.plan(found.least.total)
    turns = 2 * each * 2  # the last of forward is the first of backward, and so from step to step
    assert plan.replayed.moved == StepBytes(weights_read=4 * each * layers - turns)
    assert plan.parameters == plan.written_bytes == 0
    assert plan.bounds.flash / 1e9 == pytest.approx(7.7, rel=0.02)
    assert plan.hidden_factor * batch == pytest.approx(157, rel=0.02)
    assert plan.bounds.compute / 1e9 == pytest.approx(50, rel=0.01)
    step, weights = (
        chain([forward_ns] * layers, saved_mb=8),
        weights_of([2 * each] * layers, records=12),
    )
    found = planner(forward_part(step), forward_only(weights))
    plan = found.plan(found.least.total)
    assert plan.replayed.moved == StepBytes(weights_read=2 * each * layers)
    assert plan.hidden_factor * batch == pytest.approx(157, rel=0.02)
    assert plan.bounds.compute / 1e9 == pytest.approx(25, rel=0.01)
    assert plan.disk_bytes == 2 * each * layers


@pytest.mark.parametrize("trained", [True, False])
def test_weights_in_host_memory_pass_the_link_and_not_flash(trained):
    """Each is used twice, but the last of forward, and that of the step before, which stay."""
    each, layers = 20 * MB, 32
    machine = Machine("gpu", 1e9, 1e9, 0.0, 10e9, 10e9, flash_over_link=True)
    weights = weights_of([each] * layers, trained=trained, records=4.0)
    resting, left = resting_on_host(weights, sum(one.read_bytes for one in weights) + 7)
    assert left == 7
    found = planner(chain([1] * layers), resting, machine)
    plan = found.plan(found.least.total)
    moved, read_bytes = plan.replayed.moved, weights[0].read_bytes
    assert moved.weights_read == moved.weights_written == 0
    assert moved.host_read == (2 * layers - 2) * read_bytes
    assert moved.host_written == layers * read_bytes * trained
    assert plan.disk_bytes == moved.records_read == sum(one.state_bytes for one in weights)
    if not trained:
        assert plan.bounds.binds == "link"
        assert plan.replayed.step_ns == pytest.approx(moved.host_read / 10, rel=0.01)
    on_flash = planner(chain([1] * layers), weights, machine).plan(found.least.total)
    assert on_flash.replayed.step_ns > 2 * plan.replayed.step_ns


def test_those_that_fit_in_host_memory_are_spread_over_the_order():
    weights = weights_of([2 * MB, MB // 2, 2 * MB, 2 * MB, 2 * MB])
    found, left = resting_on_host(weights, 2 * weights[0].read_bytes + 7)
    assert [one.on_host for one in found] == [False, False, True, False, True]
    assert left == 7


def test_decoding_a_token_takes_the_time_of_reading_all_weights():
    each, layers = 104_857_600, 64
    forward_ns = round(2 * each / TERA * 1e9)
    found = planner(
        forward_part(chain([forward_ns] * layers)), forward_only(weights_of([2 * each] * layers))
    )
    plan = found.plan(found.least.total)
    assert plan.bounds.binds == "flash"
    assert plan.replayed.step_ns / 1e9 == pytest.approx(3.8, rel=0.02)


def test_no_number_of_tokens_hides_saved_tensors_that_take_longer_to_move_than_to_compute():
    """Also if nothing else moves, for all weights are kept."""
    profile, weights = chain([MS] * 8, saved_mb=100), weights_of([MB] * 8, trained=False)
    found = planner(profile, weights, policy="all")
    plan = found.plan(found.least.total)
    assert plan.replayed.moved.read == 0 < plan.replayed.activations_written
    assert plan.bounds.binds == "flash"
    assert plan.hidden_factor is None


# -- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "cached", "bytes_"),
    [
        ((), (), (2 * 3 * PAGE, 3 * PAGE, 5 * PAGE, 5 * PAGE)),
        (("m0",), (), (2 * 2 * PAGE, 2 * PAGE, 5 * PAGE, 5 * PAGE)),
        (("m0", "m1"), ("m1",), (0, 0, 2 * PAGE, 2 * PAGE)),
        (("m0", "m1"), ("m0", "m1"), (0, 0, 0, 0)),
    ],
)
def test_bytes_are_whole_pages(kept, cached, bytes_):
    weights = [
        replace(one, record_bytes=records)
        for one, records in zip(weights_of([PAGE - 4, PAGE + 2]), (2 * PAGE, 3 * PAGE), strict=True)
    ]
    found = step_bytes(weights, WeightsChoice(frozenset(kept), frozenset(cached)))
    assert found == StepBytes(*bytes_)
    assert (found.read, found.written) == (bytes_[0] + bytes_[2], bytes_[1] + bytes_[3])


def test_shares_are_spread_evenly_and_small_ones_always_in():
    sizes = [(str(i), 100) for i in range(8)] + [("norm", 10)]
    assert share_of(sizes, 0.25, always_bytes=11) == {"3", "7", "norm"}
    assert share_of(sizes, 0.0) == frozenset()
    assert share_of(sizes, 1.0) == {name for name, _ in sizes}


def test_records_follow_the_trained_parameters_and_their_type():
    trained, frozen = weights_of([8])[0], weights_of([8], trained=False)[0]
    found = with_records([trained, frozen], lambda count, dtype: count * len(dtype))
    assert [one.record_bytes for one in found] == [4 * len("bfloat16"), 0]


# -- what is refused --------------------------------------------------------------------------------


def test_memory_below_the_least_is_refused_with_the_least():
    profile, weights = chain([MS] * 4), weights_of([2 * MB, 2 * MB, 9 * MB, 2 * MB], records=4)
    found = planner(profile, weights)
    least = found.least.total
    with pytest.raises(BudgetError, match=r"largest module is 'm2'") as caught:
        found.plan(least - 1)
    assert caught.value.least_bytes == least
    assert str(least) in str(caught.value)
    assert found.plan(least).memory.total == least


def test_flash_without_room_is_refused_with_the_largest_model_that_fits():
    profile, weights = chain([MS] * 4), weights_of([2 * MB] * 4, records=4)
    needed = planner(profile, weights).home_bytes + planner(profile, weights).record_bytes
    with pytest.raises(NoSpaceError, match=rf"{needed} bytes in all.*has 2 M parameters") as caught:
        planner(profile, weights, flash_bytes=needed // 2)
    assert caught.value.free_bytes == needed // 2
    assert planner(profile, weights, flash_bytes=needed).plan(10**9).disk_bytes == needed


def test_room_that_is_left_on_flash_is_for_saved_tensors():
    profile, weights = chain([MS] * 4, saved_mb=8), weights_of([MB] * 4)
    homes = planner(profile, weights).home_bytes
    tight = planner(profile, weights, policy="ranked", flash_bytes=homes + 8 * MB)
    ample = planner(profile, weights, policy="ranked", flash_bytes=homes + 99 * MB)
    assert ample.least.total < tight.least.total
    assert tight.plan(tight.least.total).disk_bytes <= homes + 8 * MB


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"nbytes": -1, "trained_bytes": -1}, "negative"),
        ({"trained_bytes": 99}, "99 bytes are trained, of 8"),
        ({"uses": (WeightUse(2, 1, False),)}, "not in order"),
        ({"uses": (WeightUse(0, 0, False),)}, "no use ends with its gradient"),
    ],
)
def test_weights_that_make_no_sense_are_refused(changed, match):
    with pytest.raises(PlanError, match=match):
        replace(weights_of([8])[0], **changed)


def test_weights_of_another_profile_are_refused():
    with pytest.raises(PlanError, match="operator 3, but it has 2"):
        planner(chain([MS]), weights_of([MB, MB]))


# -- what is chosen ---------------------------------------------------------------------------------


def test_memory_goes_to_weights_first_and_then_to_records():
    profile = chain([MS] * 16)
    weights = weights_of([2 * MB] * 16, records=4)
    found = planner(profile, weights)
    part = found.plan(found.least.total + 24 * MB)
    assert part.kept
    assert not part.cached
    all_weights = found.plan(2 * 20 * MB)
    assert len(all_weights.kept) >= 15
    everything = found.plan(10**9)
    assert len(everything.kept) == len(everything.cached) == 16
    assert everything.read_bytes == everything.written_bytes == 0
    assert everything.hidden_factor == 0
    steps = [one.replayed.step_ns for one in (part, all_weights, everything)]
    assert steps == sorted(steps, reverse=True)


def test_small_weights_always_stay():
    profile, weights = chain([MS] * 9), weights_of([SMALL_BYTES - 1, *[SMALL_BYTES] * 8])
    found = planner(profile, weights)
    assert found.plan(found.least.total).kept == ("m0",)


def test_reads_come_in_the_order_of_need():
    found = planner(chain([MS] * 4), weights_of([2 * MB] * 4, records=4))
    plan = found.plan(found.least.total)
    assert not plan.kept
    # the last is there when backward begins, and the first from the step before
    assert plan.order == ("m1", "m2", "m3", "m2", "m1", "m0")


def test_a_second_ssd_halves_what_hides_the_flash():
    two = replace(
        BOX,
        flash_read_bytes_per_s=2 * BOX.flash_read_bytes_per_s,
        flash_write_bytes_per_s=2 * BOX.flash_write_bytes_per_s,
    )
    profile, weights = chain([MS] * 16), weights_of([2 * MB] * 16, records=4)
    one, both = (planner(profile, weights, machine) for machine in (BOX, two))
    memory = one.least.total
    factors = [found.plan(memory).hidden_factor for found in (one, both)]
    assert factors[0] / factors[1] == pytest.approx(2, rel=1e-3)


def test_reads_and_writes_that_do_not_share_a_bandwidth_overlap():
    profile, weights = chain([MS // 100] * 16), weights_of([2 * MB] * 16, records=4)
    shared, duplex = (
        planner(profile, weights, replace(BOX, flash_shared=each)) for each in (True, False)
    )
    memory = shared.least.total + 8 * MB
    slow, fast = shared.plan(memory), duplex.plan(memory)
    assert slow.bounds.flash == slow.bounds.reads + slow.bounds.writes
    assert fast.bounds.flash == max(fast.bounds.reads, fast.bounds.writes)
    assert (slow.bounds.binds, fast.bounds.binds) == ("flash", "flash")
    assert fast.replayed.step_ns < slow.replayed.step_ns


def test_on_a_cpu_the_update_takes_its_time_from_compute():
    compute = Compute(1e12, 1e12, 1.0, 10e9, 0.0)
    machine = replace(BOX, compute=compute)
    profile, weights = chain([MS] * 4), weights_of([MB] * 4, records=4)
    found = planner(profile, weights, machine).plan(10**9).replayed
    traffic = sum(3 * one.trained_bytes + 2 * one.record_bytes for one in weights)
    assert found.update_ns == pytest.approx(traffic / 10, rel=1e-3)
    assert found.update_delay_ns == found.update_ns
    on_gpu = planner(replace(profile, device="cuda"), weights, machine).plan(10**9).replayed
    assert on_gpu.update_delay_ns == 0


def test_an_update_takes_what_was_measured_if_that_is_known():
    compute = Compute(1e12, 1e12, 1.0, 10e9, 0.0)
    profile, weights = chain([MS] * 4), weights_of([MB] * 4, records=4)
    measured = with_records(weights, lambda count, dtype: 2 * count, 5e-9)
    trained = sum(one.trained for one in weights)
    for machine in (BOX, replace(BOX, compute=compute)):
        found = planner(profile, measured, machine).plan(10**9).replayed
        assert found.update_ns == found.update_delay_ns == 5 * trained
    shards = [replace(one, shards=4, gathered_bytes=MB, reduced_bytes=MB) for one in weights]
    divided = with_records(shards, lambda count, dtype: 2 * count, 5e-9)
    assert sum(one.update_ns for one in divided) == 5 * trained // 4
    assert not any(one.update_ns for one in forward_only(measured))


def test_a_profile_of_the_whole_device_loses_what_is_planned_apart():
    profile = replace(chain([MS] * 2, saved_mb=1), fixed_bytes=5 * MB, small_bytes=6 * MB)
    slots = tuple(replace(s, small_bytes=6 * MB, small_bytes_at_need=5 * MB) for s in profile.slots)
    found = without_weights(replace(profile, slots=slots), weights_of([MB, MB]))
    assert found.fixed_bytes == MB
    assert found.small_bytes == 2 * MB
    assert [(s.small_bytes, s.small_bytes_at_need) for s in found.slots] == [(2 * MB, MB)] * 2
    saved_only = chain([MS] * 2, saved_mb=1)
    assert without_weights(saved_only, weights_of([MB, MB])) is saved_only


# -- updates in step() ------------------------------------------------------------------------------


def test_updates_in_step_come_after_backward_and_gradients_wait_for_them():
    count, each = 8, 2 * MB
    profile, weights = chain([2 * MS] * count), weights_of([each] * count, records=4)
    records = sum(one.record_bytes for one in weights)
    gradients = sum(one.gradient_bytes for one in weights)

    def planned(**settings):
        return planner(profile, weights, weights_stay=True, **settings).plan(10**9)

    def tail_ns(read, written):
        return (read / BOX.flash_read_bytes_per_s + written / BOX.flash_write_bytes_per_s) * 1e9

    waiting = planned(update=IN_STEP, saved_bytes=MB, gradient_memory=10**9)
    assert waiting.memory.gradients == count * each
    assert waiting.replayed.moved.gradients_written == 0
    cached = sum(one.record_bytes for one in weights if one.module in waiting.cached)
    tail = waiting.replayed.tail_ns
    assert tail == pytest.approx(tail_ns(records - cached, records - cached), rel=1e-3)
    found = planner(profile, weights, weights_stay=True, update=IN_STEP, gradient_memory=0)
    spilled = found.plan(found.least.total)
    assert spilled.memory.gradients == 0
    assert spilled.replayed.moved.gradients_written == gradients
    assert spilled.read_bytes == spilled.written_bytes == records + gradients
    assert spilled.disk_bytes == records + gradients
    tight = planner(
        *(profile, weights), weights_stay=True, update=IN_STEP, flash_bytes=records + gradients - 1
    )
    assert tight.plan(10**9).disk_bytes < records + gradients
    # written while backward computes, and read with the records
    assert spilled.replayed.tail_ns == pytest.approx(
        tail_ns(records + gradients, records), rel=0.02
    )
    assert spilled.replayed.stall_ns == 0
    backward = planner(profile, weights, weights_stay=True)
    assert backward.plan(backward.least.total).replayed.step_ns < spilled.replayed.step_ns


def test_a_step_updates_on_a_cpu_after_backward_whatever_stays():
    machine = replace(BOX, compute=Compute(1e12, 1e12, 1.0, 10e9, 0.0))
    found = planner(chain([MS] * 4), weights_of([MB] * 4, records=4), machine, update=IN_STEP)
    plan = found.plan(10**9)
    assert plan.read_bytes == plan.written_bytes == plan.replayed.update_delay_ns == 0
    assert plan.replayed.tail_ns == pytest.approx(plan.replayed.update_ns, rel=1e-3)
    assert plan.hidden_factor == 0


def test_gradients_wait_in_memory_if_that_makes_the_step_shorter():
    each = 10 * PAGE * 256
    profile, weights = chain([MS // 100] * 16), weights_of([each] * 16)
    found = planner(profile, weights, update=IN_STEP, weights_stay=True)
    least = found.plan(found.least.total)
    assert least.memory.gradients == 0
    assert least.memory.window >= FLYING_BYTES
    more = found.plan(found.least.total + 15 * each)
    assert more.memory.gradients > 0
    assert (
        more.replayed.moved.gradients_written < least.replayed.moved.gradients_written == 16 * each
    )


def test_in_a_session_gradients_wait_in_memory_only_beside_all_weights():
    each, count = 10 * PAGE * 256, 16
    profile, weights = chain([MS // 100] * count), weights_of([each] * count)
    waits = {}
    for last in (False, True):
        found = planner(profile, weights, update=IN_STEP, gradients_last=last)
        plans = [found.plan(found.least.total + each * more) for more in range(0, 3 * count, 2)]
        waits[last] = [(plan.memory.gradients > 0, len(plan.kept) == count) for plan in plans]
    assert (True, False) in waits[False]
    assert (True, False) not in waits[True]
    assert waits[True][-1] == (True, True)


def test_the_first_gradients_of_a_backward_stay_and_short_ones_always():
    sizes = [3 * MB, LEAST_SPILLED_BYTES, 2 * MB, MB]
    weights = updated_in_step(weights_of(sizes), 2 * len(sizes))
    assert spilled_gradients(weights, 0) == {"m0", "m2", "m3"}
    assert spilled_gradients(weights, 3 * MB) == {"m0"}
    assert spilled_gradients(weights, 10 * MB) == frozenset()
    assert spilled_gradients(weights_of(sizes), 0) == frozenset()  # nothing waits


# -- several micro-batches --------------------------------------------------------------------------


def test_backwards_that_accumulate_read_weights_as_often_and_their_sums_wait():
    count, each = 16, 10 * PAGE * 256
    profile, weights = accumulated(chain([MS] * count, saved_mb=1), weights_of([each] * count), 3)
    begin, end = profile.axis_ns
    assert end - begin == 3 * 3 * count * MS
    assert profile.peak_saved_bytes == chain([MS] * count, saved_mb=1).peak_saved_bytes
    assert [len(one.backwards) for one in weights] == [3] * count
    found = planner(profile, weights)
    plan = found.plan(found.least.total)
    turns = 6 * each  # what stays where a pass turns
    assert plan.replayed.moved.weights_read == 6 * count * each - turns
    assert plan.replayed.moved.weights_written == count * each
    assert plan.replayed.moved.gradients_read == 2 * count * each  # to be added to
    assert plan.replayed.demand_ns > 0
    assert plan.replayed.moved.gradients_written == 2 * count * each
    more = found.plan(found.least.total + count * each)
    assert more.replayed.moved.gradients_read < 2 * count * each
    assert found.plan(10**12).memory.gradients == count * each
    in_memory = planner(profile, weights, gradient_memory=10**12)
    with pytest.raises(
        BudgetError, match=r"MiB, 160\.00 MiB of gradients that wait, 0 B of buffers"
    ):
        in_memory.plan(MB)


def test_micro_batches_pass_a_block_together_and_save_all_of_their_tensors():
    count, each = 8, 2 * MB
    one = chain([MS] * count, saved_mb=1)
    profile, weights = micro_batched(one, weights_of([each] * count), 3)
    assert [operator.module for operator in profile.operators[:4]] == ["m0", "m0", "m0", "m1"]
    assert profile.peak_saved_bytes == 3 * one.peak_saved_bytes
    assert len(set(profile.match_keys)) == len(profile.slots) == 3 * count
    plans = [
        planner(*each).plan(10**8)
        for each in ((one, weights_of([each] * count)), (profile, weights))
    ]
    assert plans[0].replayed.moved == plans[1].replayed.moved
    assert plans[1].replayed.compute_ns == 3 * plans[0].replayed.compute_ns
    assert all(len(one.backwards) == 1 for one in weights)


def test_a_block_is_all_with_one_number():
    paths = ["words", "blocks.0.a.1", "blocks.0.b", "blocks.1.a.1", "head"]
    operators = tuple(
        Operator("mm", path, 0, False, place * MS, (place + 1) * MS)
        for place, path in enumerate(paths)
    )
    profile = Profile("cpu", (), (PassProfile(0, 0, 5 * MS, 5 * MS),), operators=operators)
    found, _ = micro_batched(profile, (), 2)
    first, second = paths[1:3], paths[3:4]
    order = ["words", "words", *first, *first, *second, *second, "head", "head"]
    assert [one.module for one in found.operators] == order
    assert [one.start_ns for one in found.operators] == [place * MS for place in range(10)]


# -- what holds for all -----------------------------------------------------------------------------


@pytest.mark.parametrize("times", [MS, 1000 * MS], ids=["flash binds", "compute binds"])
def test_in_a_session_memory_goes_to_weights_rather_than_to_saved_tensors(times):
    """A byte of a trained weight that stays saves three transfers, and one of a saved tensor two."""
    profile = chain([times] * 16, saved_mb=1)
    found = planner(profile, weights_of([2 * MB] * 16), policy="ranked")
    least = found.least
    given = found.saved_bytes(least.total + 24 * MB)
    assert given is not None
    assert least.saved <= given < profile.peak_saved_bytes
    assert found.saved_bytes(10**9) == round_up(profile.peak_saved_bytes, PAGE)  # all fits
    assert found.saved_bytes(MB) is None


@st.composite
def steps(draw):
    """A chain, its weights on one rank or several, a machine: any sizes, frozen ones among them, one used
    twice each way."""
    count = draw(st.integers(1, 7))
    times = draw(st.lists(st.integers(1, 3 * MS), min_size=count, max_size=count))
    profile = chain(times, saved_mb=draw(st.sampled_from([0, 1, 3])))
    sizes = draw(st.lists(st.integers(1, 9 * MB), min_size=count, max_size=count))
    per = draw(st.sampled_from([0.0, 2.0, 12.0]))
    weights = [
        one if draw(st.booleans()) else replace(one, gradient=None, trained=0, trained_bytes=0)
        for one in weights_of(sizes, records=per)
    ]
    weights = [replace(one, on_host=draw(st.booleans())) for one in weights]
    if count > 1 and draw(st.booleans()):  # a head that is tied to the first module
        tied = weights[0]
        uses = {*tied.uses, WeightUse(count - 1, count - 1, False), WeightUse(count, count, True)}
        gradient = tied.gradient and WeightUse(count, 2 * count - 1, True)
        order = sorted(uses, key=lambda use: use.first)
        weights[0] = replace(tied, uses=tuple(order), gradient=gradient)
    machine = Machine(
        "any",
        draw(st.floats(1e8, 1e11)),
        draw(st.floats(1e8, 1e11)),
        draw(st.sampled_from([0.0, 1e-5])),
        draw(st.floats(1e9, 1e11)),
        draw(st.floats(1e9, 1e11)),
        draw(st.none() | st.just(Compute(1e12, 1e12, 1.0, 10e9, 0.0))),
        flash_shared=draw(st.booleans()),
        flash_over_link=draw(st.booleans()),
        interference=draw(st.sampled_from([0.0, 0.2])),
        write_work_s=draw(st.sampled_from([0.0, 1e-4])),
        network_bytes_per_s=draw(st.sampled_from([0.0, 1e9, 1e11])),
    )
    ranks = Ranks(draw(st.sampled_from([1, 2, 3, 64])), parallel=draw(st.sampled_from(PARALLEL)))
    if ranks.count == 1:
        batched = draw(st.sampled_from([accumulated, micro_batched]))
        profile, weights = batched(profile, weights, draw(st.integers(1, 3)))
    return profile, ranks.divide(weights), machine, ranks


@settings(max_examples=tries(60), deadline=None)
@given(steps(), st.data())
def test_any_choice_moves_its_bytes_within_its_memory_and_no_faster_than_its_bounds(step, data):
    profile, weights, machine, ranks = step
    names = [one.module for one in weights]
    kept = frozenset(data.draw(st.sets(st.sampled_from(names))))
    cached = frozenset(data.draw(st.sets(st.sampled_from(names))))
    uses = [(one.module, number) for one in weights for number in range(len(one.uses))]
    stays = frozenset(data.draw(st.sets(st.sampled_from(uses))))
    if ranks.count == 1 and data.draw(st.booleans()):
        weights = updated_in_step(weights, len(profile.operators))
    spilled = spilled_gradients(weights, data.draw(st.sampled_from([0, 9 * MB, 10**12])))
    clips = all(one.is_updated_in_step for one in weights if one.waits)
    clips = clips and data.draw(st.booleans())
    choice = WeightsChoice(kept, cached, stays=stays, spilled=spilled, clips=clips)
    window = least_window(profile, weights, choice) + data.draw(st.sampled_from([0, MB, 99 * MB]))
    window += 9 * MB * clips
    choice = replace(choice, window_bytes=window)
    plan = policies.get(data.draw(st.sampled_from(["keep", "ranked", "all"])))(
        profile, machine, Budgets(profile.peak_saved_bytes, 0, 10**12)
    )
    found = replay_step(profile, plan, machine, weights, choice)
    assert found.moved == step_bytes(weights, choice)
    assert found.feasible
    assert found.peak_bytes <= profile.peak_saved_bytes + window
    parts = (found.compute_ns, found.update_delay_ns, found.interference_ns, found.tail_ns)
    assert min(*parts, found.room_ns, found.demand_ns, found.late_ns) >= 0
    assert found.step_ns == sum(parts) + found.stall_ns
    bounds = [found.compute_ns + found.update_delay_ns, found.read_ns, found.write_ns]
    bounds += [found.update_ns, found.link_ns, found.network_ns]
    if machine.flash_shared:
        bounds.append(found.read_ns + found.write_ns)
    assert found.step_ns >= max(bounds)


@settings(max_examples=tries(25), deadline=None)
@given(steps(), st.sampled_from(["keep", "all", "ranked"]), st.data())
def test_more_memory_never_makes_a_step_longer_and_is_never_exceeded(step, policy, data):
    profile, weights, machine, ranks = step
    update = data.draw(st.sampled_from([IN_BACKWARD, IN_STEP][: 1 + (ranks.count == 1)]))
    clips = update == IN_STEP and data.draw(st.booleans())
    found = planner(profile, weights, machine, policy, update=update, clips=clips)
    weights = found.weights
    least = found.least.total
    more = data.draw(st.lists(st.integers(0, 40 * MB), min_size=1, max_size=4))
    plans = [found.plan(least + extra) for extra in sorted({0, *more})]
    times = [plan.replayed.step_ns for plan in plans]
    assert times == sorted(times, reverse=True)
    for plan in plans:
        saved = found.saved_bytes(plan.memory_bytes)
        assert saved is None or saved <= plan.memory_bytes
        assert plan.memory.total <= plan.memory_bytes
        room = plan.memory.window + plan.memory.saved + plan.memory.gradients
        assert plan.replayed.peak_bytes <= room
        assert plan.replayed.step_ns >= plan.bounds.step
        assert set(plan.order) == {
            one.module
            for one in weights
            if one.uses and (one.gathered or one.module not in plan.kept)
        }
