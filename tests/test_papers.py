"""``benchmarks/macro/papers.py``: its search, its definitions, and that it runs."""

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dry.networks import dry_zoo_profile
from penstock.plan import Machine
from penstock.plan.algorithms import fastest
from penstock.plan.baseline import static_bytes

MACRO = Path(__file__).parents[1] / "benchmarks" / "macro"


@pytest.fixture(scope="module")
def papers():
    """The benchmark's modules by name."""
    sys.path[:0] = [str(MACRO), str(MACRO.parent)]
    try:
        yield {name: importlib.import_module(f"_papers_{name}") for name in ("flash", "vdnn")}
    finally:
        del sys.path[:2]


@given(
    need_of=st.tuples(
        st.integers(0, 900), st.integers(1, 400), st.integers(0, 50), st.integers(1, 60)
    ),
    limit=st.integers(2000, 20_000),
)
def test_the_largest_batch_fits_and_is_the_largest_but_for_a_fiftieth(papers, need_of, limit):
    fixed, a_sample, more, bend = need_of
    flash = papers["flash"]

    def need(batch):
        return fixed + a_sample * batch + more * max(0, batch - bend)

    machine = replace(Machine.preset("v100-nvme"), device_bytes=limit)
    paper = SimpleNamespace(network="none", known={}, machine=machine)
    asked = []

    def least_bytes(paper, batch, choose):
        asked.append(batch)
        return need(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "least_bytes", least_bytes)
        found = flash.largest_batch(paper, None)
    assert need(found) <= limit
    assert need(found + max(1, int(flash.WITHIN * found))) > limit
    assert len(asked) == len(set(asked)), "a profile was asked for twice"


def test_not_one_sample_fits(papers, monkeypatch):
    flash = papers["flash"]

    paper = SimpleNamespace(network="none", known={}, machine=Machine.preset("v100-nvme"))
    monkeypatch.setattr(flash, "least_bytes", lambda paper, batch, choose: 1 << 60)
    with pytest.raises(SystemExit, match="not one sample fits"):
        flash.largest_batch(paper, None)


def test_a_slowed_machine_takes_so_many_times_as_long(papers):
    machine = Machine.preset("a100-g10")
    quick, slow = (
        dry_zoo_profile("resnet18", 8, machine=one, device="cuda", image_size=64)
        for one in (machine, papers["flash"].slowed(machine, 7.0))
    )
    assert slow.saved_bytes == quick.saved_bytes
    assert slow.passes[0].end_ns == pytest.approx(7 * quick.passes[0].end_ns, rel=1e-3)


def test_the_static_baseline_is_everything_at_once():
    machine = Machine.preset("titan-x")
    profile = dry_zoo_profile("alexnet", 8, machine=machine, device="cuda")
    workspaces = [
        fastest(one, machine.compute).workspace_bytes
        for one in profile.operators
        if one.convolution is not None
    ]
    weights = 61_100_840 * 4
    maps = sum(slot.key.nbytes for slot in profile.slots)
    passing = max(one.nbytes for one in profile.transients)
    assert static_bytes(profile, machine) == (2 * weights + maps + passing + max(workspaces))
    assert max(workspaces) > 0


def test_cudnns_pooling_keeps_no_indices_and_what_was_beside_them_stays(papers):
    profile = dry_zoo_profile("alexnet", 8, machine=Machine.preset("titan-x"), device="cuda")
    without = papers["vdnn"].with_cudnns_pooling(profile)
    indices = [slot for slot in profile.slots if slot.dtype == "int64"]
    assert len(indices) == 2  # those of the third pooling are small
    assert without.saved_bytes == profile.saved_bytes - sum(one.key.nbytes for one in indices)
    assert max(without.small_beside) == max(profile.small_beside)
    assert max(without.small_at_need) == max(profile.small_at_need)
    assert all(slot.dtype != "int64" for slot in without.slots)


def test_zeros_of_relu_are_left_out_and_the_rest_is_cast(papers):
    assert 1 / 32 < papers["flash"].cast_ratio("resnet50") < 0.5


def test_the_quick_run_has_its_lines_and_leaves_no_result():
    result = MACRO.parent / "results" / "papers.json"
    before = result.read_bytes() if result.exists() else None
    done = subprocess.run(
        [sys.executable, MACRO / "papers.py", "--quick"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "average memory of alexnet" in done.stdout
    assert "largest batch of flashneuron" in done.stdout
    assert (result.read_bytes() if result.exists() else None) == before
