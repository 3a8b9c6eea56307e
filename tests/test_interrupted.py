"""An exception of a signal's handler amid Penstock's code: the session closes, and nothing is lost.

Each case is a process of its own (see ``interrupted``), as a hang ends it and a lock may stay locked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import interrupted

PROGRAM = Path(interrupted.__file__)


def wrong_points(path, kind, *how, timeout_s):
    """What was wrong at some points of a step; and how many points there were."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), kind, str(path), *map(str, how)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert run.returncode == 0, f"{lines[-1:]}: {run.stderr}"
    ended = [line for line in lines if "where" in line]
    assert ended, run.stdout
    return [line for line in ended if line["wrong"]]


def test_a_session_closes_after_an_interrupt_and_no_weight_is_lost(disk_path):
    how = (2, 366, 1500, "off", "exception", 5)  # the first: amid the write of a changed weight
    assert wrong_points(disk_path, "WeightsOfSgd", *how, timeout_s=120) == []


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", ["off", "on"])
@pytest.mark.parametrize("error", ["exception", "interrupt"])
@pytest.mark.parametrize("kind", interrupted.KINDS)
def test_a_step_may_be_interrupted_anywhere(disk_path, kind, error, goes_on):
    how = (2, 0, 101, goes_on, error, 200)
    assert wrong_points(disk_path, kind, *how, timeout_s=600) == []
