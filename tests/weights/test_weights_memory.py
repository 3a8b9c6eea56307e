"""Whoever saves a model whose weights rest on flash never has the whole model in anonymous memory.

Each case is a process of its own. The weights are 384 MiB; what is allowed is what each way documents.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("weights_memory_program.py")
MOST_MIB = {
    "state_dict": 16,
    "torch.save": 16,
    "weights.save": 240,  # seven pieces of 32 MiB
    "checkpoint.save": 16 + 16,
    "Checkpointer": 64 + 16,
}

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc/self/status"
)


ORDINARY = {("weights.save", "rest"), ("Checkpointer", "session")}


@pytest.mark.parametrize(
    ("way", "state"),
    [
        pytest.param(way, state, marks=[] if (way, state) in ORDINARY else pytest.mark.slow)
        for way in MOST_MIB
        for state in ("rest", "session")
    ],
)
def test_a_save_holds_no_more_than_a_window(way, state, disk_path):
    done = subprocess.run(
        [sys.executable, PROGRAM, str(disk_path), way, state],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    assert found["growth_mib"] <= MOST_MIB[way]
