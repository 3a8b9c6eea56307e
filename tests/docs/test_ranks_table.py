"""The table of what binds at 8, 64 and 512 GPUs is what ``penstock plan --ranks`` says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import ranks_planned
print(*(ranks_planned.line(row) for row in ranks_planned.rows("6.7B", 512, "fsdp2", ("least",))), end="")
"""


@pytest.mark.slow
def test_a_line_of_the_table_is_what_the_command_says():
    """One line, for all of them take minutes: ``benchmarks/macro/ranks_planned.py --check``."""
    words = [sys.executable, "-c", PROGRAM, ROOT / "benchmarks" / "macro"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout in (ROOT / "docs" / "ranks_table.md").read_text(encoding="utf-8")
    assert "512" in done.stdout
