"""A budget for gradients beside ``DistributedDataParallel``, which averages them after they have left."""

import preloaded

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
