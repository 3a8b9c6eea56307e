"""Slots, profiles, machines and plans as values: printing, matching, checking, JSON."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from plan_profiles import MACHINE, MB, MS, encodable, machines, profiles, stack

from penstock.core.errors import ConfigError, PlanError
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
)


def test_a_slot_prints_as_users_read_it():
    assert str(SlotKey("features.3", 0, 64 * 2**20)) == "features.3#0 (64.00 MiB)"
    assert str(SlotKey("", 2, 512)) == "<root>#2 (512 B)"


def test_slots_match_neighbouring_sizes_and_no_others():
    key = SlotKey("a", 0, 2**20)
    assert key.match_key == SlotKey("a", 0, round(1.04 * 2**20)).match_key
    assert key.match_key == SlotKey("a", 0, round(0.96 * 2**20)).match_key
    assert key.match_key != SlotKey("a", 0, round(1.05 * 2**20)).match_key
    assert key.match_key != SlotKey("a", 1, 2**20).match_key
    assert key.match_key != SlotKey("b", 0, 2**20).match_key
    assert SlotKey("a", 0, 2**21).bucket == key.bucket + 8
    assert SlotKey("a", 0, 0).bucket == -1


def test_the_peak_is_what_is_alive_at_once():
    # two passes one after the other: only one is alive
    profile = stack([3, 4, 5], passes=2, small_bytes=7)
    assert profile.saved_bytes == 24 * MB
    assert profile.peak_saved_bytes == 12 * MB + 7


def test_a_slot_lives_until_the_next_node_and_unneeded_ones_until_the_pass_ends():
    def slot(name, saved, needed):
        return SlotProfile(SlotKey(name, 0, 1), 0, saved, needed, "", False, "")

    profile = Profile(
        "cpu",
        (
            slot("a", 0, 5 * MS),
            slot("b", 1, 5 * MS + 10_000),  # 10 us after a: the same node
            slot("never", 2, None),
            slot("c", 6 * MS, 7 * MS),  # saved while a and b are in use
        ),
        (PassProfile(0, 0, 4 * MS, 8 * MS),),
    )
    named = [(event.name, profile.slots[i].key.module) for _, event, i in profile.steps]
    assert named == [
        ("SAVE", "a"),
        ("SAVE", "b"),
        ("SAVE", "never"),
        ("USE", "a"),
        ("USE", "b"),
        ("SAVE", "c"),
        ("FREE", "a"),
        ("FREE", "b"),
        ("USE", "c"),
        ("FREE", "c"),
        ("FREE", "never"),
    ]
    assert profile.peak_saved_bytes == 4
    assert [profile.slots[i].key.module for i in profile.needs] == ["a", "b", "c"]


@given(profiles())
def test_every_slot_is_saved_before_it_is_used_before_it_is_freed(profile):
    seen = {}
    for _, event, i in profile.steps:
        seen.setdefault(i, []).append(event.name)
    for i, slot in enumerate(profile.slots):
        used = ["USE"] if slot.needed_at_ns is not None else []
        assert seen[i] == ["SAVE", *used, "FREE"]


@given(profiles())
def test_profiles_survive_json(profile):
    assert Profile.from_json(profile.to_json()) == profile


@given(machines())
def test_machines_survive_json(machine):
    assert Machine.from_json(machine.to_json()) == machine


def edited(text, **changes):
    data = json.loads(text)
    for name, value in changes.items():
        if value is ...:
            del data[name]
        else:
            data[name] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 3}, r"profile 'p\.json': unknown field 'colour'; known are device, slots"),
        ({"slots": ...}, r"profile 'p\.json': field 'slots' is missing"),
        ({"slots": 3}, r"profile 'p\.json'\.slots: 3 is not a list"),
        ({"slots": [3]}, r"slots\[0\]: 3 is not an object"),
        ({"small_bytes": 1.5}, r"small_bytes: 1\.5 is float, not int"),
        ({"small_bytes": True}, r"small_bytes: True is bool, not int"),
        ({"device": None}, r"device: None is NoneType, not str"),
        ({"version": 99}, r"field 'version' is 99, this Penstock reads 6"),
        ({"penstock": "plan"}, r"not a Penstock profile"),
        ({"passes": []}, r"belongs to pass 0, which the profile does not have"),
    ],
)
def test_a_malformed_profile_names_the_field(changes, message):
    text = edited(stack([1]).to_json(), **changes)
    with pytest.raises(PlanError, match=message):
        Profile.from_json(text, source="p.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"'])
def test_what_is_no_document_at_all_is_a_plan_error(text):
    for kind in (Profile, Plan, Machine):
        with pytest.raises(PlanError, match="not"):
            kind.from_json(text)


def test_a_profile_that_contradicts_itself_is_refused():
    span = PassProfile(0, 0, 5, 9)
    with pytest.raises(PlanError, match="needed at 1 ns, before it is saved at 2 ns"):
        Profile("cpu", (SlotProfile(SlotKey("a", 0, 1), 0, 2, 1, "", False, ""),), (span,))
    with pytest.raises(PlanError, match="0 bytes"):
        Profile("cpu", (SlotProfile(SlotKey("a", 0, 0), 0, 2, 3, "", False, ""),), (span,))
    with pytest.raises(PlanError, match="times of pass 0 are not in order"):
        Profile("cpu", (), (PassProfile(0, 5, 4, 9),))
    with pytest.raises(PlanError, match="two passes"):
        Profile("cpu", (), (span, span))


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan")])
def test_a_machine_without_speed_is_refused_by_field(bad):
    with pytest.raises(ConfigError, match="machine 'm': flash_read_bytes_per_s is"):
        Machine("m", 1.0, bad, 0.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="machine 'm': flash_latency_s is -1"):
        Machine("m", 1.0, 1.0, -1, 1.0, 1.0)


def test_a_machine_file_is_named_with_the_field(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.to_json())
    assert Machine.load(path) == MACHINE
    path.write_text(edited(MACHINE.to_json(), flash_write_bytes_per_s=0))
    with pytest.raises(ConfigError, match=r"machine\.json.*flash_write_bytes_per_s is 0"):
        Machine.load(path)
    path.write_text(edited(MACHINE.to_json(), flash_latency_s=...))
    with pytest.raises(ConfigError, match=r"machine\.json.*'flash_latency_s' is missing"):
        Machine.load(path)
    with pytest.raises(ConfigError, match=r"nowhere\.json' cannot be read"):
        Machine.load(tmp_path / "nowhere.json")


def test_a_negative_budget_is_refused():
    with pytest.raises(ConfigError, match="host_bytes is -1"):
        Budgets(1, -1)


def plan_of(*decisions, **fields):
    return Plan("test", Budgets(10), decisions, (), **{"window_bytes": 0, **fields})


def test_a_plan_is_looked_up_by_size_bucket():
    gone = Decision(SlotKey("a", 0, 2**20), Action.OFFLOAD, "flash", "why")
    plan = plan_of(gone, Decision(SlotKey("b", 0, 5), Action.KEEP, "", "why"))
    assert plan.lookup(SlotKey("a", 0, 2**20 + 9000)) is gone
    assert plan.lookup(SlotKey("a", 0, 9 * 2**20)) is None
    assert (plan.offloaded_bytes, plan.kept_bytes) == (2**20, 5)
    assert plan.feasible
    assert not plan_of(notes=("infeasible: no",)).feasible


def test_a_plan_prints_every_decision_with_its_reason():
    plan = plan_of(
        Decision(SlotKey("a", 0, 2**20), Action.OFFLOAD, "host", "idle 1.20 s"),
        Decision(SlotKey("long.name", 0, 2**20), Action.KEEP, "", "tail"),
        notes=("flash is slow",),
    )
    assert str(plan).splitlines() == [
        "plan 'test' for 10 B of device memory: 1 slots offloaded (1.00 MiB), 1 kept (1.00 MiB),"
        " read window 0 B",
        "  note: flash is slow",
        "  a#0 (1.00 MiB)          offload host   idle 1.20 s",
        "  long.name#0 (1.00 MiB)  keep           tail",
    ]


def test_a_plan_tells_how_each_slot_is_encoded_and_what_that_leaves():
    plan = plan_of(
        Decision(SlotKey("a", 0, 2**20), Action.OFFLOAD, "flash", "idle", "zero-value", 0.25),
        Decision(SlotKey("b", 0, 2**20), Action.OFFLOAD, "host", "idle"),
        Decision(SlotKey("c", 0, 2**20), Action.KEEP, "", "tail"),
    )
    assert (plan.offloaded_bytes, plan.encoded_bytes) == (2 * 2**20, 2**20 + 2**18)
    assert str(plan).splitlines() == [
        "plan 'test' for 10 B of device memory: 2 slots offloaded (2.00 MiB, as about 1.25 MiB),"
        " 1 kept (1.00 MiB), read window 0 B",
        "  a#0 (1.00 MiB)  offload flash zero-value  idle",
        "  b#0 (1.00 MiB)  offload host              idle",
        "  c#0 (1.00 MiB)  keep                      tail",
    ]
    assert Plan.from_json(plan.to_json()) == plan


def test_a_decision_encodes_only_what_is_offloaded():
    key = SlotKey("a", 0, 5)
    with pytest.raises(PlanError, match="action keep cannot have codec 'narrow'"):
        Decision(key, Action.KEEP, "", "", "narrow", 0.5)
    with pytest.raises(PlanError, match=r"ratio 0\.5 with codec ''"):
        Decision(key, Action.OFFLOAD, "flash", "", "", 0.5)
    for ratio in (-0.1, float("nan"), float("inf")):
        with pytest.raises(
            PlanError, match=r"ratio .* with codec 'narrow'; it must be zero or more"
        ):
            Decision(key, Action.OFFLOAD, "flash", "", "narrow", ratio)


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan")])
def test_a_sample_without_speed_is_refused_by_field(bad):
    with pytest.raises(
        PlanError, match=r"sample 'narrow': encode_bytes_per_s is .* must be positive"
    ):
        CodecSample("narrow", 0.5, bad, 1.0)
    with pytest.raises(PlanError, match="sample 'narrow': decode_bytes_per_s is"):
        CodecSample("narrow", 0.5, 1.0, bad)
    if bad:
        with pytest.raises(PlanError, match=r"sample 'narrow': ratio is .* must be zero or more"):
            CodecSample("narrow", bad, 1.0, 1.0)


def test_a_sample_has_a_name_and_there_is_one_of_each():
    with pytest.raises(PlanError, match="has no name"):
        CodecSample("", 0.5, 1.0, 1.0)
    sample = CodecSample("narrow", 0.5, 1.0, 1.0)
    with pytest.raises(PlanError, match=r"layer\.0#0 .* two samples of one codec: narrow, narrow"):
        encodable(stack([1]), sample, sample)


def test_a_sample_foretells_bytes_and_seconds():
    sample = CodecSample("narrow", 0.5, 1e9, 2e9)
    assert sample.encoded_bytes(3) == 2  # whole bytes, and rather too many
    assert replace(sample, ratio=0.0).encoded_bytes(3) == 1
    assert (sample.encode_s(10**9), sample.decode_s(10**9)) == (1.0, 0.5)


def test_a_plan_that_contradicts_itself_is_refused():
    key = SlotKey("a", 0, 1_000_000)
    with pytest.raises(PlanError, match="action keep cannot have tier 'flash'"):
        Decision(key, Action.KEEP, "flash", "")
    with pytest.raises(PlanError, match="action offload cannot have tier 'tape'"):
        Decision(key, Action.OFFLOAD, "tape", "")
    kept = Decision(key, Action.KEEP, "", "")
    with pytest.raises(PlanError, match="two decisions match the same slot"):
        plan_of(kept, Decision(SlotKey("a", 0, 1_000_001), Action.KEEP, "", ""))
    with pytest.raises(PlanError, match="window_bytes is -1"):
        plan_of(window_bytes=-1)
    text = edited(plan_of(kept).to_json(), policy=5)
    with pytest.raises(PlanError, match="policy: 5 is int, not str"):
        Plan.from_json(text)
    text = plan_of(kept).to_json().replace('"keep"', '"burn"')
    with pytest.raises(PlanError, match="'burn' is none of keep, offload"):
        Plan.from_json(text)
