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
MEET = """
flash = f"{place}/flash{rank}"
os.makedirs(flash, exist_ok=True)
dist.init_process_group("gloo", timeout=timedelta(seconds=200), **meeting)
device = torch.device("cpu")
"""
NAMES = """
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
WEIGHTS = """
import penstock
from contextlib import nullcontext
from torch.distributed.fsdp import MixedPrecisionPolicy
from penstock.homed import home_of

share = rank  # of the data

def wide():
    # of 67 rows ranks have different numbers
    torch.manual_seed(0)
    sizes = (64, 130), (130, 67), (67, 64)
    return nn.Sequential(*(nn.Linear(*each) for each in sizes)).to(device)

def session_of(model, limit="40KiB", weights="flash"):
    host_memory = {"flash": "64MiB", "host": "128MiB"}[weights]
    limits = {} if device.type == "cpu" else {"host_memory": host_memory}
    return penstock.offload(
        model, weights=weights, weights_memory=limit, flash=flash, floor="4KiB",
        device_memory="64MiB", flash_capacity="64MiB", **limits,
    )

def steps(model, optimizer, count, first=0):
    found = []
    for step in range(first, first + count):
        for turn in range(2):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(turn == 1)
            random = torch.Generator().manual_seed(100 * step + 10 * turn + share)
            loss = model(torch.randn(6, 64, generator=random).to(device)).square().mean()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(torch.ones(2, 64, device=device)))
    return found

def values_of(model):
    return [local(each.detach()).clone() for each in model.parameters()]

def adamw(model):
    return FlashAdamW(model.parameters(), lr=1e-2, flash=flash, tile=1024)

def overlapped(model):
    return FlashAdamW(model.parameters(), lr=1e-2, flash=flash, tile=1024, overlap=True)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

def compare(settings):
    for name, (options, make) in settings.items():
        results = []
        for rests in (False, True):
            model = sharded(wide(), **options)
            optimizer = make(model)
            with session_of(model) if rests else nullcontext() as session:
                found = steps(model, optimizer, 3)
                if rests:
                    assert session._weights.total_bytes > 40 * 1024
            results.append([*found, *values_of(model)])
            getattr(optimizer, "close", lambda: None)()
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), name
"""
"""Models whose weights rest on flash, on a device too. Needs the names above."""
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
    program = IMPORTS + FORKED + MEET + NAMES + textwrap.dedent(body) + END
    done = preloaded.run(["-c", program, place, str(world), *words], timeout=280)
    assert done.returncode == 0, done.stderr
    ended = [(place / f"done{rank}").exists() for rank in range(world)]
    assert all(ended), (ended, done.stderr)


def for_a_launcher(body):
    """Return the program that does the same in processes that torchrun starts, given the place."""
    return IMPORTS + LAUNCHED + MEET + NAMES + textwrap.dedent(body) + END
