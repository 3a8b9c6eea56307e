"""Figures of ``docs/benchmarks.md`` and of the README are those of the result files."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ["README.md", "docs/benchmarks.md", "benchmarks/page.md", "benchmarks/page.py"]
FILES += ["benchmarks/_page.py", "benchmarks/_results.py"]


def check(root):
    script = root / "benchmarks" / "page.py"
    return subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    return tmp_path


def test_the_page_and_the_readme_are_what_the_result_files_say():
    done = check(ROOT)
    assert done.returncode == 0, done.stderr


def test_a_figure_that_a_result_file_no_longer_has_makes_both_stale(copy):
    result = copy / "benchmarks" / "results" / "max_batch.json"
    text = result.read_text()
    assert '"batch_with": 320' in text
    result.write_text(text.replace('"batch_with": 320', '"batch_with": 319'))
    done = check(copy)
    assert done.returncode == 1
    assert "docs/benchmarks.md and README.md" in done.stderr


def test_what_is_written_by_hand_at_the_end_of_the_page_is_kept(copy):
    page = copy / "docs" / "benchmarks.md"
    page.write_text(page.read_text() + "\n## By hand\n\nA sentence.\n")
    subprocess.run([sys.executable, copy / "benchmarks" / "page.py"], check=True)
    assert page.read_text().endswith("\n## By hand\n\nA sentence.\n")
    assert check(copy).returncode == 0


def test_the_readme_has_at_most_twelve_measured_rows():
    table = re.search(
        r"^\| What \| Penstock .*\n\|-.*\n((?:\|.*\n)+)", (ROOT / "README.md").read_text(), re.M
    )
    assert 1 <= table[1].count("\n") <= 12
