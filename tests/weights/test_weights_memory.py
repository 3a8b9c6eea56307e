"""Whoever saves a model whose weights rest on flash never has the whole model in anonymous memory.

Each measured case is a process of its own. The weights are 384 MiB; what is allowed is documented.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from penstock import checkpoint
from weights_rig import (
    PATIENCE_S,
    WEIGHT_BYTES,
    Chain,
    assert_same,
    built,
    flash_adamw,
    inputs,
    on_flash,
    scripted,
    state_of,
    train_step,
)

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


@pytest.mark.parametrize("kind", ["torch", "step", "overlap"])
def test_a_checkpoint_in_the_background_has_the_step_that_was_saved(kind, disk_path, one_thread):
    """Training goes on before any of it is written, and weights go home and are changed meanwhile."""
    go_on = threading.Event()
    waited = []

    def wait_for_training(request):
        if request.op == "write" and "data-" in request.file.path:
            waited.append(go_on.wait(PATIENCE_S))

    model = built(Chain)
    if kind == "torch":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    else:
        optimizer = flash_adamw(model, disk_path, overlap=kind == "overlap")

    first, *others = inputs(3)
    with (
        scripted() as engine,
        on_flash(model, disk_path, limit=3 * WEIGHT_BYTES),
        checkpoint.Checkpointer(disk_path / "run") as checkpoints,
    ):
        train_step(model, optimizer, first)
        expected = state_of(model)
        engine.fault = wait_for_training
        checkpoints.save(1, {"model": model}, wait=False)
        for x in others:
            train_step(model, optimizer, x)
        go_on.set()
        checkpoints.wait()
        [saved] = checkpoints.checkpoints()
        found = checkpoint.load(saved.path)["model"]
        assert not any(torch.equal(each, expected[name]) for name, each in state_of(model).items())
    assert waited
    assert all(waited)
    assert_same(dict(found), expected)
    if kind != "torch":
        optimizer.close()
