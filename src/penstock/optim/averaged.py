"""Updates in backward under ``DistributedDataParallel``, which averages gradients late.

Its communication hook is called for each bucket of gradients. ``average_and_report`` makes one that
averages as DDP itself does, and reports each gradient when that is done. The values that are reported are
the bucket's: DDP copies them to ``.grad`` later, at the end of backward.
"""

# no ``from __future__ import annotations``: torch compares the annotations of a hook

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from penstock.core.errors import ConfigError

Bucket = Sequence[tuple[Tensor, Tensor]]
"""Parameters, and their gradients."""


class AverageListener(Protocol):
    """Whoever uses averaged gradients."""

    def averaged(self, bucket: Bucket) -> None:
        """Take gradients that are final for this backward. In a thread of the process group; no raise."""


def check_can_follow(parallel: object) -> DistributedDataParallel:
    """Return a module that can report each averaged gradient; raise ConfigError for any other."""
    if not isinstance(parallel, DistributedDataParallel):
        raise ConfigError(
            f"update_after takes a DistributedDataParallel, and this is a {type(parallel).__name__};"
            " FSDP2 (fully_shard) and tensor parallelism need no such call"
        )
    ranks = dist.get_world_size(parallel.process_group)
    if parallel.gradient_as_bucket_view and ranks & (ranks - 1):
        raise ConfigError(
            f"a DistributedDataParallel of {ranks} ranks with gradient_as_bucket_view=True divides some"
            " gradients by the number of ranks and multiplies others by its inverse, which overlap=True"
            " cannot tell apart; leave gradient_as_bucket_view out, or overlap"
        )
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(parallel, option, False):
            raise ConfigError(
                f"a DistributedDataParallel with {option}=True averages zeros for parameters that have no"
                " gradient, so overlap=True would update them; leave one of the two out"
            )
    return parallel


def check_all_take_part(parallel: torch.nn.Module) -> None:
    """Raise ConfigError in a context of ``join``, in which ranks average after their last step."""
    if getattr(getattr(parallel, "_join_config", None), "enable", False):
        raise ConfigError(
            "DistributedDataParallel.join() averages gradients with ranks that make no step any more,"
            " and overlap=True would update their weights: give all ranks as many inputs, or leave"
            " overlap out"
        )


def average_and_report(parallel: DistributedDataParallel, listener: AverageListener) -> None:
    """Average this module's gradients by a communication hook that reports them.

    Raises:
        ConfigError: It has a communication hook.
    """
    group = parallel.process_group
    share = 1.0 / dist.get_world_size(group)
    them = weakref.ref(listener)  # a model does not keep its optimizers alive

    def average(
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        buffer: Tensor = bucket.buffer()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        buffer.mul_(share)  # as DDP does, before the sum
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None

        def report(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            done.value()  # raises if it failed
            mine = them()
            if mine is not None:
                mine.averaged(pairs)
            return buffer

        made: torch.futures.Future[Tensor] = work.get_future().then(report)
        return made

    try:
        parallel.register_comm_hook(None, average)
    except RuntimeError as error:
        raise ConfigError(
            "this DistributedDataParallel has a communication hook already, and update_after needs one of"
            f" its own: leave overlap=True out, or the other hook ({error})"
        ) from error


def check_none_averages(params: Iterable[Tensor], name_of: Callable[[Tensor], str]) -> None:
    """Raise ConfigError if there is a module that will average these parameters' gradients unheard.

    It looks for one among all objects of Python, some tenths of a second at most in a large program.

    Args:
        params: Parameters whose gradients would be used as soon as they are accumulated.
        name_of: Returns the name of one of them, for the message.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    mine = {id(param) for param in params}
    for found in gc.get_objects():
        kind = type(found)
        if not issubclass(kind, torch.nn.Module):
            continue
        is_ddp = issubclass(kind, DistributedDataParallel)
        if not is_ddp and kind.__name__ != "FullyShardedDataParallel":
            continue
        shared = next((each for each in found.parameters() if id(each) in mine), None)
        if shared is None:
            continue
        remedy = (
            "call optimizer.update_after(parallel) before the first backward"
            if is_ddp
            else "shard with fully_shard (FSDP2) in its place"
        )
        raise ConfigError(
            f"{kind.__name__} averages the gradient of parameter {name_of(shared)} after it is"
            f" accumulated, when overlap=True would have used it: {remedy}, or leave overlap out"
        )
