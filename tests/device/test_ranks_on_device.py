"""Two ranks with a device each, over gloo: the same bits as without Penstock, and all of it in order."""

import os
import sys

import pytest
import torch

import preloaded
from rank_programs import IMPORTS, NAMES, WEIGHTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices"),
]

START = """
import gc, os, sys
sys.path += os.environ["PYTHONPATH"].split(os.pathsep)
import torch, emulator, plugin
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

kind, place, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
plugin.prepare()
from programs import FLASH, Chain

device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)

def parallel(model):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    mesh = init_device_mesh("cuda", (2,))
    for layer in model.layers:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach().cpu()

flash = place / str(rank)
flash.mkdir()
"""
PROGRAM = """
from offload_runs import session_in
from penstock.observe.recorder import Stage

def train(path):
    torch.manual_seed(0)
    model = parallel(Chain().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    session = None if path is None else session_in(path, model, **FLASH).__enter__()
    bits = []
    for _ in range(3):
        loss = model(torch.randn(256, 128, generator=generator).to(device))
        loss.backward()
        bits.append(loss.detach().cpu())
        bits += [local(each.grad) for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        del loss
    bits += [local(each) for each in model.parameters()]
    if session is not None:
        moved = session.recorder.snapshot().flow(Stage.COPY_OUT, "flash").nbytes
        session.close()
        assert moved > 0, "nothing was offloaded"
    return bits

def elsewhere():
    # the choice of device 0 is left out: where a context is, torch's guards choose it again at their end
    return {each for each in emulator.uses(0) if not each.startswith("cudaSetDevice ")}

expected = train(None)
foreign, before = elsewhere(), emulator.calls.emu_context(0).decode()
with plugin.judged() as order:
    found = train(flash)
    foreign = elsewhere() - foreign
    made = emulator.calls.emu_context(0).decode()
    complaints = plugin.faults(order)
if rank == 1:
    assert not foreign, foreign
    # gloo copies in a thread of torch's own, which makes a context there; torch 2.8 makes one by itself
    assert made in ("", before) or made.endswith("in thread pt_gloo_runloop"), made
assert not complaints, complaints
assert order.checked > 1000, f"only {order.checked} accesses were judged"
assert all(map(torch.equal, found, expected)), "the bits differ"
"""
OPTIMIZED = """
import warnings
from penstock.optim import FlashAdamW

def train(settings=None):
    torch.manual_seed(0)
    model = parallel(Chain().to(device))
    if settings is None:  # torch's step on the host, as that of states on flash is
        homes = [nn.Parameter(local(each)) for each in model.parameters()]
        optimizer = torch.optim.AdamW(homes, lr=1e-2, fused=True)
    else:
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, flash=flash, tile=4096, **settings)
        if kind == "ddp" and "overlap" in settings:
            optimizer.update_after(model)
    generator = torch.Generator().manual_seed(rank)
    bits = []
    for _ in range(3):
        model(torch.randn(256, 128, generator=generator).to(device)).backward()
        if settings is not None and "overlap" in settings:
            assert optimizer._penstock.overlap.is_under_way
        if settings is None:
            for home, each in zip(homes, model.parameters()):
                home.grad = local(each.grad)
        optimizer.step()
        if settings is None:
            with torch.no_grad():
                for home, each in zip(homes, model.parameters()):
                    getattr(each, "_local_tensor", each).copy_(home)
        bits += [local(each) for each in model.parameters()]
        model.zero_grad()
    if settings is not None:
        optimizer.close()
    return bits

expected = train()
kinds = [{}, {"overlap": True}, {"gradient_memory": 0}]
if kind == "fsdp2":
    kinds.append({"overlap": True, "gradient_memory": 0})
    kinds.append({"clip_norm": 1e9})  # which is the norm of both ranks, and changes nothing
with plugin.judged() as order, warnings.catch_warnings(action="ignore"):  # memory of so small states
    found = [train(each) for each in kinds]
    complaints = plugin.faults(order)
assert not complaints, complaints
assert order.checked > 1000, f"only {order.checked} accesses were judged"
for settings, bits in zip(kinds, found):
    assert all(map(torch.equal, bits, expected)), f"the bits differ with {settings}"
"""
WAYS = {
    "fsdp2": """
half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
kept = {"mp_policy": half, "reshard_after_forward": False}
settings = {"kept after forward": (kept, overlapped)}
""",
    "tensor parallel": """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
share = 0

def of_two(model):
    return FlashAdamW(
        model.parameters(), lr=1e-2, flash=flash, tile=1024, overlap=True, accumulation=2
    )

settings = {"updated in backward": ({}, of_two), "all at once": ({}, sgd)}

def sharded(model):
    # what comes out is not gathered: gloo would read a device's memory as if it were the host's
    ways = ColwiseParallel(), RowwiseParallel(), ColwiseParallel()
    mesh = init_device_mesh("cuda", (2,))
    return parallelize_module(model, mesh, {str(i): each for i, each in enumerate(ways)})
""",
}
"""How weights are spread over ranks, and what is tried with that."""
WEIGHTS_AT_HOME = """
def stopped(session):
    weights, account = session._weights, session._weights.account
    assert not weights.forced and 0 < account.peak_bytes <= 40 * 1024 < weights.total_bytes

def with_states(weights):
    model = sharded(wide())
    optimizer = adamw(model)
    with session_of(model, weights=weights) if weights else nullcontext() as session:
        found = steps(model, optimizer, 2)
        if weights:
            stopped(session)
        saved = {name: each.detach().clone() for name, each in model.state_dict().items()}
        found += steps(model, optimizer, 1, first=2)
        model.load_state_dict(saved)
    assert all(home_of(each) is None for each in model.parameters())
    if weights:
        gc.collect()
        assert not session._mover.lent_bytes, "host memory of weights that have left is not free"
    found += steps(model, optimizer, 1, first=3)  # in device memory
    optimizer.close()
    return [*found, *map(local, saved.values()), *values_of(model)]

with plugin.judged() as order:
    compare(settings)
    plain = with_states(None)
    for weights in "flash", "host":
        assert_same(with_states(weights), plain)
    complaints = plugin.faults(order)
assert not complaints, complaints
assert order.checked > 1000, f"only {order.checked} accesses were judged"
"""
END = """
dist.barrier()
dist.destroy_process_group()
(place / f"ended {rank}").mkdir()
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_train_bit_for_bit_and_in_order(disk_path, kind):
    if kind == "fsdp2" and torch.__version__.startswith("2.8."):
        pytest.skip("gloo of torch 2.8 gathers from a device's memory as if it were the host's")
    run_ranks(disk_path, kind, START + PROGRAM + END)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_train_with_states_on_flash_bit_for_bit_and_in_order(disk_path, kind):
    if kind == "fsdp2" and torch.__version__.startswith("2.8."):
        pytest.skip("gloo of torch 2.8 gathers from a device's memory as if it were the host's")
    run_ranks(disk_path, kind, START + OPTIMIZED + END)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_bring_their_parts_of_weights_bit_for_bit_and_in_order(disk_path, way):
    if torch.__version__.startswith("2.8."):
        pytest.skip("gloo of torch 2.8 gathers from a device's memory as if it were the host's")
    names = 'world, flash = 2, str(flash)\nwarnings.simplefilter("ignore")\n' + NAMES + WEIGHTS
    program = IMPORTS + START + names + WAYS[way] + WEIGHTS_AT_HOME
    run_ranks(disk_path, way, program + END)


def run_ranks(disk_path, kind, program):
    environment = os.environ | {
        "PENSTOCK_SLAB": "16MiB",
        "PENSTOCK_GPU_DIRECT": "off",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    said = disk_path / "said"
    with said.open("w") as file:
        ranks = [
            preloaded.Process(
                ["-c", program, kind, disk_path, str(rank)],
                env=environment,
                stdout=file,
                stderr=file,
            )
            for rank in range(2)
        ]
    try:
        for rank in ranks:
            rank.wait(200)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all((disk_path / f"ended {rank}").exists() for rank in range(2)), said.read_text()
