"""The host tier: fragmentation, budgets, threads."""

import gc
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from tier_builders import host

from penstock.core.errors import ClosedError, ConfigError, NoSpaceError
from penstock.core.units import KIB, MIB
from penstock.observe.recorder import Recorder
from penstock.store import HostTier
from penstock.store.account import Account
from penstock.store.arena import Arena
from penstock.store.host import MemoryPlace, MemoryTier
from penstock.testing.engines import aligned
from penstock.testing.tier_machine import assert_equal, read, wait_until, write


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


class TestHostTier:
    @pytest.mark.parametrize("capacity", [4095, MIB + 1])
    def test_capacity_must_fit_the_arena(self, capacity):
        arena = Arena(MIB)
        with pytest.raises(ConfigError, match=f"capacity of {capacity} bytes"):
            HostTier(arena, capacity_bytes=capacity, recorder=Recorder())
        arena.close()

    def test_memory_is_not_freed_by_what_is_moved_to_the_tier(self, stack):
        """Saved tensors that give way are written to this tier, which must not ask them again."""
        process = Account(4 * MIB, name="memory")
        saved = process.child("saved tensors")
        assert saved.try_take(4 * MIB, "saved")
        asked = []
        saved.yield_by(asked.append)
        arena = Arena(2 * MIB, account=process.child("host tier"))
        stack.callback(arena.close)
        tier = HostTier(arena, capacity_bytes=2 * MIB, recorder=Recorder())
        stack.callback(tier.close)
        with pytest.raises(NoSpaceError, match="by the memory budget"):
            write(tier, aligned(MIB, seed=1), 0, MIB)
        assert asked == []

    def test_an_arena_shared_with_others(self, stack):
        """What they hold is missing; what lies between them is used piece by piece."""
        tier = host(stack, 2 * MIB)
        others = [tier.arena.allocate(64 * KIB) for _ in range(32)]
        for block in others[::2]:
            block.free()
        source, target = aligned(MIB, seed=1), aligned(MIB)
        ticket = write(tier, source, 0, 600_000)
        ticket.written.wait(20)
        assert len(ticket.place.blocks) >= 600_000 // (64 * KIB)
        read(tier, ticket, target).wait(20)
        assert_equal(target, ticket, source[:600_000])
        used = tier.arena.used_bytes
        with pytest.raises(NoSpaceError, match="in its arena"):
            write(tier, source, 0, MIB)
        assert tier.arena.used_bytes == used
        assert tier.taken_bytes == ticket.place.nbytes
        tier.discard(ticket)
        assert tier.taken_bytes == 0
        assert tier.arena.used_bytes == 16 * 64 * KIB

    def test_a_memory_budget_that_is_used_up(self):
        budget = Account(8 * MIB, name="host")
        arena = Arena(8 * MIB, account=budget)
        tier = HostTier(arena, capacity_bytes=8 * MIB, recorder=Recorder())
        assert budget.try_take(5 * MIB, "somebody")
        source = aligned(4 * MIB, seed=2)
        with pytest.raises(NoSpaceError, match="memory budget"):
            write(tier, source, 0, 4 * MIB)
        assert tier.taken_bytes == tier.held_bytes == arena.used_bytes == 0
        ticket = write(tier, source, 0, 2 * MIB)
        ticket.written.wait(20)
        assert budget.used_bytes <= budget.limit_bytes
        tier.close()
        arena.close()
        assert budget.used_by("arena") == 0

    def test_close_gives_the_blocks_back(self, stack):
        tier = host(stack)
        arena = tier.arena
        tickets = [write(tier, aligned(5000, seed=3), 0, 5000) for _ in range(5)]
        tier.close()
        assert arena.used_bytes == 0
        for ticket in tickets:
            tier.discard(ticket)
            tier._discard(ticket.place)  # as a discard does that met the close
        assert arena.used_bytes == 0
        assert tier.taken_bytes == 0

    def test_an_arena_that_was_closed(self, stack):
        tier = host(stack)
        tier.arena.close()
        with pytest.raises(ClosedError):
            write(tier, aligned(100), 0, 100)
        assert tier.taken_bytes == 0

    def test_its_thread_comes_late_and_goes_early(self, stack):
        arena = Arena(MIB)
        tier = HostTier(arena, capacity_bytes=MIB, recorder=Recorder(), name="late")
        assert not threads("penstock-late-0")
        write(tier, aligned(100), 0, 100).written.wait(20)
        assert len(threads("penstock-late-0")) == 1
        tier.close()
        assert not threads("penstock-late-0")

    def test_dropped_without_close(self):
        tier = HostTier(Arena(MIB), capacity_bytes=MIB, recorder=Recorder(), name="dropped")
        write(tier, aligned(100), 0, 100).written.wait(20)
        assert threads("penstock-dropped-0")
        del tier
        gc.collect()
        wait_until(lambda: not threads("penstock-dropped-0"))


def test_memory_of_the_caller_is_overwritten_in_place_and_read_as_far_as_it_goes():
    tier = MemoryTier("mine")
    place, other = MemoryPlace(np.zeros(5000, np.uint8)), np.arange(5000).astype(np.uint8)
    ticket = tier.write(
        other.ctypes.data, 5000, keep_alive=other, label="a", at=place, is_private=True
    )
    ticket.written.wait()
    assert (place.memory == other).all()
    whole = tier.adopt(
        place, 8192, label="b", checksum=None
    )  # in whole pages, as those in files are
    target = np.full(8192, 7, np.uint8)
    tier.read(whole, target.ctypes.data, keep_alive=target).wait()
    assert (target[:5000] == other).all()
    assert (target[5000:] == 7).all()
    for each in (ticket, whole):
        tier.discard(each)
    assert (place.memory == other).all()
    tier.close()
    with pytest.raises(ClosedError):
        tier.read(ticket, target.ctypes.data, keep_alive=target)
