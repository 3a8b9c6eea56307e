"""Processes that are killed while weights are on flash: in the middle of a step, or of a save."""

import os
import signal
import textwrap
from contextlib import nullcontext

import pytest
from torch import nn

import penstock
import preloaded
from penstock import weights
from weights_rig import (
    FLOOR,
    WEIGHT_BYTES,
    Chain,
    assert_same,
    built,
    flash_adamw,
    inputs,
    on_flash,
    state_of,
    train_step,
)

STEPS, DYING = 5, 2
"""Steps of a whole run, and the one in which a process dies; the first is 0."""
LIMIT = 3 * WEIGHT_BYTES

PROGRAM = """
import os, signal, sys
import torch
sys.path[:0] = {tests!r}
import weights_rig
from test_weights_killed import DYING, LIMIT, STEPS

homes, durable, overlap, point = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def request_number(number):
    left = [number]
    def count(request):
        left[0] -= 1
        if not left[0]:
            die()
    return count

torch.set_num_threads(1)
with weights_rig.scripted() as engine:
    model = weights_rig.built(weights_rig.Chain)
    optimizer = weights_rig.flash_adamw(model, durable, overlap=overlap == "True", durable=True)
    assert optimizer.resume() == 0
    with weights_rig.on_flash(model, homes, limit=LIMIT):
        data = weights_rig.inputs(STEPS)
        for step in range(DYING):
            weights_rig.train_step(model, optimizer, data[step])
            print(step + 1, flush=True)
        where, _, number = point.partition(" ")
        layer = model.layers[2]
        if where == "request":
            engine.fault = request_number(int(number))
        elif where == "forward":
            layer.register_forward_pre_hook(die)
        elif where == "backward":
            layer.register_full_backward_hook(die)
        elif where == "sync":
            os.fdatasync = os.fsync = die
        elif where == "between":
            model.register_forward_pre_hook(die)
        weights_rig.train_step(model, optimizer, data[DYING])
        print(DYING + 1, flush=True)
        die()
"""


POINTS = ["forward", "backward", "sync", "between", "after", "request 1", "request 13"]
FIRST = {("backward", True), ("forward", False), ("sync", True), ("request 13", True)}
"""Of these the ordinary suite has some, with ``overlap`` or without."""


@pytest.mark.parametrize(
    ("point", "overlap"),
    [
        pytest.param(point, overlap, marks=[] if (point, overlap) in FIRST else pytest.mark.slow)
        for point in [*POINTS, *(f"request {number}" for number in range(3, 13, 3))]
        for overlap in (True, False)
    ],
)
def test_a_run_that_is_killed_goes_on_with_the_same_bits(
    point, overlap, disk_path, one_thread, caplog
):
    """The model is built anew, with other values; the records of the optimizer make its homes whole."""
    homes, durable, whole = (disk_path / name for name in ("homes", "durable", "whole"))
    for each in (homes, durable, whole):
        each.mkdir()
    program = textwrap.dedent(PROGRAM).format(
        tests=[os.path.dirname(__file__), os.path.dirname(preloaded.__file__)]
    )
    done = preloaded.run(["-c", program, str(homes), str(durable), str(overlap), point])
    assert done.returncode == -signal.SIGKILL, done.stderr
    completed = len(done.stdout.split())
    where = point.split()[0]
    assert completed == DYING + (point == "after"), done.stderr
    assert os.listdir(homes) == []
    assert all(
        name.endswith((".slab", ".journal", ".lock", ".begun")) for name in os.listdir(durable)
    )

    data = inputs(STEPS)
    building = penstock.built_on_flash(homes, floor=FLOOR) if overlap else nullcontext()
    with building:
        model = built(Chain, seed=9)
    optimizer = flash_adamw(model, durable, overlap=overlap, durable=True)
    first = optimizer.resume() if overlap else None  # at home already, or in the session
    with on_flash(model, homes, limit=LIMIT):
        if first is None:
            first = optimizer.resume()
        assert first in (completed, completed + 1)
        assert optimizer.torn_step in (None, first + 1)
        if where == "sync" or (where == "backward" and overlap):
            assert optimizer.torn_step == completed + 1
        if where in ("forward", "between", "after"):
            assert optimizer.torn_step is None
        said = f"step {first + 1} was torn; resumed after step {first}"
        assert (said in caplog.text) == (optimizer.torn_step is not None)
        losses = [train_step(model, optimizer, x) for x in data[first:]]
    optimizer.close()

    unbroken = built(Chain)
    optimizer = flash_adamw(unbroken, whole, overlap=overlap, durable=True)
    expected = [train_step(unbroken, optimizer, x) for x in data]
    optimizer.close()
    assert_same(losses, expected[first:])
    assert_same(state_of(model), state_of(unbroken))


SAVING = """
import os, signal, sys
import torch
from torch import nn
from penstock import weights

left = int(sys.argv[2])
def dying(*args, _rename=os.rename):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _rename(*args)

os.rename = dying
weights.save(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), sys.argv[1], shard=1)
"""


@pytest.mark.parametrize("renames", [0, 2])
def test_a_save_that_was_killed_is_told_by_whoever_reads_or_saves_there(renames, disk_path):
    """Its folder has files without their names, and no index."""
    folder = disk_path / "saved"
    done = preloaded.run(["-c", SAVING, str(folder), str(renames + 1)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = os.listdir(folder)
    assert sum(name.endswith(".safetensors") for name in names) == renames
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    before = state_of(model)
    with pytest.raises(penstock.DamagedError, match=r"was not completed.*\.part"):
        weights.load(model, folder)
    assert_same(state_of(model), before)
    with pytest.raises(penstock.ConfigError, match="already"):
        weights.save(model, folder)
    assert sorted(os.listdir(folder)) == sorted(names)
