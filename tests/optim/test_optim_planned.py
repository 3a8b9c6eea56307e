"""Bytes that ranks move to and from flash are those that ``penstock plan --ranks`` foretells."""

import json
from itertools import pairwise

import pytest

import rank_programs
from penstock.cli import main
from penstock.optim.config import RING_BYTES

WIDTH, DEPTH, TILE = 256, 4, 1024
WEIGHT_WIDTH = 1024
"""So that a rank's part of each weight is not below what plans and sessions keep in memory."""
RECORD_BYTES = 8
"""Bytes of AdamW's record of a float32 parameter."""
NETWORK = """
import torch
from torch import nn

def build(batch):
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
    return nn.Sequential(*layers), torch.empty(batch, WIDTH)
"""
COUNTED = """
import json
sys.path.insert(0, place)
from counted_network import build
torch.manual_seed(0)
model = build(1)[0]
if sys.argv[3] == "fsdp2":
    model = sharded(model)
else:
    model = nn.parallel.DistributedDataParallel(model)
a = FlashAdamW(model.parameters(), lr=1e-2, flash=flash, tile=int(sys.argv[4]))
moved = []
for step in range(3):
    model(torch.randn(4, 256)).square().mean().backward()
    before = a._penstock.store.read, a._penstock.store.written
    a.step()
    a.zero_grad()
    store = a._penstock.store
    moved.append([store.read - before[0], store.written - before[1]])
disk = sum(tile.record_bytes for tile in a._penstock.tiles)
with open(f"{place}/moved{rank}.json", "w") as file:
    json.dump({"steps": moved, "disk": disk}, file)
a.close()
"""


WEIGHTS = """
import json
import penstock
from penstock.observe.recorder import Stage
sys.path.insert(0, place)
from counted_network import build

def counted(limit, steps):
    torch.manual_seed(0)
    model = build(1)[0]
    if sys.argv[3] == "fsdp2":
        model = sharded(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    a = FlashAdamW(model.parameters(), lr=1e-2, flash=flash, tile=int(sys.argv[4]), overlap=True)
    if sys.argv[3] == "ddp":
        a.update_after(model)
    def moved():
        totals = session.recorder.snapshot()
        return [totals.flow(each, "weights").nbytes for each in (Stage.READ, Stage.WRITE)]

    with penstock.offload(
        model, weights="flash", weights_memory=limit, flash=flash,
        device_memory="64MiB", flash_capacity="64MiB",
    ) as session:
        before, found = moved(), []
        for step in range(steps):
            model(torch.randn(4, 1024)).square().mean().backward()
            a.step()
            a.zero_grad()
            found.append([after - each for after, each in zip(moved(), before)])
    a.close()
    return found

with open(f"{place}/moved{rank}.json", "w") as file:
    json.dump([counted(int(limit), int(sys.argv[5])) for limit in sys.argv[6:]], file)
"""
STEPS = 4


def planned(capsys, path, world, parallel, *more):
    """The step of one rank, in the least memory."""
    words = ["plan", f"{path}:build", "--batch", "4", "--machine", "cpu", "--optimizer", "adam"]
    words += ["--ranks", world, "--parallel", parallel, "--json", *more]
    least = told(capsys, words)["step"]["least_bytes"]
    return told(capsys, [*words, "--memory", least])


def written_network(place, width):
    """Write the network, and return where."""
    path = place / "counted_network.py"
    path.write_text(f"WIDTH, DEPTH = {width}, {DEPTH}\n{NETWORK}")
    return path


def told(capsys, words):
    assert main([*map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_move_the_bytes_of_the_plan(capsys, disk_path, world, parallel):
    path = written_network(disk_path, WIDTH)
    step = planned(capsys, path, world, parallel)["step"]
    rank_programs.run(disk_path, COUNTED, world, parallel, str(TILE))
    parameters = WIDTH * WIDTH * DEPTH // (world if parallel == "fsdp2" else 1)
    assert step["disk_bytes"] == step["moved"]["records_read"] == RECORD_BYTES * parameters
    ring = RING_BYTES * TILE  # the last of them, which stay in the optimizer's ring
    for rank in range(world):
        told = json.loads((disk_path / f"moved{rank}.json").read_text())
        assert told["disk"] == step["disk_bytes"]
        assert told["steps"][1:] == 2 * [
            [step["moved"]["records_read"] - ring, step["moved"]["records_written"] - ring]
        ]


def moved_weights(capsys, place, world, parallel, limits):
    """The plan, and by rank and limit bytes read and written until the end of each step."""
    path = written_network(place, WEIGHT_WIDTH)
    step = planned(capsys, path, world, parallel, "--weights", "flash")["step"]["moved"]
    words = (parallel, 64 * TILE, STEPS, *limits)
    rank_programs.run(place, WEIGHTS, world, *map(str, words))
    return step, [json.loads((place / f"moved{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_move_the_weights_of_the_plan_but_for_what_is_still_in_memory(
    capsys, disk_path, world
):
    """Where forward and backward meet, and steps, as many as the limit allows need not be moved.

    With the least limit, what FSDP2 gathers at once, when a part may stay is a matter of time. With room
    for one more, a step moves nothing but what does not fit, once each way.
    """
    part = WEIGHT_WIDTH**2 * 4 // world
    step, ranks = moved_weights(capsys, disk_path, world, "fsdp2", [2 * part, 3 * part])
    assert DEPTH * part <= step["weights_read"] < 2 * DEPTH * part
    assert step["weights_written"] == DEPTH * part
    for least, larger in ranks:
        read, written = least[-1]
        assert read % part == 0
        assert written == STEPS * step["weights_written"] - 2 * part  # which stay at the end
        for before, after in pairwise(least[1:]):
            assert step["weights_read"] <= after[0] - before[0] < 2 * DEPTH * part
        excess = 2 * (DEPTH - 3) * part
        for before, after in pairwise(larger):
            assert [after[0] - before[0], after[1] - before[1]] == [excess, excess]


def test_replicas_move_the_weights_of_the_plan(capsys, disk_path):
    """Each moves all; a weight that leaves before it is updated, tile by tile, comes once more."""
    whole = WEIGHT_WIDTH**2 * 4
    step, ranks = moved_weights(capsys, disk_path, 2, "ddp", [2 * whole])
    assert step["weights_written"] == DEPTH * whole
    for ((*_, (read, written)),) in ranks:
        assert read % whole == written % whole == 0
        assert STEPS * step["weights_read"] <= read <= STEPS * 3 * DEPTH * whole
        assert STEPS * step["weights_written"] - 2 * whole <= written
        assert written <= STEPS * 2 * step["weights_written"]
