"""The page in a browser without a window: what it shows, against the test's own reading of the log."""

from __future__ import annotations

import html.parser
import shutil
import subprocess
from dataclasses import dataclass, field

import pytest
import torch

import penstock
from penstock.core.units import format_bytes, format_duration
from penstock.observe.records import read_log
from penstock.report.page import page_of

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")
VOID = {"meta", "link", "br", "input"}
KEYS = """
const send = (to, key) => to.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const graph = document.querySelector('[data-memory="device"] svg');
send(graph, "End");
const first = document.querySelector("g.slot");
first.focus();
send(first, "ArrowDown");
document.body.dataset.focused = document.activeElement.dataset.slot;
"""


@dataclass
class Element:
    """An element of the page."""

    name: str
    attributes: dict
    inside: list = field(default_factory=list)

    @property
    def text(self):
        return "".join(each if isinstance(each, str) else each.text for each in self.inside)

    def all(self, name, **attributes):
        """Elements below this one, by name and attributes; ``class_`` is one of the classes."""
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        for each in self.inside:
            if isinstance(each, Element):
                if each.name == name and all(
                    value in each.attributes.get(key, "").split()
                    if key == "class"
                    else each.attributes.get(key) == value
                    for key, value in wanted.items()
                ):
                    yield each
                yield from each.all(name, **attributes)

    def one(self, name, **attributes):
        (found,) = self.all(name, **attributes)
        return found

    def table(self, caption):
        """Cells of a table: the text and the exact value of each, by the first cell of its row."""
        (found,) = (t for t in self.all("table") if next(t.all("caption")).text.startswith(caption))
        rows = [list(row.all("td")) for row in next(found.all("tbody")).all("tr")]
        return {
            row[0].text: [(cell.text, cell.attributes.get("data-value")) for cell in row[1:]]
            for row in rows
        }


class Parser(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag, attrs):
        made = Element(tag, dict(attrs))
        self.open[-1].inside.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop().name == tag

    def handle_data(self, data):
        self.open[-1].inside.append(data)


def browse(tmp_path, page, *options):
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", *options, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def drawn(tmp_path, page):
    parser = Parser()
    parser.feed(browse(tmp_path, page, "--dump-dom"))
    root = parser.open[0].one("html")
    assert int(root.attributes["data-drawn"]) > 5  # the last statement of the script has run
    return root


def train(path, flash):
    """Train under a tight budget with an event log."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    config = penstock.OffloadConfig(
        device_memory="5MiB",
        memory="64MiB",
        flash=flash,
        flash_capacity="1GiB",
        floor="64KiB",
        event_log=path,
        tbw="600TB",
    )
    with penstock.offload(model, optimizer, config=config):
        for _ in range(4):
            model(torch.randn(512, 512, requires_grad=True)).sum().backward()
            optimizer.step()


@pytest.fixture
def path(disk_path, small_knobs):
    found = disk_path / "run.jsonl"
    train(found, disk_path)
    return found


def test_the_pictures_and_tables_are_those_of_the_log(tmp_path, path):
    root = drawn(tmp_path, page_of([path])[0])
    records = list(read_log(path))
    spans = [record for record in records if record["kind"] == "span"]
    (summary,) = (record["summary"] for record in records if record["kind"] == "summary")

    peak = max(r["nbytes"] for r in records if r["kind"] == "level" and r["memory"] == "device")
    figure = root.one("figure", data_memory="device")
    assert figure.one("path", class_="area").attributes["data-highest"] == str(peak)
    assert figure.one("line", class_="budget").attributes["data-value"] == str(5 << 20)
    assert root.table("Levels")["device"][0] == (format_bytes(peak), str(peak))

    for stage, name in (("write", "written to flash"), ("read", "read from flash")):
        mine = [s["nbytes"] for s in spans if (s["stage"], s["tier"]) == (stage, "flash")]
        row = root.table("Transfers")[f"{name}: activations"]
        assert row[0] == (str(len(mine)), None)
        assert row[1] == (format_bytes(sum(mine)), str(sum(mine)))

    waits = {}
    for span in spans:
        if span["stage"] == "stall":
            waits.setdefault(span["cause"], []).append(span["dur_ns"])
    shown = root.table("Waits by cause") if waits else {}
    assert {cause: (int(row[0][0]), float(row[1][1])) for cause, row in shown.items()} == {
        cause: (len(times), pytest.approx(sum(times) / 1e9)) for cause, times in waits.items()
    }

    steps = [record["dur_ns"] / 1e9 for record in records if record["kind"] == "step"]
    bars = [float(bar.attributes["data-value"]) for bar in root.all("rect", class_="step")]
    assert bars == pytest.approx(steps)

    for line in summary["prediction"]["lines"]:
        show = format_duration if line["unit"] == "s" else format_bytes
        _, predicted, measured, _ = root.table("Per optimizer step")[line["what"]]
        assert float(predicted[1]) == line["predicted"]
        assert measured == (show(line["measured"]), measured[1])

    for line in summary["ssd_written"]:
        row = root.table("Written to flash")[line["client"]]
        assert row[0] == (format_bytes(line["nbytes"]), str(line["nbytes"]))
    assert "% of the" in root.one("section", id="wear").text

    (own,) = (record for record in records if record["kind"] == "model")
    layers = {
        area.attributes["data-name"]: area.attributes["data-highest"]
        for area in root.one("figure", data_process="run.jsonl").all("path", class_="area")
    }
    assert layers["gradients"] == str(own["gradients_bytes"])
    assert root.table("The program's own tensors")["weights and buffers"][0][1] == str(
        own["weights_bytes"]
    )

    owners = {line["owner"]: line["peak_bytes"] for line in summary["host"]["owners"]}
    held = root.table("Most that each owner has held")["saved tensors"][0]
    assert held == (format_bytes(peak), str(owners["saved tensors"]))


def test_every_slot_is_a_bar_that_says_what_became_of_it(tmp_path, path):
    root = drawn(tmp_path, page_of([path])[0])
    plan = [record for record in read_log(path) if record["kind"] == "plan"][-1]
    bars = {bar.attributes["data-slot"]: bar for bar in root.all("g", class_="slot")}
    assert set(bars) == {slot["slot"] for slot in plan["slots"]}
    for slot in plan["slots"]:
        bar = bars[slot["slot"]]
        told = bar.attributes["aria-label"]
        assert told == next(bar.all("title")).text
        assert slot["slot"] in told  # has the module and the bytes
        assert slot["reason"] in told
        assert slot["action"] in told
        assert bar.attributes["data-value"] == str(slot["nbytes"])
        away = list(bar.all("rect", class_="away"))
        assert bool(away) == (slot["action"] == "offload")


def test_it_is_read_by_keys_and_each_picture_has_a_name(tmp_path, path):
    page = page_of([path])[0].replace("</body>", f"<script>{KEYS}</script></body>")
    root = drawn(tmp_path, page)
    for picture in root.all("svg"):
        assert picture.attributes["aria-label"]
        assert picture.attributes.get("tabindex") == "0" or list(picture.all("g", tabindex="0"))
    readout = next(root.one("figure", data_memory="device").all("div", class_="readout"))
    assert readout.attributes["aria-live"] == "polite"
    assert "device" in readout.text
    bars = [bar.attributes["data-slot"] for bar in root.all("g", class_="slot")]
    assert next(root.all("body")).attributes["data-focused"] == bars[1]
    told = next(root.all("div", id="slot-0")).text
    assert bars[1] in told


def test_ranks_stand_side_by_side_also_one_that_was_killed(tmp_path, path):
    other = path.with_name("killed.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    lines = [line for line in lines if '"kind":"summary"' not in line and '"end"' not in line]
    other.write_text("".join(lines[:-5]) + '{"kind":"sp')
    page, runs = page_of([path, other])
    assert [run.complete for run in runs] == [True, False]
    root = drawn(tmp_path, page)
    for name in ("memory", "link", "stalls", "slots", "wear"):
        section = root.one("section", id=name)
        assert [run.attributes["data-run"] for run in section.all("div", class_="run")] == [
            "run.jsonl",
            "killed.jsonl",
        ]
        assert len(list(section.all("svg"))) >= 2 or name == "stalls"
    assert set(root.table("Each in a line")) == {"run.jsonl", "killed.jsonl"}
    warnings = [each.text for each in root.all("p", class_="warning")]
    assert any("killed.jsonl: the log ends before its run did" in text for text in warnings)


def test_it_is_dark_where_the_system_is(tmp_path, path):
    image = pytest.importorskip("PIL.Image")
    page, _ = page_of([path])
    corners = []
    for options in ((), ("--force-dark-mode",)):
        shot = tmp_path / "shot.png"
        browse(tmp_path, page, f"--screenshot={shot}", *options)
        with image.open(shot) as picture:
            corners.append(sum(picture.convert("RGB").getpixel((2, 2))) / 3)
    light, dark = corners
    assert light > 200
    assert dark < 60
