"""Pools: idle memory of one makes room for another in the memory that they share."""

import gc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.errors import ConfigError
from penstock.core.units import MIB
from penstock.io.mapping import PAGE_BYTES
from penstock.store.account import Account, host_account
from penstock.store.arena import Arena
from penstock.store.heap import Heap
from penstock.store.pool import free_idle
from penstock.testing.engines import run_in_fork
from tries import tries


def arena_in(memory, name):
    return Arena(16 * MIB, account=memory.child(name))


def test_idle_memory_of_another_pool_is_freed_for_a_block_that_its_account_refuses():
    memory = Account(8 * MIB, name="memory")
    first, second = arena_in(memory, "first"), arena_in(memory, "second")
    held = first.allocate(2 * MIB)
    first.allocate(4 * MIB).free()
    assert memory.used_bytes == first.touched_bytes == 6 * MIB
    block = second.allocate(4 * MIB)
    assert (first.touched_bytes, second.touched_bytes) == (4 * MIB, 4 * MIB)
    assert second.allocate(6 * MIB) is None
    assert Heap(account=memory.child("heap")).allocate(MIB) is not None
    assert first.touched_bytes == 2 * MIB
    held.free()
    block.free()


def test_idle_memory_stays_where_the_pool_s_own_limit_refuses():
    memory = Account(8 * MIB, name="memory")
    first = arena_in(memory, "first")
    first.allocate(4 * MIB).free()
    second = Arena(16 * MIB, account=memory.child("second", 2 * MIB))
    assert second.allocate(3 * MIB) is None
    assert free_idle(second.account, 3 * MIB) == 0
    assert first.touched_bytes == 4 * MIB


def test_idle_memory_of_another_account_stays():
    other = arena_in(Account(8 * MIB), "other")
    other.allocate(4 * MIB).free()
    memory = Account(2 * MIB, name="memory")
    assert arena_in(memory, "first").allocate(3 * MIB) is None
    assert other.touched_bytes == 4 * MIB


def test_pages_that_are_to_stay_resident_are_not_freed_for_others():
    memory = Account(4 * MIB, name="memory")
    pinned = Arena(4 * MIB, account=memory.child("pinned"))
    assert pinned.pretouch()
    assert arena_in(memory, "first").allocate(MIB) is None
    assert pinned.touched_bytes == 4 * MIB


def test_a_forked_child_leaves_its_parent_s_pools_alone():
    memory = host_account()
    arena = Arena(8 * MIB, owner="a parent's")
    arena.allocate(4 * MIB).free()
    assert memory.used_by("a parent's") == 4 * MIB

    def child():
        mine = host_account()
        mine.limit_bytes = 2 * MIB
        assert Arena(8 * MIB).allocate(MIB) is not None
        assert Arena(8 * MIB).allocate(3 * MIB) is None

    run_in_fork(child)
    arena.close()


def test_blocks_of_the_heap_begin_at_pages_at_most():
    heap = Heap()
    assert heap.allocate(100, alignment=64).address % PAGE_BYTES == 0
    with pytest.raises(ConfigError, match="begin at pages, not at multiples of 8192"):
        heap.allocate(100, alignment=8192)


class PoolsMachine(RuleBasedStateMachine):
    """Pools of one memory, whose limit holds whatever they do; and in the end nothing is charged."""

    def __init__(self):
        super().__init__()
        self.memory = Account(9 * MIB, name="memory")
        self.pools = [
            Arena(6 * MIB, account=self.memory.child("a")),
            Arena(12 * MIB, account=self.memory.child("b", 7 * MIB)),
            Heap(account=self.memory.child("heap")),
        ]
        self.blocks, self.arrays = [], []
        self.forced = False

    @rule(which=st.integers(0, 2), nbytes=st.integers(1, 4 * MIB), force=st.booleans())
    def allocate(self, which, nbytes, force):
        pool = self.pools[which]
        block = pool.allocate(nbytes, force=force)
        if block is None:
            assert not force or which < 2, "the heap has no capacity"
            return
        self.forced |= force
        self.blocks.append(block)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), lend=st.booleans())
    def give_up(self, data, lend):
        block = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        if lend:
            self.arrays.append(block.lend(0, block.nbytes))
        else:
            block.free()

    @precondition(lambda self: self.arrays)
    @rule(data=st.data())
    def drop(self, data):
        self.arrays.pop(data.draw(st.integers(0, len(self.arrays) - 1)))

    @rule(which=st.integers(0, 2))
    def trim(self, which):
        self.pools[which].trim()

    @invariant()
    def every_byte_is_charged(self):
        touched = [pool.touched_bytes for pool in self.pools]
        assert self.memory.used_bytes == sum(touched)
        assert [self.memory.used_by(name) for name in ("a", "b", "heap")] == touched
        held = sum(block.nbytes for block in self.blocks) + sum(a.nbytes for a in self.arrays)
        assert sum(pool.used_bytes for pool in self.pools) == held
        assert self.forced or self.memory.used_bytes <= self.memory.limit_bytes

    def teardown(self):
        for block in self.blocks:
            block.free()
        self.arrays.clear()
        gc.collect()
        for pool in self.pools:
            pool.close()
        assert self.memory.used_bytes == 0


TestPools = PoolsMachine.TestCase
TestPools.settings = settings(max_examples=tries(60), stateful_step_count=30, deadline=None)
