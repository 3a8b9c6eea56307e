"""Tensor parallelism over one rank: a model whose weights are DTensors, and what changes one."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


@contextmanager
def mesh_of_one(kind):
    """A mesh of this process alone, on devices of a kind."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(kind, (1,))
    finally:
        dist.destroy_process_group()


def parallel(mesh, depth=6):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(depth)))
    model.to(mesh.device_type)
    for layer in model:
        parallelize_module(layer, mesh, ColwiseParallel())
    return model


def change_in_place(weight):
    weight.add_(1)


def change_by_a_list(weight):
    torch._foreach_add_([weight], 1)


def change_by_data(weight):
    weight.data.add_(1)


def change_by_detach(weight):
    weight.detach().add_(1)


def change_what_is_local(weight):
    weight.to_local().add_(1)


def change_an_array_of_it(weight):
    weight.to_local().numpy()[:] += 1


def change_what_is_placed_the_same(weight):
    weight.redistribute(placements=[Shard(0)]).add_(1)


def load_a_state(weight):
    weight.copy_(weight + 1)


CHANGES = (
    change_in_place,
    change_by_a_list,
    change_by_data,
    change_by_detach,
    change_what_is_local,
    change_what_is_placed_the_same,
    load_a_state,
)
"""On any device; an array is of host memory."""
