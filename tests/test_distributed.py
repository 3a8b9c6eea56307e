"""Ranks that share a job in each of torch's ways train to the same bits with a session in each.

Every rank trains twice, and compares with itself (``parallel_program.py``). That bits are equal says
little if nothing is shared or nothing moves, so each test asks for both.
"""

from pathlib import Path

import pytest

from rank_runs import run_ranks

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


def check(told, kind):
    """Check what all ranks have told of one job."""
    for rank in told:
        assert rank["compared"] >= 12
        assert not rank["differ"], rank["differ"][:5]
        assert 0 < rank["peak_bytes"] <= rank["limit_bytes"] < rank["saved_bytes"]
        assert rank["written_bytes"] > 0
        assert rank["read_bytes"] >= rank["written_bytes"] // 2
    check_shared(told, kind)


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
            for flash in ("activations", "states", "gradients"):
                cheap = world == 2 and flash == "activations"
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
    for rank in told:
        assert ("optimizer states" in rank["clients"]) == (flash != "activations")
        assert ("gradients" in rank["clients"]) == (flash == "gradients")
