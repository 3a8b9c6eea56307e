"""Ways to share a job among processes: none, data parallelism, or a pipeline of two halves.

Each is used as follows, on every rank at the same time:

1. ``loss_and_gradients(batch)`` returns the loss and leaves gradients in the parameters of ``module``.
2. The caller makes the step of the optimizer.

Data parallelism is torch's own; the pipeline is two halves by ``torch.distributed.pipelining``, with
GPipe's schedule.
"""

from __future__ import annotations

import os
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.lab import zoo
from penstock.lab.characterize.pipeline_stages import loss_from_logits, split, tied_weight

MICROBATCHES: Final = 4
"""Upper limit for the parts into which a pipeline cuts a batch."""


class ParallelMode(Protocol):
    """One rank's part of a job."""

    module: nn.Module
    """The module that this rank trains, saves and restores."""
    saves: bool
    """True if a checkpoint of the job needs this rank's part."""

    def loss_and_gradients(self, batch: zoo.Batch) -> float | None:
        """Run forward and backward; return the loss, if this rank has it."""


class SingleProcess:
    """One process with the whole batch."""

    saves = True

    def __init__(self, network: zoo.Network) -> None:
        """Train this network."""
        self.module: nn.Module = network

    def loss_and_gradients(self, batch: zoo.Batch) -> float | None:
        """Run forward and backward; return the loss."""
        loss = self.module(*batch)
        loss.backward()
        return float(loss.detach())


class DataParallelMode:
    """Data parallelism: each rank has the network and a share of the batch; gradients are averaged."""

    def __init__(self, network: zoo.Network) -> None:
        """Wrap the network; the process group exists already."""
        self.module: nn.Module = network
        self.saves = dist.get_rank() == 0
        self._ddp = DistributedDataParallel(network)

    def loss_and_gradients(self, batch: zoo.Batch) -> float | None:
        """Run forward and backward on this rank's share; return its loss."""
        rank, world = dist.get_rank(), dist.get_world_size()
        share = slice(rank, None, world)
        loss = self._ddp(batch.inputs[share], batch.targets[share])
        loss.backward()
        return float(loss.detach())


class TwoRankPipeline:
    """Two ranks, a half of the network each; micro-batches go forward, then backward."""

    saves = True

    def __init__(self, network: zoo.Network, batch: zoo.Batch) -> None:
        """Keep this rank's half.

        Args:
            network: The whole network, with the same weights on both ranks.
            batch: An example of the batches to come.
        """
        from torch.distributed import pipelining  # noqa: PLC0415  (some builds of torch lack it)

        rank = dist.get_rank()
        pair = split(network)
        self.module = pair[rank]
        self._tied_weight = tied_weight(network)
        self._device = next(self.module.parameters()).device
        count = _divisor(len(batch.inputs), MICROBATCHES)
        stage = pipelining.PipelineStage(self.module, rank, len(pair), self._device)
        self._schedule = pipelining.ScheduleGPipe(
            stage, n_microbatches=count, loss_fn=loss_from_logits(network)
        )
        self._rank = rank

    def loss_and_gradients(self, batch: zoo.Batch) -> float | None:
        """Run all micro-batches; return the loss on the last rank, None on the first."""
        if self._rank == 0:
            self._schedule.step(batch.inputs)
            losses: list[Tensor] = []
        else:
            losses = []
            self._schedule.step(target=batch.targets, losses=losses)
        if self._tied_weight is not None:  # each half has a part of the gradient of the tied weight
            assert self._tied_weight.grad is not None
            dist.all_reduce(self._tied_weight.grad)
        return float(torch.stack(losses).mean()) if losses else None


def make_strategy(kind: str, network: zoo.Network, batch: zoo.Batch) -> ParallelMode:
    """Return this rank's part of a job of that kind."""
    if kind == "ddp":
        return DataParallelMode(network)
    if kind == "pipeline":
        return TwoRankPipeline(network, batch)
    return SingleProcess(network)


def join(kind: str, rank: int, world: int, rendezvous: str, device: torch.device) -> None:
    """Meet the other ranks through a file. Does nothing without parallelism."""
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
    """Leave the process group; other ranks may have ended already."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _divisor(number: int, most: int) -> int:
    """Return the largest number of equal parts, ``most`` at most."""
    return next(count for count in range(min(number, most), 0, -1) if number % count == 0)
