"""What the system counts as resident follows the budget, not only our own accounting.

Each run is a process of its own. What it grows by is the budget and a slack, of which the parts are
named below; without Penstock it is all that is saved. glibc is told, as benchmarks and `docs` say, to
map what is larger than the floor: left to itself it keeps what workers free for later use.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.units import MIB
from rss_program import STORAGE_BYTES

PROGRAM = Path(__file__).with_name("rss_program.py")
WORKING_SET_BYTES = 4 * STORAGE_BYTES
"""In the hands of autograd and of a layer, saved by nobody: an input, an output, two gradients."""
OTHERS_BYTES = 16 * MIB
"""Python objects, the probe of the disk, thread stacks, fragments of small allocations."""
SLACK_BYTES = WORKING_SET_BYTES + OTHERS_BYTES

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs"
)


def run(directory, budget_bytes):
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(MIB),
        "MALLOC_TRIM_THRESHOLD_": str(MIB),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, PROGRAM, str(directory), str(budget_bytes)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("budget_mib", [16, pytest.param(56, marks=pytest.mark.slow)])
def test_resident_memory_follows_the_budget(disk_path, budget_mib):
    plain, offloaded = run(disk_path, 0), run(disk_path, budget_mib * MIB)
    assert offloaded["loss"] == plain["loss"]
    assert offloaded["charged_bytes"] <= budget_mib * MIB
    assert offloaded["growth_bytes"] <= budget_mib * MIB + SLACK_BYTES
    assert plain["growth_bytes"] >= offloaded["saved_bytes"] >= 9 * 16 * MIB
