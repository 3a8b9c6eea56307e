"""Pools of their own for what comes and goes: on a simulated device, and on what stands for torch."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from cuda_rig import Rig
from simulated_device import DEVICE

from penstock.core.errors import ConfigError
from penstock.core.units import KIB
from penstock.runtime.cuda import pools
from penstock.runtime.cuda.pools import Pools


def test_what_comes_back_takes_no_hole_of_what_stays_and_finds_its_own_again():
    rig = Rig()
    ticket = rig.spill(1, 8 * KIB)
    rig.settle()
    holes = [rig.link.empty(8 * KIB, DEVICE) for _ in range(3)]
    addresses = {each.data_ptr() for each in holes}
    del holes
    first = rig.restored(ticket)
    assert first.data_ptr() not in addresses
    before = first.data_ptr()
    del first
    rig.settle()
    assert rig.link.empty(8 * KIB, DEVICE).data_ptr() != before
    again = rig.restored(ticket)
    assert again.data_ptr() == before
    del again
    rig.settle()
    rig.mover.discard(rig.flash, ticket)
    rig.close()


class Cuda:
    """Of ``torch.cuda`` what pools need; knows which pool is in force."""

    def __init__(self, *, full=()):
        self.made, self.used, self.inside = [], [], None
        self.capturing = False
        self.full = full

        class MemPool:
            def __init__(pool, allocator=None, use_on_oom=False, no_split=False):
                self.made.append((pool, use_on_oom))

        self.MemPool = MemPool

    def is_current_stream_capturing(self):
        return self.capturing

    def current_device(self):
        return 0

    @contextmanager
    def device(self, index):
        yield

    @contextmanager
    def use_mem_pool(self, pool, device):
        assert self.inside is None, "two at the same time"
        self.inside = pool
        self.used.append((pool, device))
        try:
            yield
        finally:
            self.inside = None


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()

    def empty(nbytes, device):
        if (found.inside is None) in found.full:
            raise torch.OutOfMemoryError("simulated")
        return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(pools, "_empty", empty)
    return found


def test_every_device_has_one_pool_that_lends(cuda):
    own = Pools(cuda)
    assert own.supported
    for name in ("cuda", "cuda:0", "cuda:1"):
        assert own.empty(100, torch.device(name)).nbytes() == 100
    assert [lends for _, lends in cuda.made] == [True, True]
    assert [index for _, index in cuda.used] == [0, 0, 1]
    assert cuda.used[0][0] is cuda.used[1][0] is not cuda.used[2][0]


def test_what_the_pool_has_no_room_for_is_torchs_own(cuda):
    own = Pools(cuda)
    cuda.full = (False,)
    assert own.empty(100, torch.device("cuda")).nbytes() == 100
    cuda.full = (False, True)
    with pytest.raises(torch.OutOfMemoryError):
        own.empty(100, torch.device("cuda"))
    assert cuda.inside is None


def test_a_graph_that_is_captured_keeps_its_pool(cuda):
    cuda.capturing = True
    Pools(cuda).empty(100, torch.device("cuda"))
    assert not cuda.used


def test_a_torch_without_pools_that_lend_is_refused_by_name(cuda, monkeypatch):
    class Older:
        def __init__(self, allocator=None):
            pass

    monkeypatch.setattr(pools, "_shared", Pools(cuda))
    monkeypatch.delenv("PENSTOCK_OWN_POOL", raising=False)
    assert pools.shared() is None
    monkeypatch.setenv("PENSTOCK_OWN_POOL", "on")
    assert pools.shared() is pools._shared
    cuda.MemPool = Older
    with pytest.raises(ConfigError, match=r"PENSTOCK_OWN_POOL=on.*2\.9"):
        pools.shared()
    del cuda.MemPool
    with pytest.raises(ConfigError, match="PENSTOCK_OWN_POOL"):
        pools.shared()


class Snapshots:
    """Of ``torch.cuda`` what tells whose memory is."""

    def __init__(self, backend="native"):
        self.segments, self.reserved, self.taken = [], 0, 0
        self.backend = backend

    def get_allocator_backend(self):
        return self.backend

    def add(self, address, nbytes, pool_id):
        self.segments.append(
            {"address": address, "total_size": nbytes, "segment_pool_id": pool_id, "device": 0}
        )
        self.reserved += nbytes

    def memory_stats_as_nested_dict(self, device):
        return {"reserved_bytes": {"all": {"allocated": self.reserved}}}

    def memory_snapshot(self):
        if self.backend != "native":
            raise RuntimeError(f"not meaningful with backend:{self.backend}")
        self.taken += 1
        return self.segments


class Storage:
    device = torch.device("cuda", 0)

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


def test_trap_36_memory_of_other_pools_is_told_by_its_segment(cuda):
    own = Pools(cuda)
    own.empty(100, torch.device("cuda:0"))
    cuda.made[0][0].id = (1, 7)
    snapshots = Snapshots()
    segments = pools.Segments(own, snapshots)
    snapshots.add(1000, 100, (0, 0))
    snapshots.add(2000, 100, (0, 5))
    snapshots.add(3000, 100, (1, 7))
    found = {
        a: segments.is_of_another_pool(Storage(a)) for a in (1000, 1999, 2000, 2099, 2100, 3000)
    }
    assert [address for address, is_theirs in found.items() if is_theirs] == [2000, 2099]
    assert snapshots.taken == 1
    snapshots.add(4000, 100, (0, 6))
    assert segments.is_of_another_pool(Storage(4050))
    assert snapshots.taken == 2


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_that_has_no_snapshot_is_not_asked_for_one(cuda, backend):
    snapshots = Snapshots(backend)
    snapshots.add(2000, 100, (0, 5))
    assert not pools.Segments(Pools(cuda), snapshots).is_of_another_pool(Storage(2000))


def test_a_snapshot_has_no_traces(cuda):
    class Recording(Snapshots):
        def memory_snapshot(self, mempool_id=None, include_traces=True):
            assert not include_traces
            return super().memory_snapshot()

    snapshots = Recording()
    snapshots.add(2000, 100, (0, 5))
    assert pools.Segments(Pools(cuda), snapshots).is_of_another_pool(Storage(2000))


def test_the_allocator_is_asked_once_in_a_pass(cuda):
    """A segment may go to another pool at the same address; where the address is new it is asked."""
    snapshots = Snapshots()
    segments = pools.Segments(Pools(cuda), snapshots)
    snapshots.add(1000, 100, (0, 0))
    assert not segments.is_of_another_pool(Storage(1000))
    snapshots.segments.clear()
    snapshots.add(1000, 100, (0, 5))
    assert not segments.is_of_another_pool(Storage(1000))
    segments.renew()
    assert segments.is_of_another_pool(Storage(1000))
    assert snapshots.taken == 2
