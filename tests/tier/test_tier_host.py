"""The host tier and its copier: order, fragmentation, budgets, threads."""

import gc
import threading
from concurrent.futures import CancelledError
from contextlib import ExitStack

import pytest
from tier_builders import host, outcome

from penstock.core.budget import Budget
from penstock.core.errors import ClosedError, ConfigError, NoSpaceError
from penstock.core.units import KIB, MIB
from penstock.io.arena import Arena
from penstock.io.engine import Priority
from penstock.observe.recorder import Recorder
from penstock.testing.engines import aligned
from penstock.testing.tier_machine import assert_equal, read, wait_until, write
from penstock.tier import HostTier
from penstock.tier.copier import Copier, CopyRange


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
        budget = Budget(8 * MIB, name="host")
        arena = Arena(8 * MIB, budget=budget)
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


class Ends:
    """In which order transfers end; the first one can be held up as it ends."""

    def __init__(self):
        self.order = []
        self.gate = threading.Event()
        self.at_gate = threading.Event()

    def note(self, name, transfer):
        transfer.add_done_callback(lambda _: self.order.append(name))
        return transfer

    def hold(self, transfer):
        def wait(_):
            self.at_gate.set()
            assert self.gate.wait(20)

        transfer.add_done_callback(wait)
        assert self.at_gate.wait(20)


class TestCopier:
    @pytest.fixture
    def copier(self, monkeypatch):
        monkeypatch.setenv("PENSTOCK_IO_PIECE", "4KiB")
        copier = Copier("copier")
        yield copier
        copier.close()

    @pytest.fixture
    def buffers(self):
        return aligned(64 * KIB, seed=4), aligned(64 * KIB)

    def copy(self, copier, buffers, nbytes=64 * KIB, start=0, priority=Priority.PREFETCH):
        source, target = buffers
        ranges = [CopyRange(target.ctypes.data + start, source.ctypes.data + start, nbytes)]
        return copier.submit(ranges, buffers, priority)

    def test_pieces_make_the_whole(self, copier, buffers):
        assert self.copy(copier, buffers, 50_001, 7).wait(20) == 50_001
        source, target = buffers
        assert (target[7:50_008] == source[7:50_008]).all()
        assert not target[:7].any()
        assert not target[50_008:].any()

    def test_priority_then_age(self, copier, buffers):
        ends = Ends()
        self_held = aligned(8), aligned(8)
        first = self.copy(copier, self_held, 8)
        ends.hold_next = None
        ends.hold(first)
        for name, priority in (
            ("write", Priority.WRITE_BEHIND),
            ("prefetch 1", Priority.PREFETCH),
            ("prefetch 2", Priority.PREFETCH),
            ("demand", Priority.DEMAND),
        ):
            last = ends.note(name, self.copy(copier, buffers, priority=priority))
            if name == "write":
                write = last
        ends.gate.set()
        write.wait(20)
        assert ends.order == ["demand", "prefetch 1", "prefetch 2", "write"]

    def test_promoted_and_cancelled(self, copier, buffers):
        ends = Ends()
        ends.hold(self.copy(copier, (aligned(8), aligned(8)), 8))
        one = ends.note("one", self.copy(copier, buffers, priority=Priority.WRITE_BEHIND))
        two = ends.note("two", self.copy(copier, buffers, priority=Priority.WRITE_BEHIND))
        three = ends.note("three", self.copy(copier, buffers))
        two.promote(Priority.DEMAND)
        two.promote(Priority.WRITE_BEHIND)  # a lower one is ignored
        assert three.cancel()
        assert not three.cancel()
        ends.gate.set()
        one.wait(20)
        two.wait(20)
        assert isinstance(outcome(three), CancelledError)
        assert ends.order == ["three", "two", "one"]
        assert not one.cancel()

    def test_a_demand_waits_for_one_piece(self, copier, buffers):
        """Each piece is looked at before the next: what has begun is overtaken, too."""
        source, target = buffers
        ends = Ends()
        ends.hold(self.copy(copier, (aligned(8), aligned(8)), 8))
        long = ends.note("long", self.copy(copier, buffers, priority=Priority.WRITE_BEHIND))
        demand = None

        class Interrupting:
            """Stands for the first piece of the long copy: its end submits a demand."""

        del Interrupting
        demand = ends.note("demand", self.copy(copier, buffers, 4096, priority=Priority.DEMAND))
        ends.gate.set()
        long.wait(20)
        demand.wait(20)
        assert ends.order == ["demand", "long"]
        assert (source == target).all()

    def test_closed(self, copier, buffers):
        transfer = self.copy(copier, buffers)
        copier.close()
        assert transfer.done
        with pytest.raises(ClosedError, match="copier is closed"):
            self.copy(copier, buffers)
