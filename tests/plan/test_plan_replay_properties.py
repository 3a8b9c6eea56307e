"""What holds for a replay of any plan on any machine."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import MB, machines, profiles, stack
from plan_walk import peak_bytes

from penstock.plan import Action, Budgets, Decision, Machine, Operator, Plan, policies
from penstock.plan.groups import groups_of, need_order
from penstock.plan.replay import replay
from tries import tries

AMPLE = 10**15
INSTANT = Machine("instant", 1e300, 1e300, 0.0, 1e300, 1e300)


@st.composite
def odd_machines(draw):
    return replace(
        draw(machines()),
        flash_latency_s=draw(st.sampled_from([0.0, 1e-6, 1.0])),
        flash_shared=draw(st.booleans()),
        flash_over_link=draw(st.booleans()),
        interference=draw(st.sampled_from([0.0, 0.07, 3.0])),
        write_work_s=draw(st.sampled_from([0.0, 1e-4])),
        read_work_s_per_byte=draw(st.sampled_from([0.0, 1e-6])),
    )


@st.composite
def plans(draw, profile, *, encoded=True):
    """Any: also such as no policy makes."""
    decisions = []
    for group in groups_of(profile):
        tier = draw(st.sampled_from(["", "flash", "host"]))
        if not tier:
            decisions.append(Decision(group.key, Action.KEEP, "", ""))
            continue
        sample = draw(st.sampled_from([None, *group.codecs])) if encoded else None
        codec = (sample.codec, sample.ratio) if sample else ("", 1.0)
        trigger = draw(st.none() | st.integers(0, 20))
        decisions.append(Decision(group.key, Action.OFFLOAD, tier, "", *codec, trigger))
    device = draw(st.integers(0, 6000) | st.just(AMPLE))
    order = list(need_order(profile))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    window = draw(st.integers(0, 3000) | st.just(AMPLE))
    staging = draw(st.sampled_from([0, 0, 4096, 3 * 4096, 10**6]))
    budgets = Budgets(device, draw(st.sampled_from([0, 10**5])), 10**6, staging)
    return Plan("any", budgets, tuple(decisions), tuple(order), window)


@settings(max_examples=tries(150))
@given(st.data(), profiles(), odd_machines())
def test_every_step_ends_and_every_part_of_it_is_told(data, profile, machine):
    plan = data.draw(plans(profile))
    found = replay(profile, plan, machine, trace=True)
    parts = (found.recompute_ns, found.interference_ns, found.budget_ns, found.demand_ns)
    assert min(*parts, found.late_ns, found.ideal_ns, found.lean_ns) >= 0
    assert found.step_ns == found.ideal_ns + found.interference_ns + found.stall_ns
    computing = sum(end - start for start, end in found.trace.busy["compute"])
    assert computing == found.ideal_ns + found.interference_ns
    assert found == replay(profile, plan, machine, trace=True)
    assert replace(found, trace=None) == replay(profile, plan, machine)


@settings(max_examples=tries(150))
@given(st.data(), profiles(beside=False), odd_machines())
def test_memory_is_given_back_and_never_more_than_was_told(data, profile, machine):
    plan = data.draw(plans(profile))
    found = replay(profile, plan, machine, trace=True)
    levels = [held for _, held in found.trace.memory["device"]]
    assert min(levels) >= 0
    assert max(levels) <= found.peak_bytes
    assert found.average_bytes <= found.peak_bytes
    assert found.feasible <= (found.peak_bytes <= plan.budgets.device_bytes)
    for name, use in (("host", found.host), ("flash", found.flash)):
        held = [level for _, level in found.trace.memory[name]]
        assert max(held, default=0) <= use.peak_bytes
        assert held[-1:] in ([], [0])


@settings(max_examples=tries(150))
@given(st.data(), profiles(), odd_machines())
def test_what_leaves_comes_back(data, profile, machine):
    plan = data.draw(plans(profile, encoded=False))
    found = replay(profile, plan, machine)
    for tier, use in (("host", found.host), ("flash", found.flash)):
        mine = [s for s in profile.slots if plan.lookup(s.key).tier == tier]
        sent = sum(slot.key.nbytes for slot in mine)
        idle = sum(slot.key.nbytes for slot in mine if slot.needed_at_ns is None)
        held = sum(slot.key.nbytes for slot in mine if slot.held_elsewhere)
        assert sent - idle - found.forwarded_bytes <= use.written_bytes <= sent
        assert use.read_bytes >= sent - idle - held - found.forwarded_bytes


@settings(max_examples=tries(100))
@given(st.data(), profiles())
def test_where_moving_takes_no_time_nothing_does(data, profile):
    plan = data.draw(plans(profile, encoded=False))
    assert replay(profile, plan, INSTANT).step_ns == replay(profile, plan, INSTANT).ideal_ns


@settings(max_examples=tries(100))
@given(st.data(), st.lists(st.integers(1, 30), min_size=1, max_size=12), st.floats(1, 1e4))
def test_slower_reads_never_make_a_step_shorter(data, sizes, factor):
    # where writes take no time and memory has no end: else a slower step may find more of it written
    profile = stack(sizes)
    plan = replace(data.draw(plans(profile, encoded=False)), budgets=Budgets(AMPLE, AMPLE, AMPLE))
    plan = replace(plan, need_order=need_order(profile))
    machine = replace(
        INSTANT,
        flash_read_bytes_per_s=data.draw(st.floats(1e6, 1e12)),
        host_read_bytes_per_s=data.draw(st.floats(1e6, 1e12)),
        flash_latency_s=data.draw(st.sampled_from([0.0, 0.004])),
        flash_over_link=data.draw(st.booleans()),
    )
    slower = replace(
        machine,
        flash_read_bytes_per_s=machine.flash_read_bytes_per_s / factor,
        host_read_bytes_per_s=machine.host_read_bytes_per_s / factor,
    )
    assert replay(profile, plan, slower).step_ns >= replay(profile, plan, machine).step_ns


@settings(max_examples=tries(100))
@given(profiles(), odd_machines(), st.integers(0, 10**4))
def test_to_keep_everything_takes_no_time_and_what_everything_takes(profile, machine, device):
    plan = policies.get("keep")(profile, machine, Budgets(device))
    found = replay(profile, plan, machine)
    assert found.step_ns == found.ideal_ns
    assert found.peak_bytes == profile.peak_saved_bytes
    assert found.feasible == (profile.peak_saved_bytes <= device)


@settings(max_examples=tries(100))
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.sampled_from(["all", "auto", "keep"]),
    st.floats(0.1, 1.2),
    st.integers(0, 3) | st.just(2000),
)
def test_the_peak_is_the_one_that_the_plan_was_checked_for(sizes, policy, share, small):
    # next to nothing is waited for, so both see the same; but the check reads ahead by the byte
    profile = stack(sizes, small_bytes=small)
    budgets = Budgets(int(share * profile.peak_saved_bytes), AMPLE, AMPLE)
    quick = Machine("quick", 1e12, 1e12, 0.0, 1e12, 1e12)
    plan = policies.get(policy)(profile, quick, budgets)
    found = replay(profile, plan, quick)
    checked = peak_bytes(profile, plan, quick)
    assert found.peak_bytes <= checked
    assert (found.peak_bytes <= budgets.device_bytes) == (checked <= budgets.device_bytes)
    if policy == "keep":
        assert found.peak_bytes == checked


@st.composite
def networks(draw):
    """Blocks of layers that save what they make, with the operators that made it."""
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=16))
    width = draw(st.integers(1, 4))
    profile = stack(sizes, step_ms=1)
    paths = [f"block.{i // width}.{i}" for i in range(len(sizes))]
    slots = tuple(
        replace(slot, key=replace(slot.key, module=path), producer=path)
        for slot, path in zip(profile.slots, paths, strict=True)
    )
    step_ns = 1_000_000
    forward = (
        Operator("op", path, 0, False, i * step_ns, (i + 1) * step_ns)
        for i, path in enumerate(paths)
    )
    turn = len(sizes)
    backward = (
        Operator("op", path, 0, True, (turn + i) * step_ns, (turn + i + 1) * step_ns)
        for i, path in enumerate(reversed(paths))
    )
    return replace(profile, slots=slots, operators=(*forward, *backward))


@settings(max_examples=tries(100))
@given(st.data(), networks(), odd_machines())
def test_what_is_recomputed_takes_its_forward_once_more(data, profile, machine):
    plan = data.draw(plans(profile, encoded=False))
    blocks = sorted({slot.key.module.rpartition(".")[0] for slot in profile.slots})
    again = data.draw(st.lists(st.sampled_from(blocks), unique=True))
    decisions = tuple(
        Decision(one.key, Action.RECOMPUTE, "", "")
        if one.key.module.rpartition(".")[0] in again
        else one
        for one in plan.decisions
    )
    plan = replace(plan, decisions=decisions, recomputed=tuple(again))
    found = replay(profile, plan, machine, trace=True)
    layers = sum(slot.key.module.rpartition(".")[0] in again for slot in profile.slots)
    assert found.recompute_ns == layers * 1_000_000
    parts = found.ideal_ns + found.recompute_ns + found.interference_ns + found.stall_ns
    assert found.step_ns == parts
    assert min(level for _, level in found.trace.memory["device"]) >= 0
    assert found.peak_bytes >= max(slot.key.nbytes for slot in profile.slots) >= MB
