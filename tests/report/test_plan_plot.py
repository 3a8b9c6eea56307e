"""The picture of a planned step, and its tables: what they tell, not how they look."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from penstock.core.units import MIB, format_bytes
from penstock.observe.summary_text import to_text
from penstock.plan.machine import Budgets, Machine
from penstock.plan.profile import CodecSample, PassProfile, Profile, SlotProfile
from penstock.plan.slots import SlotKey
from penstock.report.outcome import best_first, outcome
from penstock.report.plan_plot import plot_plan
from penstock.report.plan_table import LargestFit, all_policies, one_policy, wear

MACHINE = Machine("here", 2e9, 2e9, 1e-4, 8e9, 8e9)
LAYERS = 12
MS = 10**6


def profile(*, codecs=()):
    """Layers of 8 MiB, each needed in the reverse order."""
    slots = tuple(
        SlotProfile(
            key=SlotKey(f"net.{k}", 0, 8 * MIB), pass_index=0, saved_at_ns=k * MS,
            needed_at_ns=(3 * LAYERS - k) * MS, kind="Linear", held_elsewhere=False,
            dtype="float32", codecs=codecs,
        )
        for k in range(LAYERS)
    )  # fmt: skip
    return Profile("cpu", slots, (PassProfile(0, 0, LAYERS * MS, (3 * LAYERS + 1) * MS),))


def planned(policy="all", *, device_bytes=40 * MIB, host_bytes=0, flash_bytes=1 << 30, codecs=()):
    budgets = Budgets(device_bytes, host_bytes, flash_bytes)
    return outcome(policy, profile(codecs=codecs), MACHINE, budgets)


@pytest.fixture
def figure(monkeypatch):
    """Draw, and give the figure instead of its file."""
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []

    def draw(one):
        monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, path: drawn.append(self))
        plot_plan(one, "out.png", title="a step")
        return drawn[-1]

    return draw


def test_memory_is_drawn_tier_by_tier_with_its_budget(figure):
    one = planned()
    drawn = figure(one)
    device, flash, busy = drawn.axes
    assert drawn.get_suptitle() == "a step"
    assert device.get_title(loc="left").startswith("device memory: peak ")
    assert flash.get_title(loc="left").startswith("flash memory: peak ")
    assert busy.get_title(loc="left") == "busy"
    curve = device.lines[0]
    assert curve.get_drawstyle() == "steps-post"
    assert max(curve.get_ydata()) * MIB == one.replayed.peak_bytes
    assert device.lines[1].get_ydata()[0] == 40
    assert device.get_ylabel() == "MiB"
    assert busy.get_xlim() == (0, one.replayed.step_ns / 1e6)
    assert busy.get_xlabel() == "time in the step (ms)"


def test_what_is_busy_is_drawn_with_its_share(figure):
    one = planned()
    axis = figure(one).axes[-1]
    labels = [tick.get_text() for tick in axis.get_yticklabels()]
    assert [label.rpartition(", ")[0] for label in labels] == [
        "compute",
        "flash, written",
        "flash, read",
    ]
    share = one.replayed.flash_write_ns / one.replayed.step_ns
    assert labels[1] == f"flash, written, {share * 100:.1f} %"
    (computed, written, _) = axis.collections
    assert len(computed.get_paths()) == len(one.trace.busy["compute"])
    assert len(written.get_paths()) == len(one.trace.busy["flash_write"])


def test_codecs_have_a_row_and_what_is_never_used_none(figure):
    sample = CodecSample("zero-value", 0.1, 4e10, 4e10)
    one = planned("ranked", device_bytes=20 * MIB, codecs=(sample,))
    assert one.replayed.codec_ns > 0
    labels = [tick.get_text() for tick in figure(one).axes[-1].get_yticklabels()]
    assert labels[-1].startswith("codecs, ")
    kept = figure(planned("keep", device_bytes=1 << 30))
    assert [axis.get_title(loc="left")[:6] for axis in kept.axes] == ["device", "busy"]
    assert len(kept.axes[-1].get_yticklabels()) == 1


def test_files_are_what_their_suffix_says(tmp_path):
    pytest.importorskip("matplotlib")
    plot_plan(planned(), tmp_path / "step.png", title="a step")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    plot_plan(planned(), tmp_path / "step.svg", title="a step")
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")


def test_averages_are_those_of_the_levels():
    one = planned()
    levels = one.trace.memory["flash"]
    by_ns = 0
    for place, (when, nbytes) in enumerate(levels):
        end = levels[place + 1][0] if place + 1 < len(levels) else one.replayed.step_ns
        by_ns += (end - when) * nbytes
    assert by_ns > 0
    assert one.average_bytes("flash") == by_ns // one.replayed.step_ns
    assert one.average_bytes("device") == one.replayed.average_bytes
    assert one.average_bytes("host") == 0


def test_what_does_not_fit_says_what_would_do():
    small = planned("keep")
    assert not small.fits
    assert small.least_bytes == LAYERS * 8 * MIB
    assert planned("keep", device_bytes=small.least_bytes).fits
    assert not planned("keep", device_bytes=small.least_bytes - 1).fits


def test_tiers_that_are_too_small_are_no_matter_of_the_device():
    one = planned("all", flash_bytes=0)
    assert not one.fits
    enough = one.least_bytes
    assert enough is not None
    assert planned("all", device_bytes=enough, flash_bytes=0).fits


def test_the_best_comes_first_and_what_needs_most_last():
    found = best_first([planned("keep"), planned("all"), planned("auto"), planned("ranked")])
    assert [one.fits for one in found] == [True, True, True, False]
    steps = [one.replayed.step_ns for one in found[:3]]
    assert steps == sorted(steps)
    assert found[-1].policy == "keep"


def test_one_policy_is_told_in_detail():
    one = planned("all")
    text = to_text(
        one_policy(one, largest=LargestFit(7), tbw_bytes=10**12, verbose=False), width=100
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    found = one.replayed
    assert lines[0] == "policy all: it fits; largest batch that fits: 7"
    assert f"the whole step {found.step_ns / 1e6:.1f} ms {found.slowdown:.3f} x" in lines
    moved = (found.flash.written_bytes, found.flash.read_bytes)
    assert f"flash {format_bytes(moved[0])} {format_bytes(moved[1])}" in lines
    assert any(line.startswith("offload → flash") and " 12 96.00 MiB" in line for line in lines)
    assert "net.3#0" not in text
    verbose = to_text(one_policy(one, largest=None, tbw_bytes=None, verbose=True), width=100)
    assert all(f"net.{k}#0" in verbose for k in range(LAYERS))


def test_all_policies_are_lines_of_one_unit():
    found = best_first(planned(name) for name in ("all", "keep"))
    largest = {"all": LargestFit(1 << 20, bounded=False), "keep": LargestFit(0)}
    text = to_text(all_policies(found, largest=largest), width=110)
    lines = [line.split() for line in text.splitlines()]
    assert "sizes in MiB" in text
    assert lines[-2][:2] == ["all", "yes"]
    assert lines[-1][:4] == ["keep", "from", "96.00", "none"]


def test_wear_is_a_share_of_what_the_ssd_is_rated_for():
    assert wear(0, 10**12) == "0 B written to the SSD in each step"
    assert wear(10**9, None).endswith("written to the SSD in each step")
    assert wear(10**9, 10**12).endswith(", 0.1 % of its 1 TBW; at this rate that lasts 1e+03 steps")
