"""The soak of ``benchmarks/macro/soak.py``, for as long as it takes to do everything to the job once.

Here jobs are forked from a process that has imported torch, on the file system of the tests.
"""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded

MACRO = Path(__file__).parents[1] / "benchmarks" / "macro"
SCRIPT = MACRO / "soak.py"


@pytest.fixture(scope="module")
def soak():
    sys.path.insert(0, str(MACRO))
    try:
        yield importlib.import_module("soak")
    finally:
        sys.path.remove(str(MACRO))


@pytest.fixture
def places(disk_path):
    place, notes = disk_path / "place", disk_path / "notes"
    place.mkdir()
    notes.mkdir()
    return place, notes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["durable", "checkpoints"])
def test_a_job_to_which_everything_is_done_has_the_bits_of_an_undisturbed_run(
    soak, kind, places, monkeypatch
):
    monkeypatch.setattr("_soak_jobs.started", preloaded.Process)
    place, notes = places
    soak._soak_child.write_tokens(place / "tokens.bin")
    with soak.Undisturbed(place, notes) as undisturbed:
        run = soak.Soak(kind, place, notes, random.Random(3), undisturbed, mounted=False)
        found = run.run(seconds=12, within=2)
    assert set(found["faults"]) == set(soak.FAULTS) - set(soak.NEEDS_MOUNT)
    assert found["steps"] % soak._soak_child.EVALUATED_EVERY == 0 < found["steps"]
    assert found["weights_that_differ"] == found["losses_that_differ"] == 0
    assert found["losses_compared"] >= found["steps"] - found["jobs"]
    assert soak.is_right(found), found


class Undisturbed:
    """Knows one loss."""

    def is_same(self, note):
        return note["losses"] == ["0x1p0"]


class Job:
    """Has noted something, and ended."""

    def __init__(self, *notes):
        self.news = list(notes)

    def read(self):
        pass

    def forget(self):
        pass


def a_step(soak, number, loss="0x1p0"):
    return {"step": number, "losses": [loss], "durable": number, **soak._soak_child.resources()}


def test_what_is_wrong_is_noticed(soak, places):
    """A bit of a loss, a durable step that is lost, a file that is left."""
    place, notes = places
    run = soak.Soak("durable", place, notes, random.Random(0), Undisturbed(), mounted=False)
    run.compare(Job({"resumed": 0}, a_step(soak, 1), a_step(soak, 2)))
    assert run.counts["step differs"] == 0
    run.compare(Job({"resumed": 2}, a_step(soak, 3, "0x1.0000000000001p0")))
    assert run.counts["step differs"] == 1
    assert max(run.lost) == 0
    run.compare(Job({"resumed": 2}))
    assert max(run.lost) == 1
    (place / "states" / "penstock-states-0.slab").touch()
    run.over(Job())
    assert run.left == []
    (place / "spill" / "left").touch()
    run.over(Job())
    assert run.left == ["spill/left"]


def test_drift_is_a_slope_of_what_comes_after_the_beginning(soak):
    notes = [
        {"step": step, "resident": 10**9 if step < 20 else 10**6 + 50 * step, "threads": 5}
        for step in range(100)
    ]
    found = soak.drift([{**each, "descriptors": 7} for each in notes])
    assert found["resident"]["per_1000_steps"] == pytest.approx(50_000)
    assert found["threads"] == {"first": 5, "last": 5, "per_1000_steps": 0}


@pytest.mark.slow
def test_the_command_writes_a_result(disk_path):
    words = ["--dir", disk_path, "--into", disk_path, "--minutes", "0.1", "--within", "1"]
    words += ["--what", "durable"]
    subprocess.run([sys.executable, SCRIPT, *words], check=True, timeout=290)
    found = json.loads((disk_path / "soak.json").read_text())["figures"]
    assert found["durable"]["weights_compared"] > 0
    assert [each.name for each in disk_path.iterdir()] == ["soak.json"]
