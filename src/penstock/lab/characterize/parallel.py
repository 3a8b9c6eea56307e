"""How the processes of one job share its work: alone, by data, or as a pipeline of two halves.

Each is used as follows, on every rank at the same time:

1. ``loss_and_gradients(batch)``: the loss; gradients are in the parameters of ``module``.
2. The optimizer's step, by the caller.

Data parallelism is torch's own; the pipeline is two halves by ``torch.distributed.pipelining``, GPipe's
schedule.
"""

from __future__ import annotations

import os
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.lab import zoo
from penstock.lab.characterize.halves import halves, tied, whole_loss

MICROBATCHES: Final = 4
"""Into how many parts a pipeline cuts a batch, at most."""


class Way(Protocol):
    """One rank's part of a job."""

    module: nn.Module
    """What this rank trains, saves and restores."""
    saves: bool
    """Whether a checkpoint of the job needs this rank's part."""

    def loss_and_gradients(self, batch: zoo.Batch) -> float | None:
        """Forward and backward; the loss, where this rank has it."""


class Alone:
    """One process, the whole batch."""

    saves = True

    def __init__(self, network: zoo.Network) -> None:
        """Train this network."""
        self.module: nn.Module = network

    def loss_and_gradients(self, batch: zoo.Batch) -> float | None:
        """Forward and backward."""
        loss = self.module(*batch)
        loss.backward()
        return float(loss.detach())


class Data:
    """Every rank has the network and its share of the batch; gradients are averaged."""

    def __init__(self, network: zoo.Network) -> None:
        """Join the others; the process group is there."""
        self.module: nn.Module = network
        self.saves = dist.get_rank() == 0
        self._ddp = DistributedDataParallel(network)

    def loss_and_gradients(self, batch: zoo.Batch) -> float | None:
        """Forward and backward of this rank's share."""
        rank, world = dist.get_rank(), dist.get_world_size()
        share = slice(rank, None, world)
        loss = self._ddp(batch.inputs[share], batch.targets[share])
        loss.backward()
        return float(loss.detach())


class Pipeline:
    """Two ranks, a half of the network each; micro-batches go forward, then backward."""

    saves = True

    def __init__(self, network: zoo.Network, batch: zoo.Batch) -> None:
        """Keep this rank's half.

        Args:
            network: Whole, with the same weights on both ranks.
            batch: One as they will come.
        """
        from torch.distributed import pipelining  # noqa: PLC0415  (no part of every torch build)

        rank = dist.get_rank()
        pair = halves(network)
        self.module = pair[rank]
        self._tied = tied(network)
        self._device = next(self.module.parameters()).device
        count = _divisor(len(batch.inputs), MICROBATCHES)
        stage = pipelining.PipelineStage(self.module, rank, len(pair), self._device)
        self._schedule = pipelining.ScheduleGPipe(
            stage, n_microbatches=count, loss_fn=whole_loss(network)
        )
        self._rank = rank

    def loss_and_gradients(self, batch: zoo.Batch) -> float | None:
        """All micro-batches; the loss is known to the last rank."""
        if self._rank == 0:
            self._schedule.step(batch.inputs)
            losses: list[Tensor] = []
        else:
            losses = []
            self._schedule.step(target=batch.targets, losses=losses)
        if self._tied is not None:  # each half has a part of the gradient of what they share
            assert self._tied.grad is not None
            dist.all_reduce(self._tied.grad)
        return float(torch.stack(losses).mean()) if losses else None


def way(kind: str, network: zoo.Network, batch: zoo.Batch) -> Way:
    """This rank's part of a job of that kind."""
    if kind == "ddp":
        return Data(network)
    if kind == "pipeline":
        return Pipeline(network, batch)
    return Alone(network)


def join(kind: str, rank: int, world: int, rendezvous: str, device: torch.device) -> None:
    """Meet the other ranks, by a file; nothing to do alone."""
    if kind == "none":
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
    )


def leave() -> None:
    """End it; others may have ended already."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def together(value: float) -> list[Any]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _divisor(number: int, most: int) -> int:
    """The largest number of equal parts, so many at most."""
    return next(count for count in range(min(number, most), 0, -1) if number % count == 0)
