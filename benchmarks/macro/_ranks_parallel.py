"""The ways in which ranks share the decoder of the benchmark of ranks, as users of PyTorch write them."""

import _weights_model
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4
"""Of a pipeline's step; each has the tokens that a rank has in the other ways."""


class Together:
    """What this rank trains.

    Attributes:
        module: Its part of the model.
        share: Number of the data that it trains on: ranks of equal numbers have the same.
        batch: Sequences of a step.
    """

    batch = 1

    def __init__(self, module, share):
        self.module, self.share = module, share

    def backward(self, ids):
        """Run forward and backward on token ids; return the losses of it."""
        loss = _weights_model.loss_of(self.module, ids)
        loss.backward()
        return [loss.item()]

    def largest_bytes(self):
        """Most bytes of this rank's weights that are needed at once."""
        return max(local_of(each).nbytes for each in self.module.parameters())


class Sharded(Together):
    """FSDP2 gathers the weights of a block together, and those outside of blocks."""

    def largest_bytes(self):
        *blocks, whole = (
            sum(local_of(each).nbytes for each in module.parameters())
            for module in (*self.module.blocks, self.module)
        )
        return max(*blocks, whole - sum(blocks))


class Pipelined(Together):
    """A part of the layers, which gets micro-batches in the order of 1F1B."""

    batch = MICRO_BATCHES

    def __init__(self, model):
        rank, world = dist.get_rank(), dist.get_world_size()
        super().__init__(Stage(model, rank, world), share=0)
        stage = PipelineStage(self.module, rank, world, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of_logits)
        self.is_first, self.is_last = rank == 0, rank == world - 1

    def backward(self, ids):
        losses = []
        inputs = (ids,) if self.is_first else ()
        self.schedule.step(*inputs, **({"target": ids, "losses": losses} if self.is_last else {}))
        return [each.item() for each in losses]


class Stage(nn.Module):
    """Some blocks of a decoder; the first stage has the embedding, the last the head."""

    def __init__(self, model, rank, world):
        super().__init__()
        blocks, self.shape = model.blocks, model.shape
        self.tokens = model.tokens if rank == 0 else None
        self.blocks = blocks[len(blocks) * rank // world : len(blocks) * (rank + 1) // world]
        self.norm, self.head = (model.norm, model.head) if rank == world - 1 else (None, None)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x)
        turns = _weights_model.turns_of(self.shape, x.shape[1], x.dtype)
        for block in self.blocks:
            x = block(x, turns)
        return x if self.head is None else self.head(self.norm(x))


def loss_of_logits(logits, ids):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ddp(model):
    return Together(DistributedDataParallel(model), dist.get_rank())


def fsdp2(model):
    return Sharded(
        sharded(model, init_device_mesh("cpu", (dist.get_world_size(),))), dist.get_rank()
    )


def hsdp(model):
    """Shards in groups of two ranks."""
    return Sharded(sharded(model, mesh_of_pairs("replicate", "shard")), dist.get_rank())


def tp(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return Together(tensor_parallel(model, mesh), share=0)


def fsdp2_tp(model):
    """Tensor parallel in pairs of ranks, and each weight's part sharded over the pairs."""
    mesh = mesh_of_pairs("data", "tensor")
    parts = tensor_parallel(model, mesh["tensor"])
    return Sharded(sharded(parts, mesh["data"]), mesh["data"].get_local_rank())


KINDS = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp": tp,
    "fsdp2+tp": fsdp2_tp,
    "pipeline": Pipelined,
}


def mesh_of_pairs(*names):
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    """Share out attention's heads, the inner width and the vocabulary's logits."""
    plan = {name: ColwiseParallel() for name in ("qkv", "gate", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def groups_of(module):
    """Groups of parameters for an optimizer: PyTorch's fused ones take DTensors apart from others."""
    groups = [], []
    for each in module.parameters():
        groups[isinstance(each, DTensor)].append(each)
    return [{"params": group} for group in groups if group]


def local_of(parameter):
    """The shard of this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
