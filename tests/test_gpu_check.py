"""``scripts/gpu_check`` with a Python that only pretends: what it does with parts that fail or hang."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check"
PRETENDER = """\
#!/usr/bin/env bash
case "$*" in
-) printf /var/tmp >"$OUT/spill-to"; echo '{}' ;;
-c*) exit 1 ;;
*test_gpu_link*) echo "3 passed in 0.10s" ;;
*test_gpu_memory*) echo "1 failed in 0.10s"; exit 1 ;;
*test_gpu_training*) echo "a test began"; exit 124 ;; # as if it had been stopped
*pytest*) exit 5 ;;
*gpu_offload*) echo "wrote gpu_offload.json"; echo "$*" >"$OUT/benchmarked" ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """``check(**environment)``: exit code, and the lines of the summary."""
    python = tmp_path / "python"
    python.write_text(PRETENDER)
    python.chmod(0o755)

    def run(**environment):
        place = {"OUT": str(tmp_path / "out"), "PYTHON": str(python)}
        done = subprocess.run(
            [SCRIPT, "-k", "anything"],
            check=False,
            env=os.environ | place | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        summary = (tmp_path / "out" / "summary.txt").read_text()
        assert done.stdout.endswith(summary)  # where only the end of the output is seen
        return done.returncode, summary.splitlines()[1:]

    return run


def test_a_part_that_fails_or_hangs_takes_no_other_with_it(check, tmp_path):
    code, summary = check(LIMIT_S="1000", BENCH="--rounds 2")
    assert code == 1
    starts = [line.split(" [")[0] for line in summary]
    assert "passed    tests/gpu/test_gpu_link.py: 3 passed in 0.10s" in starts
    assert "FAILED    tests/gpu/test_gpu_memory.py, exit code 1: 1 failed in 0.10s" in starts
    assert "no tests  tests/gpu/test_gpu_pools.py" in starts
    (stopped,) = (
        line for line in starts if line.startswith("STOPPED   tests/gpu/test_gpu_training.py")
    )
    assert stopped.endswith("a test began")
    assert starts[-1] == "passed    benchmarks/macro/gpu_offload.py: wrote gpu_offload.json"
    given = (tmp_path / "out" / "benchmarked").read_text().split()
    assert given[-2:] == ["--rounds", "2"]
    assert 900 < float(given[given.index("--limit") + 1]) < 1000


def test_what_there_is_no_time_for_is_left_out_and_said_to_be(check):
    code, summary = check(LIMIT_S="0", TESTS="")
    assert code == 1
    assert summary == ["LEFT OUT  benchmarks/macro/gpu_offload.py: no time was left of 0 s"]


def test_all_is_well_if_all_that_is_wanted_is(check):
    code, summary = check(TESTS="")
    assert code == 0
    assert len(summary) == 1
