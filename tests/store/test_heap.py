"""What comes back may go into the process's own heap, where the C library keeps what is freed."""

import gc
import os

import numpy as np
import pytest
import torch

from offload_runs import assert_nothing_held, assert_within_budget, same_bits
from penstock.core.errors import ClosedError, ConfigError
from penstock.core.units import MIB
from penstock.io.mapping import PAGE_BYTES
from penstock.lab import zoo
from penstock.store.account import Account
from penstock.store.arena import Arena
from penstock.store.heap import Heap, heap_is_better

KEEPS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


@pytest.fixture
def heap():
    return Heap(account=Account(MIB, name="test"), owner="restored")


def used(heap):
    assert heap.touched_bytes == heap.account.used_by("restored")
    return heap.touched_bytes


def test_a_block_begins_at_a_page_and_is_charged_until_it_is_freed(heap):
    block = heap.allocate(5000)
    assert block.address % PAGE_BYTES == 0
    assert used(heap) == heap.charge_bytes(5000) == 5000 + PAGE_BYTES
    block.free()
    assert used(heap) == 0


def test_what_is_lent_is_charged_until_its_last_view_is_gone(heap):
    block = heap.allocate(8192)
    array = block.lend(100, 4000)
    assert array.__array_interface__["data"][0] == block.address + 100
    assert array.nbytes == 4000
    array[:] = 7
    tensor = torch.from_numpy(array)[1000:]
    del array, block
    gc.collect()
    assert used(heap) > 0
    assert bool((tensor == 7).all())
    del tensor
    assert used(heap) == 0


def test_a_budget_that_is_full_refuses(heap):
    first = heap.allocate(MIB // 2)
    assert heap.allocate(MIB // 2) is None
    first.free()
    heap.allocate(MIB // 2).free()


def test_a_block_is_given_up_once(heap):
    block = heap.allocate(4096)
    with pytest.raises(ConfigError, match="do not lie"):
        block.lend(1, 4096)
    array = block.lend(0, 4096)
    for again in (block.free, lambda: block.lend(0, 1)):
        with pytest.raises(ClosedError, match=r"was already (lent|free)"):
            again()
    del array
    assert used(heap) == 0
    with pytest.raises(ConfigError, match="0 bytes"):
        heap.allocate(0)


def test_memory_that_there_is_not_is_not_charged():
    heap = Heap(account=Account(1 << 60, name="test"), owner="restored")
    with pytest.raises(MemoryError, match="no memory for"):
        heap.allocate(1 << 58)
    assert used(heap) == 0


def test_a_fork_leaves_the_parent_s_account_alone(heap):
    block = heap.allocate(4096)
    array = block.lend(0, 4096)
    child = os.fork()
    if not child:
        del array
        gone = heap.touched_bytes == heap.charge_bytes(4096)
        try:
            heap.allocate(1)
        except ClosedError:
            os._exit(0 if gone else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert array.nbytes == 4096


@pytest.mark.parametrize(
    ("choice", "sizes", "expected"),
    [
        ("auto", (), False),
        ("auto", ("4294967296",), False),
        ("auto", ("4294967296", "1048576"), False),
        ("auto", ("4294967296", "much"), False),
        ("auto", ("4294967296", "17179869184"), True),
        ("arena", ("4294967296", "17179869184"), False),
        ("heap", (), True),
    ],
)
def test_it_is_used_where_the_c_library_keeps_what_is_freed(monkeypatch, choice, sizes, expected):
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", choice)
    for name in KEEPS:
        monkeypatch.delenv(name, raising=False)
    for name, size in zip(KEEPS, sizes, strict=False):
        monkeypatch.setenv(name, size)
    assert heap_is_better() is expected


@pytest.mark.parametrize("codec", ["auto", "zero-value"])
def test_the_same_bits_come_back_and_nothing_idle_is_held(session_for, monkeypatch, codec):
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", "heap")
    torch.manual_seed(0)
    network = zoo.build("resnet18", image_size=96)
    batch = zoo.example_batch(network, 8)

    def gradients():
        network.zero_grad()
        network(batch.inputs, batch.targets).backward()
        return [each.grad.clone() for each in network.parameters()]

    expected = gradients()
    with session_for(network, device_memory="24MiB", codec=codec) as session:
        assert isinstance(memory(session), Heap)
        for _ in range(3):
            assert all(map(same_bits, gradients(), expected))
            assert_within_budget(session)
            assert memory(session).used_bytes == 0
        if codec == "auto":
            assert_nothing_held(session)
    assert session.budget.used_bytes == 0


def memory(session):
    mover = session._stores.mover
    return getattr(mover, "inner", mover).memory


def test_otherwise_it_is_an_arena(session_for, monkeypatch):
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", "arena")
    with session_for(device_memory="8MiB") as session:
        assert isinstance(memory(session), Arena)


def test_what_was_restored_outlives_the_session(session_for, monkeypatch):
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", "heap")
    x = torch.ones(MIB, requires_grad=True)
    with session_for(device_memory="64MiB") as session:
        loss = x.exp().sum()
        loss.backward(retain_graph=True)
        kept = x.grad
    assert session.budget.used_bytes <= 64 * MIB
    assert np.allclose(kept.numpy(), np.e)
