"""What ``print(session.summary())`` says: structure and figures, not layout."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.core.errors import ConfigError
from penstock.core.units import MIB
from penstock.observe.clock import ManualClock
from penstock.observe.events import Stage, StallCause
from penstock.observe.recorder import Recorder
from penstock.observe.summary import RunFacts, SlotFact, Summary, summarize
from penstock.observe.summary_text import TOP_REASONS, percent, render, to_text

MS = 10**6


def slot(nbytes: int, place: str, reason: str) -> SlotFact:
    action, _, tier = place.partition(" ")
    return SlotFact(nbytes=nbytes, action=action, tier=tier, reason=reason)


FACTS = RunFacts(
    policy="auto",
    device="cpu",
    budget_bytes=64 * MIB,
    host_budget_bytes=32 * MIB,
    steps=2,
    slots=(
        slot(30 * MIB, "offload flash", "idle long enough; 12 ms"),
        slot(20 * MIB, "offload flash", "idle long enough; 3 ms"),
        slot(1000, "keep", "below the floor of 1 MiB"),
        slot(2000, "keep", "below the floor of 1 MiB"),
    ),
    saved_peak_bytes=640 * MIB,
    tbw_bytes=600 * 10**12,
    warnings=("the disk filled up in step 1",),
)


@pytest.fixture
def recorder() -> Recorder:
    clock = ManualClock()
    recorder = Recorder(clock=clock)
    recorder.level("device", 64 * MIB)
    recorder.level("rss", 900 * MIB)
    recorder.span(Stage.WRITE, 0, 100 * MS, nbytes=300 * 10**6, tier="flash")
    recorder.span(Stage.WRITE, 50 * MS, 150 * MS, nbytes=300 * 10**6, tier="flash")
    recorder.span(Stage.READ, 0, 100 * MS, nbytes=400 * 10**6, tier="flash")
    recorder.span(Stage.STALL, 0, 3 * MS, cause=StallCause.BUDGET)
    recorder.span(Stage.STALL, 0, 5 * MS, cause=StallCause.LATE)
    recorder.span(Stage.STALL, 9 * MS, 10 * MS, cause=StallCause.BUDGET)
    recorder.count("fallback.host", 2)
    recorder.count("write.failed.flash", 2)
    recorder.count("prefetch.missed", 3)
    clock.advance(500 * MS)
    recorder.level("device", 0)
    clock.advance(500 * MS)
    return recorder


@pytest.fixture
def summary(recorder) -> Summary:
    return summarize(recorder.snapshot(), FACTS)


def test_bandwidth_is_bytes_over_the_time_in_which_any_transfer_ran(summary):
    flows = {(line.tier, line.stage): line for line in summary.flows}
    assert flows["flash", "write"].bytes_per_s == pytest.approx(600e6 / 0.15)
    assert flows["flash", "read"].bytes_per_s == pytest.approx(400e6 / 0.1)
    assert set(flows) == {("flash", "write"), ("flash", "read")}


def test_what_each_codec_made_of_its_bytes(recorder):
    for codec, source, frame in (("narrow", 10 * MIB, 2 * MIB), ("zero-value", 90 * MIB, 48 * MIB)):
        for part in (0.25, 0.75):
            recorder.count(f"encoded.source_bytes.{codec}", int(source * part))
            recorder.count(f"encoded.frame_bytes.{codec}", int(frame * part))
    told = summarize(recorder.snapshot(), FACTS)
    assert [(c.codec, c.source_bytes, c.frame_bytes) for c in told.codecs] == [
        ("zero-value", 90 * MIB, 48 * MIB),
        ("narrow", 10 * MIB, 2 * MIB),
    ]
    assert told.codecs[1].ratio == pytest.approx(0.2)
    assert told.to_json()["codecs"][1]["codec"] == "narrow"
    text = str(told)
    assert ["zero-value", "90.00", "MiB", "48.00", "MiB", "53.3", "%"] in map(
        str.split, text.splitlines()
    )
    assert "encoded." not in text  # the table tells it; other counters are still listed
    assert "write.failed.flash 2" in text


def test_a_run_without_codecs_does_not_mention_them(summary):
    assert summary.codecs == ()
    assert "Encoded" not in str(summary)


def test_stalls_by_cause_longest_first(summary):
    assert [(line.cause, line.count, line.total_ms) for line in summary.stalls] == [
        ("late_prefetch", 1, 5.0),
        ("budget", 2, 4.0),
    ]
    assert summary.stalls[1].per_step_ms == 2.0
    assert summary.stalls[1].share == pytest.approx(0.004)


def test_memory_against_its_budget(summary):
    device, rss = summary.memory
    assert (device.memory, device.peak_bytes, device.average_bytes) == (
        "device",
        64 * MIB,
        32 * MIB,
    )
    assert device.budget_bytes == 64 * MIB
    assert (rss.memory, rss.budget_bytes) == ("rss", None)


def test_slots_are_added_up_by_reason_without_detail(summary):
    assert [(p.action, p.tier, p.reason, p.tensors, p.nbytes) for p in summary.places] == [
        ("offload", "flash", "idle long enough", 2, 50 * MIB),
        ("keep", "", "below the floor of 1 MiB", 2, 3000),
    ]


def test_misses_fallbacks_and_wear(summary):
    assert (summary.misses, summary.fallbacks) == (3, 2)
    assert summary.ssd_written_bytes == 600 * 10**6
    assert summary.tbw_share == pytest.approx(1e-6)
    assert summary.steps_to_wear_out == 2_000_000


def test_what_the_runtime_counts_is_a_miss_or_a_fallback(recorder):
    recorder.count("prefetch.missed", 2)
    recorder.count("spill.full.flash", 10)
    recorder.count("spill.failed.host", 100)
    counted = summarize(recorder.snapshot(), FACTS)
    assert (counted.misses, counted.fallbacks) == (5, 112)


def test_wear_is_unknown_without_a_tbw_and_endless_without_writes(recorder):
    no_tbw = summarize(recorder.snapshot(), RunFacts(policy="all", device="cpu", budget_bytes=None))
    assert (no_tbw.tbw_share, no_tbw.steps_to_wear_out) == (None, None)
    idle = summarize(
        Recorder(clock=ManualClock()).snapshot(),
        RunFacts(policy="keep", device="cpu", budget_bytes=None, steps=9, tbw_bytes=10**15),
    )
    assert (idle.tbw_share, idle.steps_to_wear_out) == (0.0, None)


def test_only_ssd_tiers_wear_the_ssd(recorder):
    recorder.span(Stage.WRITE, 0, 1, nbytes=999, tier="host")
    assert summarize(recorder.snapshot(), FACTS).ssd_written_bytes == 600 * 10**6


def test_a_tbw_that_makes_no_sense_is_refused(recorder):
    facts = RunFacts(policy="all", device="cpu", budget_bytes=None, tbw_bytes=0)
    with pytest.raises(ConfigError, match="TBW of 0 bytes"):
        summarize(recorder.snapshot(), facts)


def test_json_is_json_and_complete(summary):
    data = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert data["schema"] == 1
    assert set(data) == {"schema", *(each.name for each in dataclasses.fields(Summary))}
    assert data["flows"][0]["stage"] == "write"
    assert data["counters"] == {
        "fallback.host": 2,
        "prefetch.missed": 3,
        "write.failed.flash": 2,
    }


@pytest.mark.parametrize(
    "said",
    [
        "2 optimizer steps in 1.00 s, policy auto, device cpu",
        "saves 640.00 MiB at its peak; it ran in 64.00 MiB, 10.0 times less",
        "4.00 GB/s",
        "late_prefetch",
        "5.0 ms",
        "64.00 MiB",
        "100.0 %",
        "offload → flash",
        "below the floor of 1 MiB",
        "3 misses",
        "2 fallbacks",
        "0.0001 % of its 600 TBW",
        "2e+06 optimizer steps",
        "write.failed.flash 2",
        "warning: the disk filled up in step 1",
    ],
)
def test_the_text_says(summary, said):
    assert said in str(summary)


def test_what_is_not_less_is_not_called_less(recorder):
    text = str(summarize(recorder.snapshot(), replace(FACTS, saved_peak_bytes=60 * MIB)))
    assert "saves 60.00 MiB at its peak; it ran in 64.00 MiB\n" in text


def test_a_peak_over_the_budget_is_pointed_out(recorder):
    recorder.level("device", 65 * MIB)
    assert "101.6 % OVER" in str(summarize(recorder.snapshot(), FACTS))


def test_text_has_no_colour_codes_and_a_terminal_has(summary, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in str(summary)
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    terminal.print(summary)
    assert "\x1b[" in terminal.file.getvalue()


@pytest.mark.parametrize("columns", [20, 60, 75, 300])
def test_no_line_is_wider_than_the_terminal_within_reason(summary, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, str(summary).splitlines())) <= min(max(columns, 60), 110)


def test_an_empty_run_is_a_short_text():
    facts = RunFacts(policy="keep", device="cpu", budget_bytes=None)
    text = str(summarize(Recorder(clock=ManualClock()).snapshot(), facts))
    assert "0 optimizer steps" in text
    assert "Traffic" not in text


def test_many_reasons_are_cut_to_the_largest_and_the_rest_added_up(recorder):
    slots = tuple(slot(2**n * MIB, "keep", f"reason {n}") for n in range(TOP_REASONS + 3))
    facts = RunFacts(policy="all", device="cpu", budget_bytes=None, slots=slots)
    text = to_text(render(summarize(recorder.snapshot(), facts)), width=100)
    assert f"reason {TOP_REASONS + 2}" in text
    assert "reason 2" not in text
    assert "3 other reasons" in text
    assert "7.00 MiB" in text


def test_brackets_in_names_are_not_markup(recorder):
    facts = RunFacts(
        policy="all",
        device="cpu",
        budget_bytes=None,
        slots=(slot(1, "keep", "held by [bold]layers[0]"),),
        warnings=("slot [red]x",),
    )
    text = str(summarize(recorder.snapshot(), facts))
    assert "held by [bold]layers[0]" in text
    assert "slot [red]x" in text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0 %"), (0.1234, "12.3 %"), (1e-6, "0.0001 %"), (2.0, "200.0 %")]
)
def test_percent(share, text):
    assert percent(share) == text
