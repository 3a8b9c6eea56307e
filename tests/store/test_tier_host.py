"""The host tier and its copier: order, fragmentation, budgets, threads."""

import ctypes
import gc
import threading
from concurrent.futures import CancelledError
from contextlib import ExitStack

import pytest
from tier_builders import host, outcome

from penstock.core.errors import ClosedError, ConfigError, NoSpaceError
from penstock.core.units import KIB, MIB
from penstock.io.engine import Priority
from penstock.observe.recorder import Recorder
from penstock.store import HostTier
from penstock.store.account import Account
from penstock.store.arena import Arena
from penstock.store.copier import Copier, CopyRange
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
        assert not threads("penstock-late")
        write(tier, aligned(100), 0, 100).written.wait(20)
        assert len(threads("penstock-late")) == 1
        tier.close()
        assert not threads("penstock-late")

    def test_dropped_without_close(self):
        tier = HostTier(Arena(MIB), capacity_bytes=MIB, recorder=Recorder(), name="dropped")
        write(tier, aligned(100), 0, 100).written.wait(20)
        assert threads("penstock-dropped")
        del tier
        gc.collect()
        wait_until(lambda: not threads("penstock-dropped"))


class Gate:
    """Stands in for ``memmove``: pieces wait until they are let through. Remembers targets."""

    def __init__(self):
        self.targets = []
        self.arrived = threading.Semaphore(0)
        self.tokens = threading.Semaphore(0)

    def memmove(self, target, source, nbytes):
        self.targets.append(target)
        self.arrived.release()
        assert self.tokens.acquire(timeout=20)
        ctypes.memmove(target, source, nbytes)

    def wait_for_piece(self):
        assert self.arrived.acquire(timeout=20)


class TestCopier:
    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch):
        monkeypatch.setenv("PENSTOCK_IO_PIECE", "4KiB")

    @pytest.fixture
    def gate(self, monkeypatch):
        gate = Gate()
        monkeypatch.setattr("penstock.store.copier.ctypes", gate)
        yield gate
        gate.tokens.release(1000)

    @pytest.fixture
    def copier(self):
        copier = Copier("copier")
        yield copier
        copier.close()

    def copy(self, copier, nbytes, priority=Priority.PREFETCH):
        source, target = aligned(nbytes, seed=4), aligned(nbytes)
        ranges = [CopyRange(target.ctypes.data, source.ctypes.data, nbytes)]
        return copier.submit(ranges, (source, target), priority), target.ctypes.data

    def test_pieces_make_the_whole(self, copier):
        source, target = aligned(64 * KIB, seed=4), aligned(64 * KIB)
        to, of = target.ctypes.data, source.ctypes.data
        ranges = [CopyRange(to + 7, of + 7, 20_001), CopyRange(to + 30_000, of + 1, 5)]
        assert copier.submit(ranges, (source, target), Priority.DEMAND).wait(20) == 20_006
        expected = aligned(64 * KIB)
        expected[7:20_008] = source[7:20_008]
        expected[30_000:30_005] = source[1:6]
        assert (target == expected).all()

    def test_priority_then_age(self, gate, copier):
        _, held = self.copy(copier, 8)
        gate.wait_for_piece()
        priorities = (Priority.WRITE_BEHIND, Priority.PREFETCH, Priority.PREFETCH, Priority.DEMAND)
        copies = [self.copy(copier, 8, priority) for priority in priorities]
        gate.tokens.release(1000)
        for transfer, _ in copies:
            transfer.wait(20)
        assert gate.targets == [held, *(copies[index][1] for index in (3, 1, 2, 0))]

    def test_a_demand_waits_for_one_piece(self, gate, copier):
        """What has begun is overtaken between two pieces, and goes on where it was."""
        long, start = self.copy(copier, 3 * 4096, Priority.WRITE_BEHIND)
        gate.wait_for_piece()
        assert not long.cancel()
        demand, other = self.copy(copier, 4096, Priority.DEMAND)
        gate.tokens.release(2)
        demand.wait(20)
        gate.wait_for_piece()
        gate.wait_for_piece()
        assert not long.done
        gate.tokens.release(1000)
        long.wait(20)
        assert gate.targets == [start, other, start + 4096, start + 8192]

    def test_promoted_and_cancelled(self, gate, copier):
        _, held = self.copy(copier, 8)
        gate.wait_for_piece()
        one, first = self.copy(copier, 8, Priority.WRITE_BEHIND)
        two, second = self.copy(copier, 8, Priority.WRITE_BEHIND)
        three, _ = self.copy(copier, 8)
        two.promote(Priority.DEMAND)
        two.promote(Priority.WRITE_BEHIND)  # a lower one is ignored
        assert three.cancel()
        assert not three.cancel()
        gate.tokens.release(1000)
        one.wait(20)
        two.wait(20)
        assert isinstance(outcome(three), CancelledError)
        assert gate.targets == [held, second, first]
        assert not one.cancel()

    def test_closed(self, copier):
        transfer, _ = self.copy(copier, 64 * KIB)
        copier.close()
        assert transfer.done
        assert transfer.error is None
        with pytest.raises(ClosedError, match="copier is closed"):
            self.copy(copier, 8)
