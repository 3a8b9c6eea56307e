"""A memory pool of its own for what comes back, on a real device."""

import gc

import pytest
import torch
from gpu_runs import run, saved_bytes, settings_for

from penstock.core.units import MIB
from penstock.runtime.cuda.pools import Pools

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Pools().supported, reason="this torch has no pools that lend"),
]


def test_a_target_lies_in_a_segment_of_its_own_pool_and_is_used_again():
    pools, device = Pools(), torch.device("cuda", torch.cuda.current_device())
    first = pools.empty(32 * MIB, device)
    (pool,) = pools._pools.values()
    where = first.data_ptr()
    segments = [(one["address"], one["total_size"]) for one in pool.snapshot()]
    assert any(begin <= where < begin + nbytes for begin, nbytes in segments)
    del first
    gc.collect()
    other = torch.empty(32 * MIB, dtype=torch.uint8, device=device)
    assert other.data_ptr() != where
    assert pools.empty(32 * MIB, device).data_ptr() == where
    with torch.cuda.use_mem_pool(pool):  # or it would lend its memory to a later test
        torch.cuda.empty_cache()


@pytest.mark.parametrize("places", ["flash", "host"])
def test_training_is_the_same_bits(disk_path, monkeypatch, places):
    plain, _ = run("resnet18")
    monkeypatch.setenv("PENSTOCK_OWN_POOL", "on")
    budget = int(0.6 * saved_bytes("resnet18", disk_path))
    settings = settings_for(places, policy="auto", device_memory=budget)
    spilled, session = run("resnet18", disk_path, session_settings=settings)
    assert session.plan.offloaded_bytes > 0
    spilled.assert_same_bits(plain)
