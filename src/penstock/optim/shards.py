"""Parameters that are spread over processes: DTensors, as FSDP2 and tensor parallelism make them.

Each process keeps the states of what it has of a parameter, its *shard*, which is a plain tensor. Ranks
agree on the norm of all gradients only.

[Note: one norm on all ranks]
    A rank sums the squares of its own shards. These sums are gathered over those dimensions of the mesh
    over which a parameter is sharded, and each rank adds them in the order of ranks. So all get the same
    bits, in every run. Over a dimension of replicas nothing is added: each gradient counts once. Which
    sums are gathered follows from the parameters, not from their gradients, so that no rank waits for
    one that has none. Each rank sends its settings along, since others would make another factor of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.core.errors import ConfigError
from penstock.homed import is_sharded, local_of
from penstock.optim.offloaded_gradient import OffloadedGradient
from penstock.store import checksums

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


_PART: Final = 1 << 20
"""Elements whose fingerprint is computed at a time, in memory of some times 8 bytes each."""
_ODD: Final = 0x1E3779B97F4A7C15


def check_can_be_laid(tensor: Any, name: str) -> None:
    """Raise ConfigError for a parameter with its values in other tensors, unless it is a DTensor."""
    local: Any = local_of(tensor)
    if is_traceable_wrapper_subclass(local):
        raise ConfigError(
            f"parameter {name} is a {type(local).__name__}, which keeps its values in other tensors;"
            " states on flash are for plain tensors and for DTensors of them: keep this one's states in"
            " memory, with an optimizer of its own"
        )
    if is_sharded(tensor) and any(each.is_partial() for each in tensor.placements):
        raise ConfigError(
            f"parameter {name} is placed{placed(tensor)}: a sum that is not computed yet cannot be"
            " updated; redistribute() it to Replicate() or Shard() before the optimizer is made"
        )


def global_like(local: Tensor, model: Tensor) -> Tensor:
    """Return a shard as a DTensor that is placed as ``model``; as it is if that is none."""
    if not is_sharded(model):
        return local
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (only where there is one)

    whole = _dtensor(model)
    return DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def placed(tensor: Tensor) -> str:
    """Return how a DTensor is spread, for messages; nothing for another tensor."""
    if not is_sharded(tensor):
        return ""
    whole = _dtensor(tensor)
    return f" {whole.placements} over {tuple(whole.device_mesh.shape)} ranks"


def local_gradient(param: Tensor, name: str) -> Tensor | None:
    """Return this process's gradient of its shard; the whole one if the parameter is no DTensor.

    A gradient that is placed otherwise than the parameter is redistributed, which all ranks do together.

    Raises:
        ConfigError: The gradient of a DTensor is none.
    """
    grad = param.grad
    if grad is None or not is_sharded(param):
        return grad
    if not is_sharded(grad):
        raise ConfigError(
            f"parameter {name} is a DTensor, and its gradient is a plain tensor; set one that is placed"
            " as the parameter: torch.distributed.tensor.DTensor.from_local(...)"
        )
    whole, model = _dtensor(grad), _dtensor(param)
    if whole.placements != model.placements or whole.device_mesh != model.device_mesh:
        whole = whole.redistribute(model.device_mesh, model.placements)
    return _arrived(whole._local_tensor)


def gradient_here(param: Tensor) -> Tensor | None:
    """Return the gradient that this process has, however it is placed."""
    grad = param.grad
    return None if grad is None else local_of(grad)


def shard_fingerprint(grad: Tensor) -> Tensor | None:
    """Return 64 bits, as int64, that differ if a DTensor's shard does; None for any other tensor.

    It reads all of the shard. One on flash, or with its values in other tensors, has none either.
    """
    if not is_sharded(grad):
        return None
    local: Any = _arrived(local_of(grad))
    if is_traceable_wrapper_subclass(local) or isinstance(local, OffloadedGradient):
        return None
    local = local.detach().reshape(-1)
    if local.device.type == "cpu":
        digest = checksums.full(local.data_ptr(), local.nbytes)
        return torch.tensor([digest - (1 << 63)])
    words = local.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.itemsize]
    )
    total = torch.zeros(1, dtype=torch.int64, device=local.device)
    for start in range(0, len(words), _PART):
        mixed = words[start : start + _PART].long()
        mixed += torch.arange(start, start + len(mixed), device=local.device) * _ODD
        mixed ^= mixed >> 29  # so that changes which balance each other do not leave the same sum
        mixed *= _ODD
        mixed ^= mixed >> 32
        total += mixed.sum()
    return total


def set_local_gradient(param: Tensor, local: Tensor) -> None:
    """Let the values of a parameter's gradient, which it has, be these; in a DTensor, this process's."""
    if param.grad is not None and is_sharded(param.grad):
        _dtensor(param.grad)._local_tensor = local
    else:
        param.grad = local


def local_state(value: Any, param: Tensor, name: str, key: str) -> Any:
    """Return this process's part of a loaded state.

    Raises:
        ConfigError: It is not placed as the parameter.
    """
    if not isinstance(value, Tensor) or not (is_sharded(value) or is_sharded(param)):
        return value
    if not is_sharded(param):
        raise ConfigError(
            f"the state dict's {key!r} for parameter {name} is a DTensor, and the parameter is none: load"
            " it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, or call"
            " full_tensor() on its states first"
        )
    if not is_sharded(value) or placed(value) != placed(param):
        now = f"placed{placed(value)}" if is_sharded(value) else "a plain tensor"
        raise ConfigError(
            f"the state dict's {key!r} for parameter {name} is {now}, and the parameter is"
            f" placed{placed(param)}: load it with"
            " torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, after"
            " torch.distributed.checkpoint.load if it is that of another number of ranks"
        )
    return local_of(value)


class Clipping(NamedTuple):
    """Settings that ranks must share which clip by one norm. They are exchanged along with it."""

    clip_norm: float
    overlap: bool


def total_norm(params: Sequence[Tensor], norms: Mapping[int, Tensor], clipping: Clipping) -> Tensor:
    """Return the 2-norm of the gradients of all ranks. See [Note: one norm on all ranks].

    Args:
        params: All parameters of the optimizer.
        norms: By number of the parameter: norm of its gradient in this process; those without one are
            left out.
        clipping: Settings of this rank.

    Returns:
        A float32 scalar on the host.

    Raises:
        ConfigError: Settings of ranks differ; on all of them.
    """
    sums: dict[tuple[DeviceMesh, tuple[int, ...]] | None, float] = {}
    for index, param in enumerate(params):
        key = None
        if is_sharded(param):
            whole = _dtensor(param)
            dims = [d for d, each in enumerate(whole.placements) if not each.is_replicate()]
            key = whole.device_mesh, tuple(dims)
        norm = norms.get(index)
        square = 0.0 if norm is None else float(norm) ** 2
        sums[key] = sums.get(key, 0.0) + square
    total = 0.0
    for key, mine in sums.items():
        total += mine if key is None else _over_ranks(mine, *key, clipping)
    return torch.tensor(total, dtype=torch.float64).sqrt().float()


def norm_over(group: Any, mine: Tensor | None, clipping: Clipping) -> Tensor:
    """Return the 2-norm of what the ranks of a group have together, added in the order of ranks.

    Args:
        group: Process group of ``torch.distributed``.
        mine: Norm on this rank; None if it has no gradient.
        clipping: Settings of this rank.

    Returns:
        A float32 scalar on the host, with the same bits on all of them.

    Raises:
        ConfigError: Settings of ranks differ; on all of them.
    """
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    sent = (0.0 if mine is None else float(mine), *clipping)
    torch.distributed.all_gather_object(found, sent, group=group)
    _check_same([settings for _, *settings in found], group)
    total = sum(norm**2 for norm, *_ in found)
    return torch.tensor(total, dtype=torch.float64).sqrt().float()


def common_step(own: Sequence[int]) -> int:
    """Return the newest step that all ranks have; with a single process its own newest.

    Args:
        own: Steps that this rank can resume at, the newest first; none if it has made no step.

    Returns:
        0 if there is none, and no rank has made more than one step.

    Raises:
        ConfigError: There is none; on all ranks.
    """
    all_ranks = [tuple(own)]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, tuple(own))
        all_ranks = found
    newest = {steps[0] if steps else 0 for steps in all_ranks}
    if len(newest) == 1:
        return newest.pop()
    common = set(all_ranks[0]).intersection(*all_ranks)
    if common:
        return max(common)
    if max(newest) > 1:
        told = "; ".join(
            f"rank {rank}: {', '.join(map(str, steps)) or 'none'}"
            for rank, steps in enumerate(all_ranks)
        )
        raise ConfigError(
            f"the ranks have no durable step in common ({told}): give each rank the directory that it"
            " had, or load a checkpoint, or name empty directories to begin anew"
        )
    return 0


def _check_same(found: Iterable[Sequence[float]], group: Any) -> None:
    """Raise ConfigError if ranks of a group sent different settings, from which factors would differ."""
    of_all = [Clipping(norm, bool(overlap)) for norm, overlap in found]
    if len(set(of_all)) == 1:
        return
    ranks = torch.distributed.get_process_group_ranks(group)
    told = "; ".join(
        f"rank {rank}: clip_norm={each.clip_norm:g}, overlap={each.overlap}"
        for rank, each in zip(ranks, of_all, strict=True)
    )
    raise ConfigError(
        f"ranks that clip by one norm have different settings ({told}), so they would scale their"
        " gradients by different factors: give each rank the same clip_norm and overlap"
    )


def _over_ranks(mine: float, mesh: DeviceMesh, dims: Sequence[int], clipping: Clipping) -> float:
    for dim in dims:
        group = mesh.get_group(dim)
        sent = torch.tensor([[mine, *clipping]], dtype=torch.float64, device=mesh.device_type)
        found = sent.new_empty(mesh.size(dim), sent.shape[1])
        torch.distributed.all_gather_into_tensor(found, sent, group=group)
        squares, *settings = found.t().tolist()
        _check_same(zip(*settings, strict=True), group)
        mine = sum(squares)
    return mine


def _arrived(local: Tensor) -> Tensor:
    """Return the values of a shard when they are there: they come from other ranks, or from a device.

    FSDP2's ``CPUOffloadPolicy`` of older versions of torch calls hooks while a gradient is being copied
    to pinned memory, on the stream that is current then.
    """
    wait = getattr(local, "wait", None)
    if wait is not None:
        return cast(Tensor, wait())
    if local.device.type == "cpu" and local.is_pinned():
        torch.cuda.current_stream().synchronize()
    return local


def _dtensor(tensor: Tensor) -> DTensor:
    return cast("DTensor", tensor)
