"""Ranks that share a job in each of torch's ways train to the same bits with a session in each.

Every rank trains twice, and compares with itself (``parallel_program.py``). That bits are equal says
little if nothing is shared or nothing moves, so each test asks for both.
"""

from pathlib import Path

import pytest

import rank_programs
from rank_runs import EVERYTHING, run_ranks

PROGRAM = Path(__file__).with_name("parallel_program.py")
KINDS = {
    "ddp": (2, 4),
    "fsdp2": (2, 4),
    "hsdp": (4,),
    "tp": (2, 4),
    "fsdp2+tp": (4,),
    "pipeline": (2, 4),
}
"""Number of ranks that each kind of parallelism is tested with."""
FLASH = ("activations", "states", "gradients", "weights", "weights and states", EVERYTHING)
CHEAP = {("ddp", 2, "weights"), ("fsdp2", 2, "weights")}
"""Not slow, beside those that together have each pair of kind, number of ranks and what is on flash."""


def check(told, kind):
    """Check what all ranks have told of one job."""
    for rank in told:
        assert rank["compared"] >= 12
        assert not rank["differ"], rank["differ"][:5]
        assert 0 < rank["peak_bytes"] <= rank["limit_bytes"] < rank["saved_bytes"]
        assert rank["written_bytes"] > 0
        assert rank["read_bytes"] >= rank["written_bytes"] // 2
    check_shared(told, kind)


def check_weights(rank, kind, flash):
    """Check that weights of one rank were on flash, of which it read its own part as often as needed."""
    found = rank["weights"]
    forwards = 4 if kind == "pipeline" else 1  # micro-batches
    passes = 3 * (2 * forwards + 1)  # forward, backward and update, in three steps
    assert rank["local_values"] * 3 < found["bytes"] <= rank["local_values"] * 4
    assert 0 < found["peak_bytes"] <= found["limit_bytes"] <= found["bytes"] // 2
    assert found["bytes"] < found["read_bytes"] <= found["bytes"] * passes
    assert not found["forced"]
    if "states" in flash:
        assert found["written_bytes"] >= 2 * found["bytes"]
        assert not found["touched"]


def check_shared(told, kind):
    """Check that the ranks did not just train alone."""
    whole = told[0]["whole_values"]
    held = [rank["local_values"] for rank in told]
    if kind == "ddp":
        assert held == [whole] * len(told)
        assert len({tuple(rank["losses"]) for rank in told}) == len(told)  # data of its own
    elif kind in ("fsdp2", "pipeline"):
        assert sum(held) == whole
        assert max(held) <= whole // len(told)
    else:  # small layers are whole on each rank under tensor parallelism
        assert all(whole // 4 <= each <= whole * 6 // 10 for each in held)
    if kind == "pipeline":
        assert [bool(rank["losses"]) for rank in told] == [*[False] * (len(told) - 1), True]


def cases():
    for kind, sizes in KINDS.items():
        for world in sizes:
            for flash in FLASH:
                at_least = world == min(sizes) and flash == EVERYTHING
                at_most = world == max(sizes) > min(sizes) and flash == "activations"
                cheap = at_least or at_most or (kind, world, flash) in CHEAP
                yield pytest.param(
                    kind,
                    world,
                    flash,
                    id=f"{kind}-{world}-{flash}",
                    marks=[] if cheap else pytest.mark.slow,
                )


@pytest.mark.parametrize(("kind", "world", "flash"), [*cases()])
def test_ranks_train_to_the_bits_of_plain_ranks(disk_path, kind, world, flash):
    told = run_ranks(PROGRAM, disk_path, {"kind": kind, "flash": flash}, world=world)
    check(told, kind)
    if flash == EVERYTHING:
        assert len({rank["written_bytes"] for rank in told}) > 1
    for rank in told:
        assert ("optimizer states" in rank["clients"]) == (flash not in ("activations", "weights"))
        assert ("gradients" in rank["clients"]) == ("gradients" in flash)
        if flash.startswith("weights"):
            check_weights(rank, kind, flash)
            assert ("with FSDP2 (fully_shard) each reads its part" in rank["weights"]["note"]) == (
                kind == "ddp"
            )


UNEQUAL = """
import penstock
from contextlib import nullcontext
from penstock.observe.recorder import Stage

def train(session_of):
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(12) for each in (nn.Linear(64, 64), nn.GELU())))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with session_of(parallel) as session:
        for step in range(4):  # codecs begin with the third
            features = torch.randn(8192, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = parallel(features).square().mean()
            loss.backward()
            found += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return session, [*found, *(each.detach() for each in model.parameters())]

own = [
    {"codec": "none", "device_memory": "6MiB", "policy": "all"},
    {"codec": "exponent", "device_memory": "16MiB"},
][rank]
_, expected = train(lambda model: nullcontext())
session, found = train(
    lambda model: penstock.offload(model, flash=flash, flash_capacity="256MiB", **own)
)
assert_same(found, expected)
totals = session.recorder.snapshot()
encoded = sum(count for name, count in totals.counters.items() if "encoded.source_bytes" in name)
assert bool(encoded) == bool(rank), totals.counters
told = on_all((totals.flow(Stage.WRITE, "flash").nbytes, session.budget.peak_bytes))
assert all(written > 8 << 20 for written, _ in told), told
assert told[0][1] <= 6 << 20 < told[1][1] <= 16 << 20, told
"""


def test_ranks_with_other_limits_and_codecs_train_to_the_bits_of_plain_ranks(disk_path):
    rank_programs.run(disk_path, UNEQUAL)
