"""Ranks of one job that save to one path, or to one directory: one of them keeps what it has saved."""

import json

import pytest
import torch

import rank_programs
from penstock import ConfigError, checkpoint
from penstock.checkpoint import Checkpointer

BOTH_SAVE = """
from penstock import CheckpointError, checkpoint
from penstock.checkpoint import Checkpointer

def in_turn(act):
    said = None
    for number in range(world):
        dist.barrier()
        if number == rank:
            try:
                act()
            except ConfigError as error:
                said = str(error)
    return on_all(said)

state = {"w": torch.full((3000,), float(rank)), "rank": rank}
told = in_turn(lambda: checkpoint.save(f"{place}/one", state))
assert told[0] is None
assert "'{}/one' was saved by rank 0 of 2, and rank 1 would replace it".format(place) in told[1], told
assert "penstock.checkpoint.dcp" in told[1] and "a path of its own" in told[1]
found = checkpoint.load(f"{place}/one")  # what another rank saved is loaded, and checked
assert found["rank"] == 0 and torch.equal(found["w"], torch.zeros(3000))

if rank == 0:
    checkpoint.save(f"{place}/one", {**state, "again": True})  # its own
dist.barrier()
assert checkpoint.load(f"{place}/one")["again"] and os.listdir(place).count("one") == 1

def opened():
    held.append(Checkpointer(f"{place}/run"))
held = []
told = in_turn(opened)
assert told[0] is None and "rank 1 of 2" in told[1] and "penstock.checkpoint.dcp" in told[1], told
for each in held:
    each.close()

placed = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (world,)), [Shard(0)])
try:
    checkpoint.save(f"{place}/parts{rank}", {"model": {"w": placed}})
    raise AssertionError("a part was saved as if it were the whole")
except CheckpointError as error:
    assert "model.w: a DTensor" in str(error) and "penstock.checkpoint.dcp" in str(error)

# a directory of each rank: one step that all have, although rank 0 was not killed and has gone on
with Checkpointer(f"{place}/run/rank{rank}", keep=3) as own:
    for step in range(1, 5 if rank == 0 else 4):
        own.save(step, {"step": step})
with Checkpointer(f"{place}/run/rank{rank}", keep=3) as own:
    steps = on_all([each.step for each in own.checkpoints() if each.ok])
    assert steps == [[4, 3, 2], [3, 2, 1]]
    assert own.load(step=max(set.intersection(*map(set, steps))))["step"] == 3
"""


def test_a_rank_does_not_replace_what_another_has_saved(disk_path):
    rank_programs.run(disk_path, BOTH_SAVE)


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank, world):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))

    return become


def test_ranks_before_their_process_group_are_known_by_their_launcher(
    disk_path, as_rank, monkeypatch
):
    as_rank(1, 4)
    checkpoint.save(disk_path / "one", {"w": torch.ones(9)}, facts={"rank": 8})
    facts = json.loads((disk_path / "one" / "manifest.json").read_text())["facts"]
    assert (facts["saved_by_rank"], facts["saved_by_ranks"]) == (1, 4)
    as_rank(3, 4)
    with pytest.raises(ConfigError, match="saved by rank 1 of 4, and rank 3 would replace it"):
        checkpoint.save(disk_path / "one", {"w": torch.zeros(9)})
    assert torch.equal(checkpoint.load(disk_path / "one")["w"], torch.ones(9))
    with Checkpointer(disk_path / "run") as first:
        as_rank(0, 4)
        first.save(1, {"x": 1})
        as_rank(2, 4)
        with pytest.raises(ConfigError, match="saved by rank 0 of 4"):
            first.save(1, {"x": 2})
    as_rank(0, 4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    checkpoint.save(disk_path / "one", {"w": torch.ones(8)})  # in another run ranks are others
    as_rank(1, 4)
    with pytest.raises(ConfigError, match="saved by rank 0 of 4"):
        checkpoint.save(disk_path / "one", {"w": torch.zeros(9)})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    checkpoint.save(disk_path / "one", {"w": torch.ones(7)})
    as_rank(0, 2)
    checkpoint.save(disk_path / "one", {"w": torch.ones(6)})
    as_rank(0, 1)  # a program of one process may replace it
    checkpoint.save(disk_path / "one", {"w": torch.zeros(9)})
    assert torch.equal(checkpoint.load(disk_path / "one")["w"], torch.zeros(9))
