"""Facts about torch's allocator of device memory: which stream gets a block, and when."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch

from penstock.core.units import MIB
from penstock.testing.gpu.fact import (
    SIZE_BYTES,
    ExaminedDevice,
    Fact,
    NotHereError,
    expect,
    fact,
    in_thread,
)

_MOVER: Final = "runtime/cuda/mover.py, [Note: streams]"
_POOLS: Final = "runtime/cuda/pools.py, [Note: own pool]"


@fact(
    "A block that was freed is used again at once on its own stream, though the device works with it.",
    relies=f"{_MOVER}, rules 2 and 4",
    late=True,
)
def freed_is_reused_on_its_stream(gpu: ExaminedDevice) -> None:
    """Free after a delay."""
    _native(gpu)
    stream = gpu.stream()
    with gpu.cuda.stream(stream):
        first = gpu.empty()
        where = first.data_ptr()
        busy = gpu.delay()
        first.fill_(1)
        del first
        second = gpu.empty()
    expect(second.data_ptr() == where, "the block was not used again")
    expect(not busy.query(), "the device was done before the block was used again")


@fact(
    "A block that was freed is not given to another stream.",
    relies=f"{_MOVER}, rule 4",
)
def freed_is_not_for_other_streams(gpu: ExaminedDevice) -> None:
    """Free in another thread, with another stream current."""
    _native(gpu)
    one, other = gpu.stream(), gpu.stream()
    with gpu.cuda.stream(one):
        held = [gpu.empty()]
    where = held[0].data_ptr()
    with gpu.cuda.stream(other):
        in_thread(held.clear)
        second = gpu.empty()
    expect(second.data_ptr() != where, "another stream got it")
    with gpu.cuda.stream(one):
        third = gpu.empty()
    expect(third.data_ptr() == where, "its own stream did not get it")


@fact(
    "A block with a recorded stream is used again only when that stream has done what it had to do.",
    relies=f"{_MOVER}, rule 6, and link.keep",
    late=True,
)
def recorded_stream_delays_reuse(gpu: ExaminedDevice) -> None:
    """Record a tensor that shares the storage, as link.keep does."""
    _native(gpu)
    own, side = gpu.stream(), gpu.stream()
    with gpu.cuda.stream(own):
        first = gpu.empty()
        where = first.data_ptr()
        _bytes_of(first).record_stream(side)
        busy = gpu.delay(side)
        del first
        second = gpu.empty()
        expect(second.data_ptr() != where, "it was used again while the recorded stream was busy")
        busy.synchronize()
        side.synchronize()
        third = gpu.empty()
    expect(third.data_ptr() == where, "it was not used again when the recorded stream was done")


@fact(
    "To record the stream that a block is allocated on changes nothing.",
    relies="runtime/cuda/mover.py: keep is called for every stream",
    late=True,
)
def own_stream_is_not_recorded(gpu: ExaminedDevice) -> None:
    """Check that the block is reused at once."""
    _native(gpu)
    stream = gpu.stream()
    with gpu.cuda.stream(stream):
        first = gpu.empty()
        where = first.data_ptr()
        _bytes_of(first).record_stream(stream)
        busy = gpu.delay()
        del first
        second = gpu.empty()
    expect(second.data_ptr() == where, "the block was not used again at once")
    expect(not busy.query(), "the host came late: the device was done")


@fact(
    "A storage begins at a multiple of 512 bytes.", relies="runtime/cuda/gpu_direct.py, digest.py"
)
def storages_are_aligned(gpu: ExaminedDevice) -> None:
    """Allocate storages of many lengths at the same time."""
    held = [gpu.empty(nbytes) for nbytes in (1, 3, 511, 513, 4097, MIB + 1, 3 * MIB + 5)]
    odd = [each.numel() for each in held if each.untyped_storage().data_ptr() % 512]
    expect(not odd, f"those of {odd} bytes do not")


@fact(
    "Idle memory goes back to the device by empty_cache, and the device then has as much more.",
    relies="swap/suspend.py: a suspended job holds little device memory",
)
def idle_memory_is_returned(gpu: ExaminedDevice) -> None:
    """Free 256 MiB."""
    _native(gpu)
    held = gpu.empty(256 * MIB)
    reserved, free = gpu.cuda.memory_reserved(), gpu.cuda.mem_get_info()[0]
    del held
    gpu.clean()
    less = reserved - gpu.cuda.memory_reserved()
    expect(less >= 256 * MIB, f"{less} bytes less are reserved")
    more = gpu.cuda.mem_get_info()[0] - free
    expect(more >= 192 * MIB, f"{more} bytes more are free (or another process took some)")


@fact(
    "The device's total memory is what is free and what its users have, of which torch's is a part.",
    relies="core/config.py: the default of device_memory",
)
def memory_adds_up(gpu: ExaminedDevice) -> None:
    """Compare the numbers with 64 MiB in use."""
    held = gpu.empty(64 * MIB)
    free, total = gpu.cuda.mem_get_info()
    reserved = gpu.cuda.memory_reserved()
    expect(0 < free < total, f"{free} of {total} bytes are free")
    expect(total - free >= reserved, f"{reserved} bytes are reserved, {total - free} in use")
    expect(reserved >= held.numel(), "less is reserved than is allocated")


@fact(
    "A request that is too large raises OutOfMemoryError, after idle memory went back, and all goes on.",
    relies="runtime/cuda/inbound.py: a target that the device has no room for waits",
)
def out_of_memory_is_survived(gpu: ExaminedDevice) -> None:
    """Request twice the device's memory."""
    _native(gpu)
    held = gpu.empty(128 * MIB)
    del held
    gpu.cuda.synchronize()
    reserved = gpu.cuda.memory_reserved()
    try:
        gpu.empty(2 * gpu.cuda.mem_get_info()[1])
    except torch.OutOfMemoryError:
        pass
    else:
        expect(False, "twice the device's memory could be allocated")
    less = reserved - gpu.cuda.memory_reserved()
    expect(less >= 128 * MIB, f"{less} bytes of idle memory went back")
    expect(int(gpu.full(1, 512).sum()) == 512, "the next kernel did not do its work")


@fact(
    "What is idle in a pool of its own is given to that pool only, and each thread's choice is its own.",
    relies=_POOLS,
)
def pools_keep_their_memory(gpu: ExaminedDevice) -> None:
    """Allocate in the pool, outside of it, from another thread, and in the pool again."""
    _native(gpu)
    pool = _pool(gpu)
    with gpu.cuda.use_mem_pool(pool):
        first = gpu.empty()
        where = first.data_ptr()
        del first
        beside = in_thread(gpu.empty)
    outside = gpu.empty()
    with gpu.cuda.use_mem_pool(pool):
        again = gpu.empty()
    _keep.append(pool)
    expect(beside.data_ptr() != where, "another thread got the pool's block")
    expect(outside.data_ptr() != where, "the pool's block was given away")
    expect(again.data_ptr() == where, "the pool did not use its block again")


@fact(
    "A pool made with use_on_oom lends what is idle in it before torch is out of memory.",
    relies=_POOLS,
)
def pools_lend(gpu: ExaminedDevice) -> None:
    """Limit torch to little more than it has."""
    _native(gpu)
    if "use_on_oom" not in inspect.signature(gpu.cuda.MemPool.__init__).parameters:
        raise NotHereError("this torch has no pools that lend (torch 2.9 has)")
    pool = gpu.cuda.MemPool(use_on_oom=True)
    _keep.append(pool)
    with gpu.cuda.use_mem_pool(pool):
        first = gpu.empty(64 * MIB)
        where = first.data_ptr()
        del first
    gpu.cuda.synchronize()
    share = (gpu.cuda.memory_reserved() + 4 * MIB) / gpu.cuda.mem_get_info()[1]
    gpu.cuda.set_per_process_memory_fraction(share)
    lent: torch.Tensor | None = None
    try:
        lent = gpu.empty(64 * MIB)
        expect(lent.data_ptr() == where, "other memory was found, over what torch may take")
    except torch.OutOfMemoryError:
        expect(False, "torch was out of memory while the pool was idle")
    finally:
        gpu.cuda.set_per_process_memory_fraction(1.0)
        lent = None
        with gpu.cuda.use_mem_pool(pool):  # otherwise it would lend memory to later facts
            gpu.cuda.empty_cache()


@fact(
    "A storage holds its memory until its last reference is dropped, whatever tensors shared it.",
    relies="hooks/saved_tensors.py: what is spilled is free when its storage is dropped",
)
def storages_hold_their_memory(gpu: ExaminedDevice) -> None:
    """Use memory_allocated, which is exact."""
    before = gpu.cuda.memory_allocated()
    tensor = gpu.empty()
    storage = tensor.untyped_storage()
    view = _bytes_of(tensor)[5:]
    del tensor, view
    expect(gpu.cuda.memory_allocated() >= before + SIZE_BYTES, "it was freed with the tensors")
    del storage
    left = gpu.cuda.memory_allocated() - before
    expect(left == 0, f"{left} bytes are still allocated")


_keep: Final[list[Any]] = []
"""Pools kept until the process ends: deletion was broken in some versions (pytorch #169699)."""


def _native(gpu: ExaminedDevice) -> None:
    backend = getattr(gpu.cuda, "get_allocator_backend", lambda: "native")()
    if backend != "native":
        raise NotHereError(f"the allocator is {backend}")
    gpu.clean()


def _pool(gpu: ExaminedDevice) -> Any:
    if not hasattr(gpu.cuda, "MemPool"):
        raise NotHereError("this torch has no memory pools")
    return gpu.cuda.MemPool()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


FACTS: Final = tuple(each for each in list(globals().values()) if isinstance(each, Fact))
