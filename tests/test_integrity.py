"""``benchmarks/peers/integrity.py``: that the manual has its table, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "peers" / "integrity.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=True
    )


def test_the_manuals_table_is_the_results(tmp_path):
    run("--table", tmp_path / "table.md")
    wanted = (tmp_path / "table.md").read_text()
    assert (ROOT / "docs" / "integrity_table.md").read_text() == wanted


def test_at_least_thirteen_others_are_in_it_and_none_of_ours_loses_or_misses_anything():
    result = json.loads((ROOT / "benchmarks" / "results" / "integrity.json").read_text())
    ours = {way: each for way, each in result["figures"].items() if way.startswith("ours")}
    assert len(result["figures"]) - len(ours) >= 13
    assert len(ours) == 6
    for each in ours.values():
        for kind in ("anywhere", "end"):
            assert each[kind]["bits"] > 0
            assert each[kind]["noticed"] + each[kind]["harmless"] == each[kind]["bits"]
        assert each["killed"]["processes"] > 0
        assert each["killed"]["lost"] == each["killed"]["mixed"] == 0


@pytest.mark.slow
def test_the_quick_run_finds_all_bits_of_ours_and_leaves_no_result(tmp_path):
    result = ROOT / "benchmarks" / "results" / "integrity.json"
    before, parts = result.read_bytes(), tmp_path / "parts.json"
    run("--quick", "--dir", tmp_path, "--ways", "torch_save", "ours", "--parts", parts)
    assert result.read_bytes() == before
    found = json.loads(parts.read_text())
    ours, other = found["ours"], found["torch_save"]
    assert ours["anywhere"]["noticed"] == ours["anywhere"]["bits"] == 64
    assert other["anywhere"]["silently_wrong"] > 0
    assert ours["killed"]["processes"] > 6
    assert ours["killed"]["lost"] == ours["killed"]["mixed"] == 0
    assert ours["killed"]["next_save_whole"] == ours["killed"]["processes"]
    assert [each.name for each in tmp_path.iterdir()] == ["parts.json"]
