"""One rank of a job that trains twice, without Penstock and with it: see ``test_distributed.py``.

    python parallel_program.py DIRECTORY SETTINGS

The settings are a JSON object: ``kind`` of parallelism, and ``flash``, what else than activations goes
there: states of the optimizer (``"states"``), gradients too (``"gradients"``), weights with a plain
optimizer (``"weights"``), weights and states (``"weights and states"``), all of these (``EVERYTHING``).
With the last, ranks of odd numbers have another policy, so that plans differ.
"""

import datetime
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from offload_runs import session_in
from penstock.core.units import KIB, MIB
from penstock.observe.recorder import Stage
from penstock.optim import gradients, on_flash
from rank_runs import EVERYTHING

WIDTH, BLOCKS, STEPS, MICRO_BATCHES = 64, 8, 3, 4
ROWS = {"pipeline": 2048}
"""512 for other kinds."""
FLOOR = {"weights": 8 * KIB, "weights and states": 8 * KIB, EVERYTHING: 8 * KIB}
"""32 KiB for others."""
BUDGET = {"pipeline": 2 * MIB, "tp": 3 * MIB // 2, "fsdp2+tp": 3 * MIB // 2}
"""5 MiB for other kinds."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def loss_of(found, wanted):
    return nn.functional.mse_loss(found, wanted)


def split(model, mesh):
    """Let the two large layers of each block be parallel over a mesh."""
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def shard(model, mesh):
    """Shard each block by FSDP2."""
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Job:
    """This rank's part of a job.

    Attributes:
        module: What is trained here.
        share: Which of the shares of the data it trains on.
    """

    def __init__(self, kind):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.kind, self.share = kind, rank
        self.model = model = network()
        if kind == "ddp":
            self.module = nn.parallel.DistributedDataParallel(model)
        elif kind == "fsdp2":
            self.module = shard(model, init_device_mesh("cpu", (world,)))
        elif kind == "hsdp":
            names = ("replicate", "shard")
            self.module = shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        elif kind == "tp":
            self.module, self.share = split(model, init_device_mesh("cpu", (world,))), 0
        elif kind == "fsdp2+tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            self.module = shard(split(model, mesh["tensor"]), mesh["data"])
            self.share = mesh["data"].get_local_rank()
        else:
            each = BLOCKS // world
            self.model = self.module = model[rank * each : (rank + 1) * each]
            stage = PipelineStage(self.module, rank, world, torch.device("cpu"))
            self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
            self.share = 0
            self.first, self.last = rank == 0, rank == world - 1

    def train(self, features, wanted):
        """Run forward and backward; return losses, if there are any here."""
        if self.kind != "pipeline":
            loss = loss_of(self.module(features), wanted)
            loss.backward()
            return [loss.detach()]
        losses = []
        inputs = (features,) if self.first else ()
        self.schedule.step(*inputs, **({"target": wanted, "losses": losses} if self.last else {}))
        return [each.detach() for each in losses]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def told_of_weights(session):
    """What weights on flash have taken and moved until now."""
    weights, totals = session._weights, session.recorder.snapshot()
    return {
        "note": weights.note(),
        "bytes": weights.total_bytes,
        "peak_bytes": weights.account.peak_bytes,
        "limit_bytes": weights.account.limit_bytes,
        "forced": weights.forced,
        "touched": weights.touches,
        "read_bytes": totals.flow(Stage.READ, "weights").nbytes,
        "written_bytes": totals.flow(Stage.WRITE, "weights").nbytes,
    }


def train(kind, flash, place=None):
    """Train; return all bits by name, and what a session has done if there is a place for one."""
    job = Job(kind)
    params = list(job.module.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=False)
    session = nullcontext()
    homes = {}
    if flash.startswith("weights"):
        sizes = [local(each).nbytes for each in params]
        limit = max(sum(sizes) // 4, 2 * max(sizes))
        homes = {"weights": "flash", "weights_memory": limit}
    if place is not None:
        session = session_in(
            place,
            job.model,
            policy="all" if flash == EVERYTHING and dist.get_rank() % 2 else "auto",
            codec="none",
            floor=FLOOR.get(flash, 32 * KIB),
            **homes,
            device_memory=BUDGET.get(kind, 5 * MIB),
        )
        if flash not in ("activations", "weights"):
            limits = {"gradient_memory": 0} if "gradients" in flash else {}
            on_flash(optimizer, flash=place, tile=4096, **limits)
    bits = {}
    with session:
        for step in range(STEPS):
            data = torch.Generator().manual_seed(10 * step + job.share)
            features, wanted = torch.randn(2, ROWS.get(kind, 512), WIDTH, generator=data)
            for number, loss in enumerate(job.train(features, wanted)):
                bits[f"step {step}, loss {number}"] = loss
            if "gradients" not in flash:  # these wait on flash
                for name, each in job.model.named_parameters():
                    bits[f"step {step}, gradient of {name}"] = local(each.grad).clone()
            optimizer.step()
            optimizer.zero_grad()
        streams = place is not None and session._weights is not None
        streamed = told_of_weights(session) if streams else {}
    for name, each in job.model.named_parameters():
        bits[name] = local(each.detach()).clone()
    told = {
        "local_values": sum(local(each).numel() for each in params),
        "whole_values": sum(each.numel() for each in network().parameters()),
    }
    if place is not None:
        totals = session.recorder.snapshot()
        told |= {
            "written_bytes": totals.flow(Stage.WRITE, "flash").nbytes,
            "read_bytes": totals.flow(Stage.READ, "flash").nbytes,
            "peak_bytes": session.budget.peak_bytes,
            "limit_bytes": session.budget.limit_bytes,
            "saved_bytes": session.summary().saved_peak_bytes,
            "weights": streamed,
            "clients": [line.client for line in session.summary().ssd_written],
        }
        if flash not in ("activations", "weights"):
            optimizer.close()
    return bits, told


def main(place, settings):
    torch.set_num_threads(1)
    gradients.LEAST_BYTES = 0
    place = Path(place)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place}/meet",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=240),
    )
    expected, _ = train(settings["kind"], settings["flash"])
    own = place / f"flash{rank}"
    own.mkdir()
    found, told = train(settings["kind"], settings["flash"], own)
    assert found.keys() == expected.keys()
    told["compared"] = len(found)
    told["differ"] = [name for name in found if not torch.equal(found[name], expected[name])]
    told["losses"] = [found[name].item() for name in found if ", loss " in name]
    dist.barrier()
    dist.destroy_process_group()
    (place / f"told.{rank}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
