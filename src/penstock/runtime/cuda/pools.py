"""A pool of device memory of its own for what comes and goes: the targets of reads.

They are taken and given back all through backward, amid gradients that stay: from one pool, what they
leave are holes. From a pool of their own the holes are each other's size, step after step.

[Note: own pool]
    Torch's allocator reserves a pool's memory for the pool while it lives. So this is done only
    where a pool can be told to lend (``use_on_oom``, from torch 2.9 on): what is idle in it is then used
    before torch would say that it is out of memory. The other way round the pool cannot ask for idle
    memory of torch's own, so what it has no room for is allocated there. A pool that was deleted made
    some versions fail when they were out of memory (pytorch #169699): those here live as long as the
    process, one for each device, and sessions share them. While a CUDA graph is being captured its pool
    is the one in force, and stays that.

[Note: memory of CUDA graphs]
    What a graph allocates while it is captured (``torch.compile(mode="reduce-overhead")`` captures many)
    lies in a pool of its own, which keeps its memory: to spill it frees nothing, and it would
    be copied in again at each replay. Which pool memory belongs to is told by torch's snapshot alone,
    which takes milliseconds; but for memory to change its pool torch has to ask the driver for it, and
    counts that. So a snapshot is taken only if it has done so since the last. To read that count takes
    longer than all else that is asked of a tensor, so it is read once in a pass, and where an address is
    in no segment that was seen. A segment that is given back to the driver and taken for another pool,
    within one pass, is noticed in the next one; until then copies of it are made that free nothing.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from typing import Any

import torch

from penstock.core import knobs
from penstock.core.errors import ConfigError
from penstock.core.locks import Lock


class Pools:
    """One pool for each device, made when first needed. Thread-safe."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """Make none yet.

        Args:
            cuda: ``torch.cuda``, or what a test puts in its place.
        """
        self._cuda = cuda
        self._lock = Lock()
        self._pools: dict[int, Any] = {}

    @property
    def supported(self) -> bool:
        """Return whether this torch has pools that lend; see [Note: own pool]."""
        pool = getattr(self._cuda, "MemPool", None)
        if pool is None or not hasattr(self._cuda, "use_mem_pool"):
            return False
        return "use_on_oom" in inspect.signature(pool.__init__).parameters

    def empty(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Device memory from the pool, or torch's own if there is no room. Raises OutOfMemoryError."""
        if not self._cuda.is_current_stream_capturing():
            index = self._cuda.current_device() if device.index is None else device.index
            try:
                # two threads must not route allocations to one pool at the same time
                with self._lock, self._cuda.use_mem_pool(self._pool(index), device=index):
                    return _empty(nbytes, device)
            except torch.OutOfMemoryError:
                pass
        return _empty(nbytes, device)

    def _pool(self, index: int) -> Any:
        pool = self._pools.get(index)
        if pool is None:
            with self._cuda.device(index):
                pool = self._pools[index] = self._cuda.MemPool(use_on_oom=True)
        return pool

    def own(self, pool_id: tuple[int, int]) -> bool:
        """Return whether a pool is one of these."""
        return any(tuple(pool.id) == pool_id for pool in self._pools.values())


class Segments:
    """Pools that own the memory of devices. See [Note: memory of CUDA graphs]. Thread-safe."""

    def __init__(self, pools: Pools, cuda: Any = torch.cuda) -> None:
        """Ask for nothing yet.

        Args:
            pools: Ours.
            cuda: ``torch.cuda``, or what a test puts in its place.
        """
        self._pools = pools
        self._cuda = cuda
        self._seen: dict[int, tuple[int, list[int], list[tuple[int, bool]]]] = {}
        """By device: the driver's bytes so far, starts of segments, and their ends and whose they are."""
        self._is_current: set[int] = set()
        # of each allocation where the program has made it: many, if the user records that
        has_traces = "include_traces" in inspect.signature(cuda.memory_snapshot).parameters
        self._without_traces = {"include_traces": False} if has_traces else {}

    def is_of_another_pool(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage lies in a pool that is neither torch's common one nor ours."""
        if self._cuda.get_allocator_backend() != "native":  # others have no snapshot
            return False
        index, address = storage.device.index, storage.data_ptr()
        found = self._find(index, address) if index in self._is_current else None
        if found is None:
            self._look(index, storage.device)
            found = self._find(index, address)
        return found is True

    def renew(self) -> None:
        """Memory may have gone from pool to pool since it was looked at."""
        self._is_current.clear()

    def _find(self, index: int, address: int) -> bool | None:
        """Return whether a segment is of another pool; ``None`` if the address is in none."""
        _, starts, segments = self._seen[index]
        place = bisect_right(starts, address) - 1
        if place < 0:
            return None
        end, is_others = segments[place]
        return is_others if address < end else None

    def _look(self, index: int, device: torch.device) -> None:
        stats = self._cuda.memory_stats_as_nested_dict(device)
        changed = stats["reserved_bytes"]["all"]["allocated"]
        known = self._seen.get(index)
        if known is None or known[0] != changed:
            here = sorted(
                (each["address"], each["total_size"], tuple(each["segment_pool_id"]))
                for each in self._cuda.memory_snapshot(**self._without_traces)
                if each["device"] == index
            )
            ends = [(start + size, not self._is_ours(pool_id)) for start, size, pool_id in here]
            self._seen[index] = changed, [start for start, _, _ in here], ends
        self._is_current.add(index)

    def _is_ours(self, pool_id: tuple[int, int]) -> bool:
        return pool_id == (0, 0) or self._pools.own(pool_id)


_shared = Pools()
segments = Segments(_shared)
"""Of this process."""


def shared() -> Pools | None:
    """The pools of this process; None: the knob says that there are none.

    Raises:
        ConfigError: They are asked for, and this torch does not have them.
    """
    if knobs.own_pool() == "off":
        return None
    if not _shared.supported:
        raise ConfigError(
            "PENSTOCK_OWN_POOL=on: this torch has no memory pools that lend what is idle (torch 2.9 has);"
            " unset it, or install a newer torch"
        )
    return _shared


def _empty(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
