"""``benchmarks/macro/papers.py``: its search, its definitions, and that it runs."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import preloaded
from penstock.lab.dry.networks import dry_zoo_step
from penstock.plan import Machine
from penstock.plan.algorithms import fastest

MACRO = Path(__file__).parents[1] / "benchmarks" / "macro"
NAMES = ("artifact", "flash", "g10", "layers", "paper", "vdnn")


@pytest.fixture(scope="module")
def papers():
    """The benchmark's modules by name."""
    sys.path[:0] = [str(MACRO), str(MACRO.parent)]
    try:
        yield {name: importlib.import_module(f"_papers_{name}") for name in NAMES}
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
    paper = SimpleNamespace(network="none", machine=machine)
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

    paper = SimpleNamespace(network="none", machine=Machine.preset("v100-nvme"))
    monkeypatch.setattr(flash, "least_bytes", lambda paper, batch, choose: 1 << 60)
    with pytest.raises(SystemExit, match="not one sample fits"):
        flash.largest_batch(paper, None)


def test_a_slowed_machine_takes_so_many_times_as_long(papers):
    machine = Machine.preset("a100-g10")
    quick, slow = (
        dry_zoo_step("resnet18", 8, machine=one, device="cuda", image_size=64).profile
        for one in (machine, papers["g10"].slowed(machine, 7.0))
    )
    assert slow.saved_bytes == quick.saved_bytes
    assert slow.passes[0].end_ns == pytest.approx(7 * quick.passes[0].end_ns, rel=1e-3)


def test_the_static_baseline_is_everything_at_once(papers):
    machine = Machine.preset("titan-x")
    profile = dry_zoo_step("alexnet", 8, machine=machine, device="cuda").profile
    workspaces = [
        fastest(one, machine.compute).workspace_bytes
        for one in profile.operators
        if one.convolution is not None
    ]
    weights = 61_100_840 * 4
    maps = sum(slot.key.nbytes for slot in profile.slots)
    passing = max(one.nbytes for one in profile.transients)
    static_bytes = papers["vdnn"].static_bytes
    assert static_bytes(profile, machine) == (2 * weights + maps + passing + max(workspaces))
    assert max(workspaces) > 0
    saved_only, plain = replace(profile, transients=()), replace(machine, compute=None)
    assert static_bytes(saved_only, plain) == maps + profile.small_bytes


def test_cudnns_pooling_keeps_no_indices_and_what_was_beside_them_stays(papers):
    profile = dry_zoo_step("alexnet", 8, machine=Machine.preset("titan-x"), device="cuda").profile
    without = papers["vdnn"].with_cudnns_pooling(profile)
    indices = [slot for slot in profile.slots if slot.dtype == "int64"]
    assert len(indices) == 2  # those of the third pooling are small
    assert without.saved_bytes == profile.saved_bytes - sum(one.key.nbytes for one in indices)
    assert max(without.small_beside) == max(profile.small_beside)
    assert max(without.small_at_need) == max(profile.small_at_need)
    assert all(slot.dtype != "int64" for slot in without.slots)


def test_what_flashneurons_code_leaves_on_the_device_stays(papers):
    flash, machine = papers["flash"], Machine.preset("v100-nvme")
    profile = dry_zoo_step("resnet18", 16, machine=machine, device="cuda").profile
    theirs = flash.as_theirs(machine, 0.5, profile)
    assert theirs.saved_bytes == profile.saved_bytes  # what stays of a tensor is split off it
    by_kind = {
        kind: [one for one in theirs.slots if one.kind == kind] for kind in ("ReLU", "BatchNorm2d")
    }
    moved = [one for one in by_kind["ReLU"] if one.codecs]
    left = [one for one in by_kind["ReLU"] if not one.codecs]
    assert len(moved) == len(left) == 17
    assert all(one.held_elsewhere for one in left)
    for one, other in zip(moved, left, strict=True):
        whole_bytes = one.key.nbytes + other.key.nbytes
        assert 1 / 4 <= 4 * other.key.nbytes / whole_bytes <= 3 / 8  # bytes an element
        assert one.codecs[0].encoded_bytes(one.key.nbytes) == pytest.approx(
            whole_bytes / 4, rel=1e-3
        )
    assert all(one.codecs[0].ratio == 0.5 for one in by_kind["BatchNorm2d"])
    indices = [one for one in theirs.slots if one.dtype == "int64"]
    assert indices
    assert all(one.held_elsewhere for one in indices)


def test_probabilities_and_masks_of_attention_stay_and_what_is_made_of_them_goes(papers):
    flash, machine = papers["flash"], Machine.preset("v100-nvme")
    paper = papers["paper"].OnPaper("bert-base", machine, {"sequence_length": 128, "depth": 2})
    slots = flash.as_theirs(machine, 0.5, paper.profile(8)).slots
    scores = 8 * 12 * 128 * 128
    of_scores = [
        (one.key.nbytes // scores, one.held_elsewhere)
        for one in slots
        if one.kind == "SelfAttention" and one.key.nbytes in (scores, 4 * scores)
    ]
    assert of_scores == [(4, True), (1, True), (4, False)] * 2


def test_a_bitmap_has_a_bit_an_element_and_counts_are_a_power_of_two(papers):
    left_bytes = papers["flash"].left_bytes
    assert left_bytes(2**20) == 2**17 + 4 * 2**16
    assert left_bytes(2**20 - 32) == 2**17 + 4 * 2**15
    assert left_bytes(1025) == 2 * 128 + 4 * 64


def test_zeros_of_relu_are_left_out(papers):
    assert 0 < papers["flash"].not_zero("resnet50") < 1


def test_the_step_without_waits_is_searched_between_batches_that_are_looked_at(papers, monkeypatch):
    flash = papers["flash"]

    def run(paper, policy, batch):
        waits_s = 0.0 if batch <= 47 and batch != 25 else 1.0
        return {
            "batch": batch,
            "feasible": batch <= 100,
            "waits_s": waits_s,
            "step_s": 10.0,
            "samples_per_s": batch if batch <= 60 else 120 - batch,
        }

    monkeypatch.setattr(flash, "run", run)
    found = flash.Batches(None, 20).as_json()
    assert found["best"]["batch"] == 60
    assert 45 <= found["no_more_time"] <= 47
    assert found["at_multiple"] is None
    assert list(found["samples_per_s"]) == [20, 25, 30, 40, 50, 60, 80]


KERNELS = """\
Kernel ID: 0, Name: LoadData_A0
Execution Time: 1200
Input Tensors:
Output Tensors:
tensor0 Is weight (global)?: 0, Size in byte: 8192, Range:0--8192
Kernel ID: 1, Name: Linear_Forward
Execution Time: 2400
Input Tensors:
tensor0 Is weight (global)?: 0, Size in byte: 8192, Range:0--8192
tensor1 Is weight (global)?: 1, Size in byte: 4096, Range:0--4096
Output Tensors:
tensor2 Is weight (global)?: 0, Size in byte: 4096, Range:0--4096
Kernel ID: 2, Name: makeLoss
Execution Time: 1200
Input Tensors:
tensor2 Is weight (global)?: 0, Size in byte: 4096, Range:0--4096
Output Tensors:
tensor3 Is weight (global)?: 0, Size in byte: 4096, Range:0--4096
Kernel ID: 3, Name: Linear_Backward_Weight
Execution Time: 3600
Input Tensors:
tensor0 Is weight (global)?: 0, Size in byte: 8192, Range:0--8192
tensor3 Is weight (global)?: 0, Size in byte: 4096, Range:0--4096
Output Tensors:
Kernel ID: 4, Name: Apply_Grad
Execution Time: 600
Input Tensors:
tensor2 Is weight (global)?: 0, Size in byte: 4096, Range:0--4096
Output Tensors:
"""


def test_kernels_and_tensors_of_the_artifact_become_slots(papers):
    assert papers["artifact"].derived(KERNELS) == {
        "first_of_backward": 2,
        "fixed_pages": 1,
        "kernels_us": [1.0, 2.0, 1.0, 3.0, 0.5],
        # until they are saved; what is used after the next slot is needed is there again from then
        "others_pages": [2, 3, 1, 2, 1],
        "slots": [(2, 1, 3), (1, 1, 2)],
    }


def test_the_steps_of_the_artifact_take_what_it_says_they_do(papers):
    for name, known in papers["g10"].G10.items():
        profile = papers["artifact"].profile(name)
        (only,) = profile.passes
        assert only.end_ns / 1e9 == pytest.approx(known.traced_s, rel=1e-4)
        assert profile.saved_bytes > 30e9


def test_memory_by_layer_is_read_once_for_each_layer_and_direction_with_gradients_in_place(papers):
    def one(name, start, end, *, backward=False, moved=0):
        return SimpleNamespace(
            name=f"aten.{name}",
            module="net.0",
            backward=backward,
            start_ns=100 + start,
            end_ns=100 + end,
            moved_bytes=moved,
        )

    profile = SimpleNamespace(
        axis_ns=(100, 150),
        operators=(
            one("convolution", 0, 10),
            one("relu_", 10, 20),
            one("native_dropout", 20, 25),
            one("threshold_backward", 25, 30, backward=True, moved=21),
            one("mm", 30, 40, backward=True),
            one("mm", 40, 50, backward=True),
        ),
    )
    trace = SimpleNamespace(
        busy={"compute": ((0, 10), (15, 55))},  # what follows the convolution waits for 5
        memory={"device": ((0, 10), (4, 12), (10, 90), (15, 8), (30, 27), (35, 40), (45, 44))},
    )
    found = papers["layers"].by_layer(profile, trace)
    assert found == {
        ("net.0", "aten.convolution", False): 12,
        ("net.0", "aten.relu_", False): 8,
        ("net.0", "aten.threshold_backward", True): 27 - 7,
        ("net.0", "aten.mm", True): 44,
    }


def test_the_average_by_layer_of_a_plan_that_keeps_everything_is_below_its_peak(papers):
    vdnn = papers["vdnn"]
    machine = Machine.preset("titan-x")
    paper = vdnn.OnPaper("alexnet", machine, adapted=vdnn.with_cudnns_pooling)
    run, layers = vdnn.read_by_layer(paper, paper.plan("keep", 8), 8)
    kinds = {"convolution": 5, "relu_": 7, "max_pool2d_with_indices": 3, "addmm": 3}
    forward = [name for _, name, backward in layers if not backward]
    assert {name: forward.count(f"aten.{name}") for name in kinds} == kinds
    assert len(forward) == sum(kinds.values()) == len(layers) / 2
    assert paper.profile(8).fixed_bytes < min(layers.values())
    assert max(layers.values()) <= run.peak_bytes


def test_the_quick_run_has_its_lines_and_leaves_no_result():
    result = MACRO.parent / "results" / "papers.json"
    before = result.read_bytes() if result.exists() else None
    done = preloaded.run([MACRO / "papers.py", "--quick"], check=True)
    assert "average memory of alexnet" in done.stdout
    assert "loss of vdnn-dyn in 12 GB" in done.stdout
    assert "largest batch of flashneuron" in done.stdout
    assert (result.read_bytes() if result.exists() else None) == before
