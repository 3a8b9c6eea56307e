"""The papers' policies, by hand: what they choose, in what order, and when it comes back."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import COMPUTE, MACHINE, MB, SHAPE, encodable, network, networks, stack

from penstock.lab.step_bound import oracle_ns
from penstock.plan import Action, Budgets, CodecSample, Machine, policies
from penstock.plan.layers import Layer, prefetch_search
from penstock.plan.policies.recompute import cost_aware, recompute_ns, sublinear
from penstock.plan.problem import PlanningProblem
from penstock.plan.replay import replay
from tries import tries

AMPLE = 10**12


def plan_of(policy, profile, budgets, machine=MACHINE):
    return policies.get(policy)(profile, machine, budgets)


def tiers(plan):
    return [decision.tier for decision in plan.decisions]


def prefetched_at(plan):
    return [decision.prefetch_at for decision in plan.decisions]


def kinds(profile, text):
    """The profile with layers of these kinds: ``"c"`` convolutions, ``"r"`` others."""
    slots = (
        replace(slot, kind="Conv2d" if kind == "c" else "ReLU")
        for slot, kind in zip(profile.slots, text, strict=True)
    )
    return replace(profile, slots=tuple(slots))


# -- vDNN ---------------------------------------------------------------------------------------------


def test_vdnn_all_takes_every_map_and_conv_those_of_convolutions():
    profile = kinds(stack([10] * 6), "crcrcr")
    budgets = Budgets(45 * MB, AMPLE, AMPLE)
    assert tiers(plan_of("vdnn-all", profile, budgets)) == ["host"] * 6
    assert tiers(plan_of("vdnn-conv", profile, budgets)) == ["host", ""] * 3


def test_vdnn_asks_who_needs_a_map_first_where_operators_tell():
    profile = network([10] * 6, convolution=SHAPE)
    # slot 1 was saved by a convolution too, but the first to ask for it is not one
    slots = (replace(slot, kind="Conv2d") for slot in profile.slots)
    plan = plan_of("vdnn-conv", replace(profile, slots=tuple(slots)), Budgets(45 * MB, AMPLE))
    assert tiers(plan) == ["host", ""] * 3


def test_vdnn_takes_flash_where_there_is_no_host_memory_and_says_so():
    plan = plan_of("vdnn-all", stack([10] * 3), Budgets(25 * MB, 0, AMPLE))
    assert tiers(plan) == ["flash"] * 3
    assert plan.notes[0] == "no host budget: flash takes the place of vDNN's host memory"


def test_vdnn_leaves_what_something_else_holds_and_what_has_no_room():
    plan = plan_of("vdnn-all", stack([10] * 4, held={0}), Budgets(60 * MB, 21 * MB))
    assert tiers(plan) == ["", "host", "host", ""]


def test_vdnn_does_not_encode():
    sample = CodecSample("zero-value", 0.1, 1e12, 1e12)
    plan = plan_of("vdnn-all", encodable(stack([10] * 4), sample), Budgets(25 * MB, AMPLE))
    assert {decision.codec for decision in plan.decisions} == {""}


def test_the_search_finds_one_map_for_each_layer_of_backward():
    profile = kinds(stack([10] * 5), "rrrrr")
    plan = plan_of("vdnn-all", profile, Budgets(25 * MB, AMPLE))
    # needed in the order 4, 3, 2, 1, 0: the last comes when asked for, the others one layer ahead
    assert prefetched_at(plan) == [3, 2, 1, 0, 0]


def test_the_search_ends_at_a_convolution():
    layers = [Layer(f"l{i}", kind == "c", 5 - i, (i,)) for i, kind in enumerate("rrcrrc")]
    # 0 is behind the convolution 2 for 5, 4 and 3; 2 itself is kept
    assert prefetch_search(layers, {0}) == {0: 3}
    # two to fetch before it: one for each layer
    assert prefetch_search(layers, {0, 1}) == {1: 3, 0: 4}
    # the convolution is looked at before the search ends
    assert prefetch_search(layers, {2}) == {2: 0}
    # what is not found comes when its own layer asks
    assert prefetch_search(layers, {5}) == {5: 0}


def test_a_map_belongs_to_the_operator_that_begins_when_it_has_been_asked_for():
    profile = network([10] * 4, convolution=SHAPE)
    asking = tuple(
        replace(one, start_ns=one.start_ns + 2) if one.backward else one
        for one in profile.operators
    )  # a node asks for what it needs, one by one, and then computes
    case = PlanningProblem(replace(profile, operators=asking), MACHINE, Budgets(AMPLE))
    assert [(layer.module, layer.convolution, layer.groups) for layer in case.layers] == [
        ("block.0.0", True, (0,)),
        ("block.0.1", False, (1,)),
        ("block.1.0", True, (2,)),
        ("block.1.1", False, (3,)),
    ]


def slow_search(layers, offloaded):
    """Figure 10 of the paper, line by line."""
    done, found = set(), {}
    for current in reversed(range(len(layers))):
        for g in layers[current].groups:
            if g in offloaded and g not in done:
                done.add(g)
                found[g] = layers[current].place
        for before in reversed(range(current)):
            wanted = {g for g in layers[before].groups if g in offloaded and g not in done}
            if wanted:
                done |= wanted
                found.update(dict.fromkeys(wanted, layers[current].place))
                break
            if layers[before].convolution:
                break
    return found


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.booleans()), max_size=12))
def test_the_search_is_the_papers(drawn):
    layers, offloaded, g = [], set(), 0
    for place, (convolution, count, gone) in enumerate(drawn):
        mine = tuple(range(g, g + count))
        g += count
        offloaded.update(mine if gone else ())
        layers.append(Layer(f"l{place}", convolution, len(drawn) - place, mine))
    assert prefetch_search(layers, offloaded) == slow_search(layers, offloaded)


def big_maps(count=6, mb=40):
    """Convolutions and others in turn, on a whole device; a map is 40 MB."""
    shape = replace(SHAPE, kernel_size=(3, 3))
    return network([mb] * count, convolution=shape, whole=MB, step_ms=4)


ON_CARD = replace(MACHINE, compute=COMPUTE, host_write_bytes_per_s=12e9, host_read_bytes_per_s=12e9)


def test_vdnn_dyn_steps_down_as_memory_gets_less():
    profile = big_maps()
    case = PlanningProblem(profile, ON_CARD, Budgets(AMPLE, AMPLE))
    most = case.profile.peak_saved_bytes

    def seen(device_bytes):
        plan = plan_of("vdnn-dyn", profile, Budgets(device_bytes, AMPLE), ON_CARD)
        assert replay(profile, plan, ON_CARD).feasible == plan.feasible
        return sum(map(bool, tiers(plan))), len(plan.lean_convolutions), plan.feasible

    found = list(dict.fromkeys(seen(most * k // 100) for k in range(105, 0, -1)))
    assert found[0] == (0, 0, True)
    assert found[1] == (3, 0, True)  # the maps of convolutions
    assert found[2] == (6, 0, True)  # all maps
    assert found[-1] == (6, 3, False)
    for before, after in itertools.pairwise(found):
        assert after[1] >= before[1]  # ever more convolutions without a workspace
    assert {count for _, count, _ in found} >= {0, 3}


def test_the_oracle_waits_for_nothing():
    profile = network([40] * 4, whole=7 * MB, transient_mb=5)
    assert oracle_ns(profile, MACHINE) == 120_000_000
    kept = plan_of("keep", big_maps(), Budgets(AMPLE), ON_CARD)
    assert oracle_ns(big_maps(), ON_CARD) == replay(big_maps(), kept, ON_CARD).step_ns


# -- FlashNeuron --------------------------------------------------------------------------------------

HALF = CodecSample("zero-value", 0.5, 1e12, 1e12)


def test_flashneuron_takes_the_first_until_there_is_enough():
    plan = plan_of("flashneuron", stack([10] * 10), Budgets(60 * MB, AMPLE, AMPLE))
    assert tiers(plan) == ["flash"] * 4 + [""] * 6


def test_flashneuron_leaves_small_slots():
    plan = plan_of("flashneuron", stack([1, 10, 1, 10, 10, 10]), Budgets(32 * MB, 0, AMPLE))
    assert tiers(plan) == ["", "flash", "", "", "", ""]


def test_flashneuron_exchanges_what_does_not_shrink_for_what_does():
    # four slots take 40 ms to write, and forward 30; of 0, 1, 6 and 7 the last ends with the forward
    profile = encodable(stack([10] * 10, step_ms=3), HALF, only={6, 7, 8})
    plan = plan_of("flashneuron", profile, Budgets(60 * MB, 0, AMPLE))
    assert tiers(plan) == ["flash"] * 2 + [""] * 4 + ["flash"] * 2 + [""] * 2
    assert [decision.codec for decision in plan.decisions][6:8] == ["zero-value"] * 2
    raw = plan_of("flashneuron", stack([10] * 10, step_ms=3), Budgets(60 * MB, 0, AMPLE))
    assert tiers(raw) == ["flash"] * 4 + [""] * 6
    assert raw.notes[0] == "no slot was sampled for compression: phase 2 has nothing to choose"


CAST = CodecSample("float16", 0.5, 1e12, 1e12)
SPARSE = CodecSample("zero-value+float16", 0.2, 1e12, 1e12)


def test_flashneuron_gives_up_what_is_only_cast_for_what_is_sparse():
    # four cast slots take 40 ms to write, and forward 30; of 0, 1, 6 and 7 the last ends after 28 ms
    slow = replace(MACHINE, flash_write_bytes_per_s=5e8, flash_read_bytes_per_s=5e8)
    cast = encodable(stack([10] * 10, step_ms=3), CAST)
    profile = encodable(cast, SPARSE, only={6, 7, 8})
    plan = plan_of("flashneuron", profile, Budgets(60 * MB, 0, AMPLE), slow)
    assert tiers(plan) == ["flash"] * 2 + [""] * 4 + ["flash"] * 2 + [""] * 2
    assert [decision.codec for decision in plan.decisions][6] == "zero-value+float16"
    # cast slots are not exchanged for cast ones
    same = plan_of("flashneuron", cast, Budgets(60 * MB, 0, AMPLE), slow)
    assert tiers(same) == ["flash"] * 4 + [""] * 6


def test_flashneuron_gives_up_what_does_not_compress_before_what_is_cast():
    # 0 and 2 are raw, 1 and 3 shrink a little: 37 ms to write all; with 6 in place of 2 it is 29
    little = replace(CAST, ratio=0.85)
    profile = encodable(stack([10] * 10, step_ms=3), little, only={1, 3})
    profile = encodable(profile, SPARSE, only={6, 7, 8})
    plan = plan_of("flashneuron", profile, Budgets(60 * MB, 0, AMPLE))
    assert tiers(plan) == ["flash"] * 2 + ["", "flash", "", "", "flash", "", "", ""]


def test_flashneuron_adds_what_is_left_if_it_must():
    # hopeless: flash is far too slow, so compressible slots go first, and then the others after all
    slow = replace(MACHINE, flash_write_bytes_per_s=1e8, flash_read_bytes_per_s=1e8)
    profile = encodable(stack([10] * 10, step_ms=4), HALF, only={6, 7})
    plan = plan_of("flashneuron", profile, Budgets(30 * MB, 0, AMPLE), slow)
    assert plan.feasible
    assert tiers(plan)[6] == tiers(plan)[7] == "flash"


def test_flashneuron_takes_host_memory_only_where_there_is_no_flash():
    plan = plan_of("flashneuron", stack([10] * 4), Budgets(25 * MB, AMPLE))
    assert "host" in tiers(plan)
    assert "no flash budget: host memory takes its place" in plan.notes


# -- lifetime -----------------------------------------------------------------------------------------


def test_lifetime_ranks_by_bytes_and_idle_time():
    plan = plan_of("lifetime", stack([1, 5, 30, 5, 5, 5]), Budgets(40 * MB, 0, AMPLE))
    assert tiers(plan) == ["", "", "flash", "", "", ""]


def test_lifetime_uses_both_tiers_as_fast_as_they_are():
    # host memory is four times as fast: of five slots one goes to flash, the first of equals to host
    plan = plan_of("lifetime", stack([10] * 10), Budgets(25 * MB, AMPLE, AMPLE))
    gone = [tier for tier in tiers(plan) if tier]
    assert len(gone) == 8
    assert gone.count("flash") == 1
    over = replace(MACHINE, flash_over_link=True)
    shared = plan_of("lifetime", stack([10] * 10), Budgets(25 * MB, AMPLE, AMPLE), over)
    assert 0 < tiers(shared).count("flash") <= gone.count("flash")


def test_lifetime_fills_one_tier_where_the_other_is_full():
    plan = plan_of("lifetime", stack([10] * 10), Budgets(25 * MB, 21 * MB, AMPLE))
    assert tiers(plan).count("host") == 2
    assert plan.feasible


# -- recompute ----------------------------------------------------------------------------------------


def test_recompute_runs_as_few_modules_again_as_fit():
    profile = network(
        [10] * 8, width=2
    )  # a block makes its second slot again, in two steps of forward
    plan = plan_of("recompute", profile, Budgets(70 * MB))
    assert plan.feasible
    assert len(plan.recomputed) == 1
    assert plan.recomputed_bytes == 10 * MB
    assert {d.action for d in plan.decisions} == {Action.KEEP, Action.RECOMPUTE}
    assert replay(profile, plan, MACHINE).recompute_ns == 20_000_000
    kept = plan_of("recompute", profile, Budgets(80 * MB))
    assert kept.recomputed == ()


def test_recompute_keeps_what_the_next_module_reads():
    profile = network([10] * 8, width=2)
    plan = plan_of("recompute", profile, Budgets(52 * MB))
    fates = [decision.action for decision in plan.decisions]
    assert fates[::2] == [Action.KEEP] * 4  # the inputs of the blocks
    assert plan.feasible


def test_recompute_takes_what_frees_most_for_its_time():
    profile = network([10, 10, 10, 30, 10, 10], width=2)
    plan = plan_of("recompute", profile, Budgets(60 * MB))
    assert plan.recomputed == ("block.1",)
    (reason,) = (d.reason for d in plan.decisions if d.action is Action.RECOMPUTE)
    assert reason == "recomputed by block.1; 28.61 MiB in 20.0 ms"


def test_recompute_says_so_where_it_knows_of_no_module():
    plan = plan_of("recompute", stack([10] * 4), Budgets(20 * MB))
    assert plan.notes[0].startswith("the profile has no module")
    assert not plan.feasible


def test_modules_that_must_not_be_run_again_are_not():
    profile = replace(network([10] * 8, width=2), unrepeatable=("block.1", "block.2"))
    plan = plan_of("recompute", profile, Budgets(10 * MB))
    assert set(plan.recomputed) == {"block.0", "block.3"}


def test_sublinear_runs_all_again_and_cost_aware_what_it_must():
    profile = network([10] * 16, width=4)
    case = PlanningProblem(profile, MACHINE, Budgets(140 * MB))
    everything = sublinear(case)
    assert len(everything.recomputed) == 4
    least = min(recompute_ns(case, one) for one in cost_aware(case) if case.fits(one))
    assert least < recompute_ns(case, everything)
    assert case.residency(everything).hard_bytes < 0.6 * profile.saved_bytes


@settings(max_examples=tries(60))
@given(networks(), st.floats(0.1, 1.2))
def test_recompute_never_moves_a_byte_nor_runs_a_module_inside_another(profile, share):
    plan = plan_of("recompute", profile, Budgets(int(share * profile.saved_bytes), AMPLE, AMPLE))
    assert plan.offloaded_bytes == 0
    inside = [(a, b) for a in plan.recomputed for b in plan.recomputed if b.startswith(a + ".")]
    assert inside == []
    machine = Machine("m", 1e9, 1e9, 0, 1e9, 1e9)
    assert replay(profile, plan, machine).stall_ns == 0 or not plan.feasible


def test_the_policies_are_what_they_are_called():
    for name in policies.names():
        plan = plan_of(name, stack([10] * 3), Budgets(15 * MB, AMPLE, AMPLE))
        assert plan.policy == name
        with pytest.raises(AttributeError):
            plan.policy = "other"
