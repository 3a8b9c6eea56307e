"""Bytes that ranks move to and from flash are those that ``penstock plan --ranks`` foretells."""

import json

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
torch.manual_seed(0)
model = sharded(build(1)[0])
a = FlashAdamW(model.parameters(), lr=1e-2, flash=flash, tile=int(sys.argv[3]), overlap=True)
def moved():
    totals = session.recorder.snapshot()
    return [totals.flow(each, "weights").nbytes for each in (Stage.READ, Stage.WRITE)]

with penstock.offload(
    model, weights="flash", weights_memory=int(sys.argv[4]), flash=flash,
    device_memory="64MiB", flash_capacity="64MiB",
) as session:
    before = moved()
    for step in range(int(sys.argv[5])):
        model(torch.randn(4, 1024)).square().mean().backward()
        a.step()
        a.zero_grad()
a.close()
with open(f"{place}/moved{rank}.json", "w") as file:
    json.dump([after - each for after, each in zip(moved(), before)], file)
"""


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


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_move_the_weights_of_the_plan_but_for_what_is_still_in_memory(
    capsys, disk_path, world
):
    """Where forward and backward meet, and steps, as many as the limit allows need not be moved."""
    path = written_network(disk_path, WEIGHT_WIDTH)
    part = WEIGHT_WIDTH**2 * 4 // world
    limit, steps = 2 * part, 4
    step = planned(capsys, path, world, "fsdp2", "--weights", "flash")["step"]["moved"]
    assert DEPTH * part <= step["weights_read"] < 2 * DEPTH * part
    assert step["weights_written"] == DEPTH * part
    words = (str(64 * TILE), str(limit), str(steps))
    rank_programs.run(disk_path, WEIGHTS, world, *words)
    for rank in range(world):
        read, written = json.loads((disk_path / f"moved{rank}.json").read_text())
        assert read % part == written % part == 0
        assert 0 <= steps * step["weights_written"] - written <= limit
        assert steps * step["weights_read"] <= read <= steps * 2 * DEPTH * part
