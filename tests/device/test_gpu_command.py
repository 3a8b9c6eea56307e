"""``python -m penstock.testing.gpu`` on the emulated device: figures are made, and tests observed."""

import json
import os
import subprocess
import sys

import pytest

import preloaded
from penstock.testing.gpu import figures, processes

pytestmark = pytest.mark.gpu
CHILD = "import sys; from penstock.testing.gpu.child import main; sys.exit(main())"
NOT_HERE = {"GPU-direct, expandable segments"}
"""Segments that grow need what the emulated driver has not."""


FIGURES = [
    pytest.param(name, marks=[pytest.mark.slow] * name.endswith(", host"))  # as those with flash
    for name in sorted(figures.FIGURES.keys() - NOT_HERE)
]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_comes_about_and_has_no_paths(name, disk_path):
    figure, records = figures.FIGURES[name], disk_path / "records"
    where = ["--dir", str(disk_path), "--scale", "0.01", "--limit", "1"]  # no step twice
    child = ["figures", name, "--preload", "emulated", "--records", str(records), *where]
    settings = {"EMU_DEVICES": str(figure.devices), "EMU_SCHEDULE": "lazy"}
    ended = preloaded.run(["-c", CHILD, *child], env=os.environ | settings, timeout=200)
    found = {key: value for each in processes.read(records) for key, value in each.items()}
    assert ended.returncode == 0, (ended.stdout, ended.stderr, found)
    assert "failed" not in found
    if name.startswith("GPU-direct") and "refused" in found:
        return
    for key, value in found.items():
        if key.endswith(("_per_s", "_s")):
            assert value > 0, key
        if key.startswith(("same_bits", "no_context")):
            assert value is True, key
        if key.startswith("batch x"):
            assert value["penstock"]["step_s"] > 0, value
            assert value["moved_bytes_per_step"]["copy_out." + name.rpartition(" ")[2]] > 0


def test_a_chosen_test_is_run_and_then_observed(disk_path):
    chosen = "test_a_checkpoint_has_what_a_stream_was_still_to_write"
    places = ["--out", disk_path, "--dir", disk_path]
    what = ["--preload", "emulated", "--parts", "order", "--pytest", "-k", chosen]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.testing.gpu", *places, *what],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = disk_path.glob("penstock-gpu-*.json")
    (observed,) = json.loads(file.read_text())["order"]
    assert observed["test"].endswith(chosen)
    assert observed["checked"] > 10
    assert observed["complaints"] == []
