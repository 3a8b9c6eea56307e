"""Ranks that are killed at random moments, as ``benchmarks/macro/ranks_killed.py`` does it by torchrun.

Here ranks are forked from a process that has imported torch, and started again by the test.
"""

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from test_optim_nodes import free_port

import preloaded
from rank_runs import end_ranks, environment_of

MACRO = Path(__file__).parents[2] / "benchmarks" / "macro"
SCRIPT = MACRO / "ranks_killed.py"


@pytest.fixture(scope="module")
def ranks_killed():
    sys.path.insert(0, str(MACRO))
    try:
        yield importlib.import_module("ranks_killed")
    finally:
        sys.path.remove(str(MACRO))


def forked(module):
    """Return a launcher whose ranks are forked; when one is killed it ends the others."""

    class Forked(module.Launched):
        def __init__(self, ranks, job, *, restarts):
            self.ranks, self.place, self.job = ranks, Path(job["place"]), job
            self.processes = []
            if "plain" in job:
                self._start(0)

        def _start(self, attempt):
            more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            more["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            self.processes = [
                preloaded.Process(
                    [SCRIPT, "--job", json.dumps(self.job)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment_of(rank, self.ranks) | more,
                )
                for rank in range(self.ranks)
            ]

        def begin(self, attempt):
            for each in self.processes:
                each.kill()
                each.communicate()
            self._start(attempt)
            return super().begin(attempt)

        def is_up(self):
            return all(each.poll() is None for each in self.processes)

        def __exit__(self, kind, error, trace):
            if kind is not None:
                for each in self.processes:
                    each.kill()
            ended = end_ranks(self.processes)
            assert all(code == 0 for code, _, _ in ended), ended

    return Forked


SLOW = [pytest.param(what, marks=pytest.mark.slow) for what in ("ddp", "fsdp2")]


@pytest.mark.parametrize("what", ["weights", *SLOW])
def test_ranks_go_on_after_one_step_with_the_bits_of_an_undisturbed_job(
    ranks_killed, disk_path, what
):
    args = Namespace(ranks=2, resumes=2, within=0.5, seed=7, dir=disk_path)
    found = ranks_killed.survived(args, what, forked(ranks_killed))
    assert found["kills"] >= found["resumes"] == found["common_resumes"] == 2
    assert found["same_bits"]
    assert found["most_steps_lost"] <= 1
    assert found["steps"] >= ranks_killed.LAST_STEPS
    assert list(disk_path.iterdir()) == []


@pytest.mark.slow
def test_torchrun_starts_ranks_again_that_are_killed(disk_path):
    words = ["--dir", disk_path, "--into", disk_path, "--resumes", "2", "--what", "fsdp2"]
    subprocess.run([sys.executable, SCRIPT, *words], check=True, timeout=280)
    found = json.loads((disk_path / "ranks_killed.json").read_text())["figures"]["fsdp2"]
    assert found["resumes"] == found["common_resumes"] == 2
