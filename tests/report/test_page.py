"""The page about a run: its numbers against the log's own, its size, and what it must not contain."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
import torch

import penstock
from penstock.core.errors import ConfigError
from penstock.observe.clock import ManualClock
from penstock.observe.events import Stage
from penstock.observe.log import EventLog
from penstock.observe.recorder import Recorder
from penstock.observe.records import read_log
from penstock.report.page import page_of
from penstock.report.page_data import MOST_BARS, PARTS, page_data
from penstock.report.slot_bars import MOST_SLOTS

SECOND = 10**9
START = 5 * SECOND


class Log:
    """A log of a clock that is moved by hand, from START on; times are seconds since then."""

    def __init__(self, path):
        self.clock = ManualClock()
        self.clock.advance(START - self.clock.now_ns())
        self.log = EventLog(path, clock=self.clock)
        self.recorder = Recorder(clock=self.clock, log=self.log)
        self.path = path

    def at(self, seconds):
        self.clock.advance(START + round(seconds * SECOND) - self.clock.now_ns())
        return self.recorder

    def span(self, stage, begin, end, **facts):
        self.recorder.span(stage, *(START + round(s * SECOND) for s in (begin, end)), **facts)

    def plan(self, slots, *, forward, backward):
        times = {"index": 1, "forward_ns": forward * SECOND, "backward_ns": backward * SECOND}
        rows = [
            {
                "slot": slot,
                "nbytes": nbytes,
                "module_kind": "Linear",
                "dtype": "float32",
                "pass": 1,
                "saved_ns": round(saved * SECOND),
                "needed_ns": round(needed * SECOND),
                "action": action,
                "tier": "flash" if action == "offload" else "",
                "codec": "",
                "reason": "because",
            }
            for slot, nbytes, action, saved, needed in slots
        ]
        fields = {"device": "cpu", "policy": "auto", "left_out": 0, "passes": [times]}
        self.log.write("plan", {"t_ns": self.clock.now_ns(), **fields, "slots": rows})

    def data(self):
        self.log.close()
        data, runs = page_data([self.path])
        return data["runs"][0], runs[0]


@pytest.fixture
def log(tmp_path):
    made = Log(tmp_path / "run.jsonl")
    yield made
    made.log.close()


def test_levels_rates_and_waits_of_each_part_of_the_run(log):
    """A run of 240 s, so that a part is a second."""
    log.recorder.begin_step(0)
    log.at(10.25).level("device", 700)
    log.at(10.5).level("device", 900)
    log.at(12.5).level("device", 300)
    log.span(Stage.WRITE, 20.5, 22.5, nbytes=4000, tier="flash")
    log.span(Stage.WRITE, 21.0, 22.0, nbytes=1000, tier="flash")
    log.span(Stage.STALL, 30.75, 32.25, cause="demand", slot="fc#0 (1 B)")
    log.span(Stage.STALL, 40.0, 40.5, cause="budget")
    log.at(240).end_step()
    run, _ = log.data()
    assert (run["length_s"], run["part_s"]) == (240.0, 1.0)
    (memory,) = run["memories"]
    assert (memory["peak_bytes"], len(memory["highest"])) == (900, PARTS)
    assert memory["highest"][9:15] == [0, 900, 900, 900, 300, 300]
    (lane,) = run["lanes"]
    assert (lane["place"], lane["client"], lane["transfers"]) == ("flash", "activations", 2)
    assert lane["bytes_per_s"][19:24] == pytest.approx([0, 1000, 3000, 1000, 0])
    assert lane["busy"][19:24] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert (lane["nbytes"], lane["busy_s"]) == (5000, pytest.approx(2.0))
    demand, budget = run["stalls"]["causes"]
    assert (demand["cause"], demand["times"], demand["total_s"]) == ("demand", 1, 1.5)
    assert demand["share"][29:34] == pytest.approx([0, 0.25, 1, 0.25, 0])
    assert budget["share"][40] == pytest.approx(0.5)
    assert run["stalls"]["longest"][0] == {
        "at_s": 30.75,
        "dur_s": 1.5,
        "cause": "demand",
        "slot": "fc#0 (1 B)",
    }
    (written,) = run["written"]
    assert written["until"][19:24] == [0, 1000, 4000, 5000, 5000]
    (bar,) = run["steps"]["bars"]
    assert (bar["index"], bar["step_s"]) == (0, 240.0)
    assert bar["stalls_s"] == {"demand": 1.5, "budget": 0.5}


def test_owners_are_sampled_and_saved_tensors_have_every_change(log):
    log.log.sample = lambda: {
        "owners": {"optimizer": 50, "saved tensors": 10},
        "limit_bytes": 200,
        "process_bytes": 1000,
    }
    log.recorder.begin_step(0)
    log.recorder.level("device", 100)
    log.recorder.level("device", 10)
    log.at(1).end_step()
    while '"holdings"' not in log.path.read_text():
        log.log.flush()
    log.at(2).level("device", 20)
    run, _ = log.data()
    assert run["owners"]["limit_bytes"] == 200
    rows = {row["owner"]: row["highest"] for row in run["owners"]["rows"]}
    assert max(rows["saved tensors"]) == 100
    assert (max(rows["optimizer"]), rows["optimizer"][-1]) == (50, 50)
    assert run["process"]["peak_bytes"] == 1000


def test_a_slot_is_in_memory_on_its_way_and_away(log):
    """In a pass of 10 s, of which 4 are forward; the profiled pass was half as long."""
    log.recorder.begin_step(0)
    slots = [("gone#0", 64, "offload", 0.5, 4.5), ("kept#0", 32, "keep", 1.0, 3.5)]
    log.plan(slots, forward=2, backward=3)
    log.span(Stage.PACK, 1.0, 1.1, slot="gone#0", nbytes=64)
    log.span(Stage.WRITE, 1.1, 2.0, slot="gone#0", nbytes=64, tier="flash")
    log.span(Stage.READ, 7.0, 8.0, slot="gone#0", nbytes=64, tier="flash")
    log.span(Stage.FORWARD, 0, 4, slot="pass 1")
    log.span(Stage.BACKWARD, 4, 10, slot="pass 1")
    log.at(10).end_step()
    log.span(Stage.FORWARD, 11, 12, slot="pass 2")  # has no backward: not the one that is shown
    run, _ = log.data()
    shown = run["pass"]
    assert (shown["name"], shown["length_s"], shown["forward_s"]) == ("pass 1", 10.0, 4.0)
    gone, kept = shown["slots"]
    assert (gone["slot"], gone["action"], gone["tier"], gone["reason"]) == (
        "gone#0",
        "offload",
        "flash",
        "because",
    )
    assert [tuple(part) for part in gone["parts"]] == [
        ("held", 1.0, 2.0),
        ("write", 1.1, 2.0),
        ("away", 2.0, 7.0),
        ("held", 7.0, 9.0),  # needed at 4.5 s of 5 in the profile
        ("read", 7.0, 8.0),
    ]
    assert (gone["measured"], kept["measured"]) == (True, False)
    assert [tuple(part) for part in kept["parts"]] == [("held", 2.0, 7.0)]


def test_the_page_of_a_long_run_stays_small(log):
    count = 4 * MOST_SLOTS
    for index in range(10 * MOST_BARS):
        log.recorder.begin_step(index)
        log.at(index + 1).end_step()
    log.span(Stage.FORWARD, 0, 1, slot="pass 1")
    for n in range(count):
        log.span(Stage.WRITE, 0.5, 0.6, slot=f"fc#{n}", nbytes=1000 + n, tier="flash")
    log.span(Stage.BACKWARD, 1, 2, slot="pass 1")
    run, _ = log.data()
    assert (run["steps"]["count"], run["steps"]["per_bar"]) == (10 * MOST_BARS, 10)
    assert len(run["steps"]["bars"]) == MOST_BARS
    slots = run["pass"]["slots"]
    assert (len(slots), run["pass"]["left_out"]) == (MOST_SLOTS, count - MOST_SLOTS)
    assert min(slot["nbytes"] for slot in slots) == 1000 + count - MOST_SLOTS
    assert len(page_of([log.path])[0]) < 400_000


def test_names_in_a_log_cannot_leave_the_data(log):
    name = "</script><script>document.title='broken'</script>&lt;"
    log.recorder.begin_step(0)
    log.span(Stage.STALL, 0, 1, cause="demand", slot=name)
    log.at(1).end_step()
    log.log.close()
    page, _ = page_of([log.path])
    assert "document.title" in page
    assert "</script><script>document" not in page
    (data,) = re.findall('<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert json.loads(data)["runs"][0]["stalls"]["longest"][0]["slot"] == name


def test_the_page_names_nothing_to_load(log):
    log.recorder.begin_step(0)
    log.at(1).end_step()
    log.log.close()
    page, _ = page_of([log.path])
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"\w+://[^\s\"'`]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, not a place
    assert not re.findall(r"<(?:link|img|iframe)|\bsrc=|@import|url\(", page)


def test_a_damaged_line_is_named(log):
    log.recorder.begin_step(0)
    log.at(1).end_step()
    log.log.close()
    lines = log.path.read_text().splitlines()
    lines.insert(1, '{"kind":"span","stage":"write","t_ns":"soon"}')
    log.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"run\.jsonl:2: a line of kind 'span' is damaged"):
        page_of([log.path])


def test_a_log_without_the_newer_lines_is_drawn_from_what_it_has(log):
    log.recorder.begin_step(0)
    log.span(Stage.FORWARD, 0, 1, slot="pass 1")
    log.span(Stage.WRITE, 0.5, 0.6, slot="fc#0 (1 B)", nbytes=1, tier="flash")
    log.span(Stage.BACKWARD, 1, 2, slot="pass 1")
    log.at(2).end_step()
    run, finished = log.data()
    assert not finished.complete
    assert not run["owners"]["rows"]
    assert not run["process"]["highest"]
    (slot,) = run["pass"]["slots"]
    assert (slot["reason"], slot["parts"][-1][0]) == ("the log has no plan for it", "away")


@pytest.fixture
def real(disk_path, small_knobs):
    """The log of a session that offloads, its plan, and its model."""
    path = disk_path / "run.jsonl"
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    config = penstock.OffloadConfig(
        device_memory="5MiB",
        flash=disk_path,
        flash_capacity="1GiB",
        floor="64KiB",
        event_log=path,
        tbw="600TB",
    )
    with penstock.offload(model, optimizer, config=config) as session:
        for _ in range(4):
            model(torch.randn(512, 512, requires_grad=True)).sum().backward()
            optimizer.step()
        plan = session.plan
    return path, plan, model


def test_a_log_has_the_plan_with_its_reasons_the_owners_and_the_model(real):
    path, plan, model = real
    records = list(read_log(path))
    planned = [record for record in records if record["kind"] == "plan"]
    decided = {
        str(one.key): (str(one.action), one.tier, one.codec, one.reason) for one in plan.decisions
    }
    assert decided
    assert decided == {
        slot["slot"]: tuple(slot[name] for name in ("action", "tier", "codec", "reason"))
        for slot in planned[-1]["slots"]
    }
    assert {action for action, *_ in decided.values()} >= {"offload"}
    samples = [record for record in records if record["kind"] == "holdings"]
    assert samples
    assert all(sample["process_bytes"] > 0 for sample in samples)
    assert all(
        (before["owners"], before["limit_bytes"]) != (after["owners"], after["limit_bytes"])
        or abs(before["process_bytes"] - after["process_bytes"]) >= 1 << 20
        for before, after in pairwise(samples)
    )
    (own,) = (record for record in records if record["kind"] == "model")
    weights = sum(each.nbytes for each in model.parameters())
    assert (own["weights_bytes"], own["gradients_bytes"]) == (weights, weights)
    assert own["states_bytes"] == 2 * weights + 4 * len(list(model.parameters()))


def test_the_data_of_a_real_run_are_those_of_its_log(real):
    path, plan, _ = real
    data, (run,) = page_data([path])
    (page,) = data["runs"]
    records = list(read_log(path))
    moved = {}
    for record in records:
        if record["kind"] == "span" and record["stage"] in ("write", "read"):
            key = record["stage"], record["tier"] == "flash"
            moved[key] = moved.get(key, 0) + record["nbytes"]
    shown = {(lane["stage"], not lane["is_once"]): lane["nbytes"] for lane in page["lanes"]}
    assert shown == moved
    peak = max(r["nbytes"] for r in records if r["kind"] == "level" and r["memory"] == "device")
    assert page["memories"][0]["peak_bytes"] == max(page["memories"][0]["highest"]) == peak
    assert page["summary"] == run.summary.to_json()
    names = {slot["slot"] for slot in page["pass"]["slots"]}
    assert names == {str(one.key) for one in plan.decisions}
