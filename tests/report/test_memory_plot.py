"""The picture of memory: what is drawn, not how it looks."""

from __future__ import annotations

import importlib
import struct
from xml.etree import ElementTree

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.core.units import GIB, MIB
from penstock.observe.clock import ManualClock
from penstock.observe.recorder import Recorder
from penstock.report.memory_plot import MemorySeries, plot_memory
from penstock.report.style import MAX_POINTS

S = 10**9


def series(run: str, top_bytes: int, memory: str = "device", begin: int = 0) -> MemorySeries:
    return MemorySeries(
        run=run,
        memory=memory,
        t_ns=[begin, begin + S, begin + 2 * S],
        nbytes=[0, top_bytes, 0],
        steps_ns=[(begin, begin + 2 * S), (begin + 2 * S, begin + 3 * S)],
    )


BOTH = [series("without", 3 * GIB, begin=50 * S), series("with", 300 * MIB)]


@pytest.fixture
def figure(monkeypatch):
    """Draw, and give the figure instead of its file."""
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []

    def draw(*args, **kwargs):
        monkeypatch.setattr(
            figure_module.Figure, "savefig", lambda self, path: drawn.append((self, path))
        )
        plot_memory(*args, "out.png", **kwargs)
        return drawn[-1][0]

    return draw


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def texts(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_runs_are_panels_on_the_same_axes(figure):
    drawn = figure(BOTH, budget_bytes=300 * MIB, title="VGG-16")
    first, second = drawn.axes
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("without", "with")
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xlim() == second.get_xlim() == (0.0, 3.0)
    assert second.get_xlabel() == "time (s)"
    assert first.get_ylabel() == "resident (GiB)"
    assert drawn.get_suptitle() == "VGG-16"
    assert sorted(labels(drawn)) == ["budget, 300.00 MiB", "device", "every other step"]
    assert texts(first) == ["peak 3.00 GiB"]
    assert texts(second) == ["peak 300.00 MiB"]


def test_curves_are_steps_in_units_of_the_axis_from_the_begin_of_the_run(figure):
    first = figure(BOTH).axes[0]
    curve = first.lines[0]
    assert curve.get_drawstyle() == "steps-post"
    np.testing.assert_allclose(curve.get_xdata(), [0, 1, 2, 3])
    np.testing.assert_allclose(curve.get_ydata(), [0, 3, 0, 0])


def test_the_budget_is_in_every_panel(figure):
    for axis in figure(BOTH, budget_bytes=300 * MIB).axes:
        assert 300 * MIB / GIB in [line.get_ydata()[0] for line in axis.lines]


def test_a_memory_has_one_colour_in_all_panels_and_panels_one_clock(figure):
    late = MemorySeries(run="with", memory="rss", t_ns=[S, 2 * S], nbytes=[GIB, GIB])
    first, second = figure([*BOTH, late]).axes
    assert first.lines[0].get_color() == second.lines[0].get_color() != second.lines[1].get_color()
    assert list(second.lines[1].get_xdata()) == [1, 2, 3]


def test_small_memories_are_drawn_in_small_units(figure):
    assert figure([series("a", 5 * MIB)]).axes[0].get_ylabel() == "resident (MiB)"
    assert figure([series("a", 0)]).axes[0].get_ylabel() == "resident (B)"


def test_too_many_steps_are_not_shaded(figure):
    many = MemorySeries(
        run="a", memory="device", t_ns=[0], nbytes=[1], steps_ns=[(n, n + 1) for n in range(100)]
    )
    assert labels(figure([many])) == ["device"]


def test_thinning_keeps_peaks_dips_and_ends(figure):
    levels = np.full(50_000, 100)
    levels[31_337], levels[40_001] = 999, 1
    long = MemorySeries(run="a", memory="device", t_ns=range(50_000), nbytes=levels.tolist())
    drawn = figure([long]).axes[0].lines[0].get_ydata()
    assert len(drawn) <= MAX_POINTS + 2
    assert (max(drawn), min(drawn)) == (999, 1)
    assert figure([long]).axes[0].lines[0].get_xdata()[-1] == pytest.approx(49_999e-9)


def test_files_are_what_their_suffix_says(tmp_path):
    pytest.importorskip("matplotlib")
    plot_memory(BOTH, tmp_path / "memory.png", budget_bytes=300 * MIB)
    head = (tmp_path / "memory.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    assert width == 1500
    assert height > 900
    plot_memory(BOTH, tmp_path / "memory.svg")
    assert ElementTree.parse(tmp_path / "memory.svg").getroot().tag.endswith("svg")


def test_series_come_from_a_recorder_with_its_steps():
    clock = ManualClock()
    recorder = Recorder(clock=clock)
    recorder.begin_step(0)
    recorder.level("device", 5)
    recorder.level("host", 9)
    clock.advance(10)
    recorder.level("device", 6)
    recorder.end_step()
    made = MemorySeries.of(recorder, "device", run="with")
    assert (list(made.t_ns), list(made.nbytes), made.peak_bytes) == ([0, 10], [5, 6], 6)
    assert list(made.steps_ns) == [(0, 10)]
    assert MemorySeries.of(recorder.events(), "host", run="with").nbytes == [9]


def test_a_memory_that_was_never_sampled_is_refused():
    with pytest.raises(ConfigError, match="'with', 'rss': 0 times"):
        MemorySeries.of(Recorder(), "rss", run="with")


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="series is empty"):
        plot_memory([], tmp_path / "x.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[plot\]'"):
        plot_memory(BOTH, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []
