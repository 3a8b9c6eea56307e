"""A budget for gradients beside ``DistributedDataParallel``, which averages them after they have left."""

import pytest

import preloaded
import rank_programs

PROGRAM = """
import contextlib, os, sys, torch, torch._dynamo, torch.distributed as dist, warnings
from torch import nn
from penstock import PenstockWarning
from penstock.optim import FlashAdamW, gradients

meet = sys.argv[1]
torch.set_num_threads(1)
rank = int((other := os.fork()) == 0)  # torch, and what its optimizers load, is loaded once
flash = sys.argv[2 + rank]
gradients.LEAST_BYTES = 0
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)

def train(views, times, steps=3, to_none=True, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 130), nn.Tanh(), nn.Linear(130, 30), nn.Linear(30, 5))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    a = FlashAdamW(model.parameters(), flash=flash, tile=1024, clip_norm=0.02, **settings)
    written = []
    for step in range(steps):
        for turn in range(times):
            torch.manual_seed(100 * step + 10 * turn + rank)
            last = turn == times - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                parallel(torch.randn(6, 20)).square().mean().backward()
        a.step()
        a.zero_grad(set_to_none=to_none)
        written.append(a.wear().gradient_bytes_per_step)
    a.close()
    return list(model.parameters()), written

for views in (False, True):
    for times, to_none in ((1, True), (2, True), (2, False)):
        theirs, _ = train(views, times, to_none=to_none)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", PenstockWarning)
            ours, written = train(views, times, to_none=to_none, gradient_memory=0)
        assert all(map(torch.equal, ours, theirs)), (views, times)
        told = [each for each in told if issubclass(each.category, PenstockWarning)]
        if views:  # nothing is gained by writing them, and after two steps that is known
            assert all(written[:2]) and not written[2], written
            assert "gradient_as_bucket_view" in str(told[0].message) and len(told) == 1
        else:
            assert all(written) and not told
dist.barrier()
dist.destroy_process_group()
os.mkdir(f"{flash}/same")  # not printed: gloo prints too, and the ranks at the same time
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


def test_gradients_that_are_averaged_over_processes_are_the_same_bits(disk_path):
    places = [disk_path / name for name in ("0", "1")]
    for each in places:
        each.mkdir()
    done = preloaded.run(["-c", PROGRAM, disk_path / "meet", *places])
    assert done.returncode == 0, done.stderr
    assert all((each / "same").exists() for each in places), done.stderr


IN_BACKWARD = """
import contextlib

def made(views):
    model = network()
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=0.01)

def go(parallel, optimizer, synced, turns, to_none):
    for step in range(4):
        for turn in range(turns):
            with contextlib.nullcontext() if synced or turn == turns - 1 else parallel.no_sync():
                backward(parallel, step, turn)
        if isinstance(optimizer, FlashAdamW):
            assert optimizer._penstock.overlap.is_under_way
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)

kinds = (False, True) if world == 2 else (False,)
for views in kinds:
    for turns, synced, to_none in ((1, True, True), (2, True, True), (2, False, True), (2, False, False)):
        theirs = made(views)
        go(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True), synced, turns, to_none)
        ours = made(views)
        a = FlashAdamW(
            ours.parameters(), lr=1e-2, flash=flash, tile=1024, overlap=True,
            accumulation=turns if synced else 1,
        )
        a.update_after(ours)
        go(ours, a, synced, turns, to_none)
        assert_same(ours.parameters(), theirs.parameters())
        a.close()
        backward(ours, 9)  # which still averages
        assert on_all(ours.module[0].bias.grad.tolist())[0] == ours.module[0].bias.grad.tolist()
"""


AT_HOME = """
results = []
for rests in (False, True):
    parallel = nn.parallel.DistributedDataParallel(wide(), bucket_cap_mb=0.01)
    if rests:
        optimizer = overlapped(parallel)
        optimizer.update_after(parallel)
    else:
        optimizer = fused(parallel)
    with session_of(parallel, "72KiB") if rests else nullcontext() as session:
        for step in range(3):
            random = torch.Generator().manual_seed(10 * step + rank)
            parallel(torch.randn(6, 64, generator=random)).square().mean().backward()
            assert not rests or optimizer._penstock.overlap.is_under_way
            optimizer.step()
            optimizer.zero_grad()
        if rests:
            weights = session._weights
            assert weights.total_bytes > 80 * 1024 and weights.account.peak_bytes <= 72 * 1024
    results.append(values_of(parallel))
    getattr(optimizer, "close", lambda: None)()
assert_same(*results)
assert all(torch.equal(each, on_all(each)[0]) for each in results[1])
"""


def test_updates_in_backward_use_averaged_gradients(disk_path):
    rank_programs.run(disk_path, IN_BACKWARD + rank_programs.WEIGHTS + AT_HOME)


REFUSED = """
ours = made(views=True)  # which divides by 3 what is kept between steps, and multiplies the rest by 1/3
a = FlashAdamW(ours.parameters(), lr=1e-2, flash=flash, tile=1024, overlap=True)
try:
    a.update_after(ours)
    raise AssertionError("followed")
except ConfigError as error:
    assert "of 3 ranks with gradient_as_bucket_view=True" in str(error), error
a.close()
"""


@pytest.mark.slow
def test_three_ranks_update_in_backward_with_averaged_gradients(disk_path):
    rank_programs.run(disk_path, IN_BACKWARD + REFUSED, 3)
