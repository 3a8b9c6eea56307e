"""Programs of several gloo ranks: forked from one process, which has imported torch once."""

import textwrap

import preloaded

IMPORTS = """
import os, sys, warnings
import torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from penstock import ConfigError
from penstock.optim import FlashAdamW, FlashSGD, gradients, on_flash

place = sys.argv[1]
torch.set_num_threads(1)
gradients.LEAST_BYTES = 0
rank, children = 0, []
"""
FORKED = """
world = int(sys.argv[2])
for number in range(1, world):
    child = os.fork()
    if child == 0:
        rank, children = number, []
        break
    children.append(child)
meeting = {"init_method": f"file://{place}/meet{world}", "rank": rank, "world_size": world}
"""
LAUNCHED = """
rank, world, meeting = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {}
"""
NAMES = """
flash = f"{place}/flash{rank}"
os.makedirs(flash, exist_ok=True)
dist.init_process_group("gloo", timeout=timedelta(seconds=200), **meeting)

def on_all(value):
    found = [None] * world
    dist.all_gather_object(found, value)
    return found

def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(local(mine), local(other)), (local(mine), local(other))

def network(seed=0, dtype=None):
    # 5 and 130 rows: shards are padded; 1 row: ranks from the second on have none
    torch.manual_seed(seed)
    sizes = (20, 130), (130, 5), (5, 1)
    made = nn.Sequential(*(nn.Linear(*each) for each in sizes))
    return made.to(dtype)

def sharded(model, mesh=None, **settings):
    for layer in model:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)

def backward(model, step, turn=0):
    generator = torch.Generator().manual_seed(1000 * step + 100 * turn + rank)
    inputs = torch.randn(6, 20, generator=generator).to(next(model.parameters()).dtype)
    model(inputs).square().mean().backward()

def train(model, optimizer, steps, first=0, clip=None):
    norms = []
    for step in range(first, first + steps):
        backward(model, step)
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return norms
"""
END = """
dist.barrier()
dist.destroy_process_group()
open(f"{place}/done{rank}", "w").close()
assert all(os.waitpid(each, 0)[1] == 0 for each in children)
sys.stderr.flush()
os._exit(0)  # without the end of the interpreter, in which torch's or gloo's threads may abort
"""


def run(place, body, world=2, *words):
    """Run the body, which has the names above, on so many ranks, with a directory of each."""
    for left in (*place.glob("meet*"), *place.glob("done*")):  # by an earlier run
        left.unlink()
    program = IMPORTS + FORKED + NAMES + textwrap.dedent(body) + END
    done = preloaded.run(["-c", program, place, str(world), *words], timeout=280)
    assert done.returncode == 0, done.stderr
    ended = [(place / f"done{rank}").exists() for rank in range(world)]
    assert all(ended), (ended, done.stderr)


def for_a_launcher(body):
    """Return the program that does the same in processes that torchrun starts, given the place."""
    return IMPORTS + LAUNCHED + NAMES + textwrap.dedent(body) + END
