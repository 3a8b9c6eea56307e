"""Which slots are encoded: where a codec pays by measured figures, and never where it would cost time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_profiles import MACHINE, MB, encodable, machines, profiles, samples, stack

from penstock.plan import Action, Budgets, CodecSample, Machine, Profile, pipeline, policies
from penstock.plan.encoding import MARGIN, best, cost_s, round_trip_s
from penstock.plan.groups import groups_of
from penstock.plan.pipeline import choose
from penstock.plan.placement import place, rooms_for
from penstock.plan.replay import replay
from penstock.plan.window import read_ahead_bytes

AMPLE = 10**12
QUICK = CodecSample("zero-value", 0.5, 8e9, 8e9)
SLOW = CodecSample("exponent", 0.25, 5e8, 1e9)
auto = policies.get("auto")
ranked = policies.get("ranked")


def placed(profile, budgets):
    groups = list(groups_of(profile))
    return [pair for pair in zip(groups, place(groups, budgets), strict=True) if pair[1]]


def paper_s(profile, machine, pairs, codecs):
    """Seconds of all phases of all passes on paper: the busiest stage of each."""
    return sum(max(one) for one in pipeline._busy(profile, machine, pairs, codecs).values())


def codecs(plan):
    return {decision.key.module: decision.codec for decision in plan.decisions}


def at_speed(machine, factor):
    return replace(
        machine,
        flash_write_bytes_per_s=machine.flash_write_bytes_per_s * factor,
        flash_read_bytes_per_s=machine.flash_read_bytes_per_s * factor,
    )


def test_a_codec_pays_if_it_saves_a_tenth_of_the_way_out_and_back():
    # 1 ns a byte each way; half the bytes save 1 ns, of which 0.2 are the margin
    assert best([CodecSample("c", 0.5, 2.6e9, 2.6e9)], MACHINE, "flash") is not None
    assert best([CodecSample("c", 0.5, 2.4e9, 2.4e9)], MACHINE, "flash") is None
    assert best([CodecSample("c", 0.95, 1e12, 1e12)], MACHINE, "flash") is None
    assert (
        best([CodecSample("c", 0.5, 2.6e9, 2.6e9)], MACHINE, "host") is None
    )  # four times as fast


@pytest.mark.parametrize(
    ("device", "tier", "chosen"),
    [
        ("cpu", "host", True),
        ("cuda", "host", False),
        ("cpu", "flash", True),
        ("cuda", "flash", True),
    ],
)
def test_over_the_link_of_a_device_a_codec_must_pay_with_nothing_overlapping(device, tier, chosen):
    """Its frames wait behind the copies of whole tensors there."""
    profile = replace(
        encodable(stack([64] * 4), CodecSample("c", 0.5, 1.5e9, 1.5e9)), device=device
    )
    assert best(profile.slots[0].codecs, MACHINE, tier) is None
    slow = replace(MACHINE, host_write_bytes_per_s=1e9, host_read_bytes_per_s=1e9)
    assert best(profile.slots[0].codecs, slow, tier) is None
    found = choose(profile, slow, [(group, tier) for group in groups_of(profile)])
    assert any(found) is chosen


def test_the_quickest_of_those_that_pay_is_taken():
    assert best((), MACHINE, "flash") is None
    assert best((SLOW,), MACHINE, "flash") is None
    assert best((SLOW, QUICK), MACHINE, "flash") is QUICK
    assert best((SLOW, QUICK), at_speed(MACHINE, 0.1), "flash") is SLOW  # now bytes count for more


@given(samples(), machines(), st.sampled_from(["flash", "host"]), st.integers(1, 10**10))
def test_what_is_chosen_is_quicker_on_paper_than_the_bytes_as_they_are(
    these, machine, tier, nbytes
):
    sample = best(these, machine, tier)
    assert sample == best(these[::-1], machine, tier)
    if sample is not None:
        rounding_s = 2 * cost_s(1, machine, tier, None)  # of whole bytes
        raw_s = round_trip_s(nbytes, machine, tier, None)
        assert round_trip_s(nbytes, machine, tier, sample) <= raw_s * (1 + 1e-9) + rounding_s
        assert cost_s(nbytes, machine, tier, sample) <= raw_s
        assert sample.ratio <= 1 - MARGIN


@given(samples(), machines(), st.floats(1e-3, 1))
def test_a_slower_tier_never_loses_a_codec(these, machine, factor):
    fast, slow = best(these, machine, "flash"), best(these, at_speed(machine, factor), "flash")
    if fast is not None:
        assert slow is not None
        assert slow.ratio <= fast.ratio


@given(samples(), machines(), st.floats(0, 1))
def test_latency_decides_nothing(these, machine, latency_s):
    late = replace(machine, flash_latency_s=latency_s)
    assert best(these, late, "flash") == best(these, machine, "flash")


@given(profiles(), machines(), st.sampled_from([0, 900, AMPLE]), st.sampled_from([900, AMPLE]))
def test_no_pass_is_slower_on_paper_than_without_codecs(profile, machine, host, flash):
    pairs = placed(profile, Budgets(0, host, flash))
    chosen = choose(profile, machine, pairs)
    assert chosen == choose(profile, machine, pairs)
    raw_s = paper_s(profile, machine, pairs, [None] * len(pairs))
    assert paper_s(profile, machine, pairs, chosen) <= raw_s * (1 + 1e-9)
    for (group, _), sample in zip(pairs, chosen, strict=True):
        assert sample is None or sample in group.codecs


def test_one_encoder_serves_all_so_it_takes_no_more_than_the_flash_is_spared():
    # each way a byte costs the flash 1 ns, or the encoder 0.65 and the flash 0.1: alone that pays, but
    # ten of ten would keep the encoder busy for longer than seven of them keep either
    sample = CodecSample("c", 0.1, 1e9 / 0.65, 1e9 / 0.65)
    assert best([sample], MACHINE, "flash") is not None
    profile = encodable(stack([100] * 10, step_ms=1), sample)
    pairs = placed(profile, Budgets(0, 0, AMPLE))
    chosen = choose(profile, MACHINE, pairs)
    assert chosen == [sample] * 7 + [None] * 3
    assert paper_s(profile, MACHINE, pairs, chosen) == pytest.approx(2 * 0.455)
    assert paper_s(profile, MACHINE, pairs, [sample] * 10) == pytest.approx(2 * 0.65)


def test_where_flash_is_the_bottleneck_a_codec_that_hides_behind_it_is_used():
    # 1.4 ns a byte for the codec, 2 ns for the flash: one after the other is slower, at once quicker
    sample = CodecSample("c", 0.5, 1e9 / 0.7, 1e9 / 0.7)
    assert best([sample], MACHINE, "flash") is None
    fast_network = encodable(stack([100] * 10, step_ms=10), sample)
    pairs = placed(fast_network, Budgets(0, 0, AMPLE))
    chosen = choose(fast_network, MACHINE, pairs)
    count = sum(one is not None for one in chosen)
    assert count == 8  # the encoder works for 0.56 s then, the flash for 0.6
    raw_s = paper_s(fast_network, MACHINE, pairs, [None] * 10)
    assert raw_s == pytest.approx(2.0)
    assert paper_s(fast_network, MACHINE, pairs, chosen) == pytest.approx(1.2)
    slow_network = encodable(stack([100] * 10, step_ms=200), sample)
    pairs = placed(slow_network, Budgets(0, 0, AMPLE))
    assert choose(slow_network, MACHINE, pairs) == [None] * 10


def test_the_encoder_takes_first_what_spares_the_flash_most():
    dense = CodecSample("c", 0.7, 1e9 / 0.7, 1e9 / 0.7)
    sparse = CodecSample("c", 0.2, 1e9 / 0.7, 1e9 / 0.7)
    profile = encodable(stack([100] * 10, step_ms=10), dense)
    profile = encodable(profile, sparse, only={3, 6, 8})
    chosen = choose(profile, MACHINE, placed(profile, Budgets(0, 0, AMPLE)))
    assert [chosen[i] for i in (3, 6, 8)] == [sparse] * 3
    assert chosen.count(None) > 0


def test_two_tiers_share_the_encoder():
    """Each tier alone is worth its codec; both together would make the encoder slower than either."""
    even = Machine("even", 1e9, 1e9, 0.0, 1e9, 1e9)
    sample = CodecSample("c", 0.1, 1e9 / 0.75, 1e9 / 0.75)
    profile = encodable(stack([100] * 10, step_ms=1), sample)
    pairs = placed(profile, Budgets(0, 501 * MB, AMPLE))
    assert [tier for _, tier in pairs].count("host") == 5
    everything = paper_s(profile, even, pairs, [sample] * 10)
    raw_s = paper_s(profile, even, pairs, [None] * 10)
    assert everything > raw_s
    assert paper_s(profile, even, pairs, choose(profile, even, pairs)) <= raw_s


def test_slots_of_one_decision_share_the_worst_of_their_samples():
    first = encodable(stack([10], passes=2), QUICK, only={0})
    assert groups_of(first)[0].codecs == ()  # not sampled on both
    worse = CodecSample("zero-value", 0.6, 4e9, 9e9)
    both = encodable(encodable(first, worse, SLOW, only={1}), QUICK, only={0})
    assert groups_of(both)[0].codecs == (CodecSample("zero-value", 0.6, 4e9, 8e9),)


def test_every_policy_encodes_where_it_pays_and_says_so():
    profile = encodable(stack([10] * 10), SLOW, QUICK)
    for name in ("all", "ranked"):
        plan = policies.get(name)(profile, MACHINE, Budgets(40 * MB, 0, AMPLE))
        gone = [d for d in plan.decisions if d.action is Action.OFFLOAD]
        assert len(gone) >= 5
        assert {(d.codec, d.ratio) for d in gone} == {("zero-value", 0.5)}
        assert plan.encoded_bytes == plan.offloaded_bytes // 2
        assert gone[0].reason == (
            "long idle; 190.0 ms, zero-value: 0.50 of the bytes, encoded in 1.2 ms,"
            " written in 5.0 ms, read in 5.0 ms, decoded in 1.2 ms"
        )
    kept = policies.get("keep")(profile, MACHINE, Budgets(40 * MB))
    assert set(codecs(kept).values()) == {""}


def test_ranked_offloads_what_shrinks_and_keeps_what_does_not():
    # in turns: neighbours are idle for about as long, and one of two has become half as expensive
    profile = encodable(stack([10] * 10), QUICK, only={1, 3, 5})
    plan = ranked(profile, MACHINE, Budgets(75 * MB, 0, AMPLE))
    raw = ranked(stack([10] * 10), MACHINE, Budgets(75 * MB, 0, AMPLE))
    gone = {d.key.module for d in plan.decisions if d.action is Action.OFFLOAD}
    assert {d.key.module for d in raw.decisions if d.action is Action.OFFLOAD} == {
        f"layer.{i}" for i in range(5)
    }
    assert {"layer.1", "layer.3", "layer.5"} <= gone
    assert plan.encoded_bytes < raw.encoded_bytes


def test_what_shrinks_can_be_back_in_time_where_it_could_not_be_as_it_is():
    # 200 MB need 400 ms for both ways, but come back after 390 ms; half of them do
    profile = stack([200, 40, 40, 40, 40, 40, 40], step_ms=30)
    plan = ranked(encodable(profile, QUICK, only={0}), MACHINE, Budgets(360 * MB, 0, AMPLE))
    assert codecs(plan)["layer.0"] == "zero-value"


def test_notes_on_slow_flash_count_what_is_written():
    slow = Machine("slow", 1e8, 2e8, 0.0, 1e9, 1e9)
    plan = ranked(encodable(stack([10] * 10), QUICK), slow, Budgets(50 * MB, 0, AMPLE))
    assert plan.notes == (
        "flash is slower than forward: it takes 350.0 ms to write what forward has 100.0 ms for",
        "flash is slower than backward: it takes 175.0 ms to read what backward has 100.0 ms for",
    )


def test_reads_run_ahead_for_shorter_and_their_targets_are_whole():
    slow = Machine("slow", 5e8, 5e8, 0.0, 1e9, 1e9)  # 20 ms to read what is used in 10
    profile = stack([10] * 6)
    everything = bytearray(b"\x01" * 6)
    # each of six is read 10 ms too late for the next: 70 ms of reading are due when the first is used
    assert read_ahead_bytes(profile, everything, slow) == 35 * MB
    instant = CodecSample("c", 0.25, 1e15, 1e15)
    quarters = dict.fromkeys(range(6), instant)  # 5 ms to read, which the network hides
    assert read_ahead_bytes(profile, everything, slow, quarters) == 10 * MB
    same = dict.fromkeys(
        range(6), CodecSample("c", 0.5, 1e15, 1e9)
    )  # 10 ms each to read and decode
    assert read_ahead_bytes(profile, everything, slow, same) == 35 * MB


def test_a_tier_is_not_filled_with_what_encoding_promises_as_long_as_there_is_another():
    """All would fit into host memory, encoded; but tomorrow they may be incompressible."""
    profile = encodable(stack([10] * 4), QUICK)
    plan = policies.get("all")(profile, MACHINE, Budgets(15 * MB, 30 * MB, 21 * MB))
    assert [d.tier for d in plan.decisions] == ["flash", "flash", "host", "host"]
    assert not any("encoded" in note for note in plan.notes)


def test_what_has_no_room_as_it_is_is_encoded_though_it_be_slower():
    """Host memory is as fast as memory; the codec would never pay. Half, and 0.15 of it more: 26.1 MB."""
    profile = encodable(stack([10] * 4), SLOW, replace(QUICK, encode_bytes_per_s=1e8))
    for host_mb, encoded in ((41, 0), (35, 1), (26, 3), (18, 4)):
        plan = policies.get("all")(profile, MACHINE, Budgets(15 * MB, host_mb * MB))
        assert [d.tier for d in plan.decisions] == ["host"] * 4
        assert [d.codec for d in plan.decisions].count("exponent") == encoded
        assert plan.feasible
        assert any(note.startswith("the host tier") for note in plan.notes) == (encoded > 0)
    plan = policies.get("all")(profile, MACHINE, Budgets(15 * MB, 14 * MB))
    assert [d.tier for d in plan.decisions].count("host") == 3


@pytest.mark.parametrize("name", ["auto", "ranked", "all"])
def test_a_budget_that_raw_bytes_cannot_keep_is_kept_by_encoded_ones(name):
    raw = stack([10] * 10)
    budgets = Budgets(30 * MB, 60 * MB)
    assert not policies.get(name)(raw, MACHINE, budgets).feasible
    plan = policies.get(name)(encodable(raw, QUICK), MACHINE, budgets)
    assert plan.feasible
    assert plan.offloaded_bytes > budgets.host_bytes > plan.encoded_bytes


def test_the_search_counts_encoded_bytes_where_flash_has_room_for_what_outgrows_host_memory():
    """Flash is as slow as the network; host memory has room for four as they are, for six encoded."""
    slow = replace(MACHINE, flash_write_bytes_per_s=3e8, flash_read_bytes_per_s=3e8)
    profile = encodable(stack([10] * 10), CodecSample("c", 0.5, 4e9, 4e9))
    budgets = Budgets(25 * MB, 41 * MB, AMPLE)
    simple, found = ranked(profile, slow, budgets), auto(profile, slow, budgets)
    assert sum(d.key.nbytes for d in simple.decisions if d.tier == "host") <= 41 * MB
    in_host = [d for d in found.decisions if d.tier == "host"]
    assert sum(d.key.nbytes for d in in_host) > 41 * MB
    assert sum(d.encoded_bytes for d in in_host) < 41 * MB
    assert replay(profile, found, slow).step_ns < replay(profile, simple, slow).step_ns


SIZES, LEAST = [40, 40, 40], [20, 20, 20]


@pytest.mark.parametrize(
    ("tiers", "room", "before", "fits"),
    [
        (("host", "", ""), (40, 0), ("", "", ""), True),
        (("host", "host", ""), (40, 0), ("host", "", ""), False),  # nothing may outgrow it
        (("host", "host", ""), (40, 40), ("host", "", ""), True),  # what does goes to flash
        (("host", "host", ""), (39, 40), ("host", "flash", ""), False),
        (("host", "host", ""), (40, 0), ("host", "host", "host"), True),  # it is so already
        (("host", "host", "host"), (40, 0), ("host", "host", "host"), False),
        (("flash", "flash", "host"), (40, 40), ("flash", "host", "host"), True),
    ],
)
def test_rooms_are_counted_encoded_where_no_byte_is_at_stake(tiers, room, before, fits):
    budgets = Budgets(0, *room)
    assert rooms_for(tiers, budgets, sizes=SIZES, least=LEAST, instead_of=before) is fits


def test_with_room_for_some_as_they_are_ranked_counts_on_no_codec():
    """The others would do as well, and be better; but only encoded."""
    profile = encodable(stack([10] * 10), CodecSample("zero-value", 0.5, 1e7, 1e7))
    plan = ranked(profile, MACHINE, Budgets(80 * MB, 41 * MB))
    assert plan.feasible
    assert set(codecs(plan).values()) == {""}


def test_a_tier_has_room_for_the_header_of_a_frame_that_did_not_shrink():
    page = 4096
    profile = stack([1])
    slot = replace(profile.slots[0], key=replace(profile.slots[0].key, nbytes=8 * page))
    raw = Profile("cpu", (slot,), profile.passes)
    assert groups_of(raw)[0].nbytes == 8 * page
    assert groups_of(encodable(raw, QUICK))[0].nbytes == 9 * page


@given(profiles(), machines(), st.integers(0, 8000), st.sampled_from([0, 2000, 9000, 30_000]))
def test_tiers_have_room_for_a_plan_as_it_is_or_with_a_margin_as_it_is_encoded(
    profile, machine, device, host
):
    groups = {group.key: group for group in groups_of(profile)}
    for name in policies.names():
        plan = policies.get(name)(profile, machine, Budgets(device, host, 20_000))
        for tier, room in (("host", host), ("flash", 20_000)):
            mine = [(groups[d.key], d.codec) for d in plan.decisions if d.tier == tier]
            assert sum(taken(*one) for one in mine) <= room
            raw = sum(group.nbytes for group, _ in mine)
            assert (raw > room) == any(f"the {tier} tier (" in note for note in plan.notes)


def taken(group, codec):
    """What a group takes of a tier, counted in another way: a page for each started one, and one more."""
    if not codec:
        return group.nbytes
    (ratio,) = (sample.ratio for sample in group.codecs if sample.codec == codec)
    pages = -(-group.nbytes * (ratio + 0.15) // 4096) + len(group.indices)
    return min(group.nbytes, pages * 4096)
