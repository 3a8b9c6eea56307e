"""A slower device: whose turn it is, when a transfer ends, and that waiting costs nothing."""

import time
import weakref
from concurrent.futures import CancelledError
from contextlib import ExitStack

import pytest
from tier_builders import host, outcome

from penstock.core.errors import ConfigError
from penstock.core.units import MIB
from penstock.io.engine import Priority, Transfer
from penstock.observe.clock import ManualClock
from penstock.store import FaultyTier, ThrottledTier
from penstock.store.throttled import ChannelTurn, ThrottledChannel
from penstock.testing.engines import aligned
from penstock.testing.tier_machine import assert_equal, read, write

MS = 1_000_000


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def throttled(stack, inner=None, **options):
    tier = ThrottledTier(inner or host(stack), **options)
    stack.callback(tier.close)
    return tier


def comes_true(condition):
    """Whether it does within 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def wait_until_begun(tier, op):
    """Until the turn of all that was asked for has come: a thread begins them."""
    while True:
        with tier._changed:
            if tier._channels[op].next_ns() is None:
                return
        time.sleep(0.001)


class Owner:
    pass


class TestChannel:
    """Without threads, and by the clock on the wall of the test."""

    def turn(self, order, busy_ns, priority=Priority.PREFETCH, arrived_ns=0):
        return ChannelTurn(Transfer(1), busy_ns, priority, order, arrived_ns)

    def test_one_after_the_other(self):
        channel = ThrottledChannel()
        turns = [self.turn(order, 10) for order in range(3)]
        for turn in turns:
            channel.add(turn)
        assert channel.begin(0) == [(10, turns[0])]
        assert channel.next_ns() == 10
        assert channel.begin(9) == []
        assert channel.begin(10) == [(20, turns[1])]
        assert channel.begin(20) == [(30, turns[2])]
        assert channel.next_ns() is None

    def test_who_looks_late_loses_no_time(self):
        channel = ThrottledChannel()
        turns = [self.turn(order, 10) for order in range(3)]
        for turn in turns:
            channel.add(turn)
        assert channel.begin(1000) == [(10, turns[0]), (20, turns[1]), (30, turns[2])]

    def test_idle_time_is_gone(self):
        channel = ThrottledChannel()
        channel.add(self.turn(0, 10))
        channel.begin(0)
        late = self.turn(1, 10, arrived_ns=50)
        channel.add(late)
        assert channel.begin(50) == [(60, late)]

    def test_latencies_overlap(self):
        channel = ThrottledChannel(latency_ns=100)
        turns = [self.turn(order, 10) for order in range(2)]
        for turn in turns:
            channel.add(turn)
        assert channel.begin(10) == [(110, turns[0]), (120, turns[1])]

    def test_demands_overtake_what_has_not_begun(self):
        channel = ThrottledChannel()
        begun, waiting = self.turn(0, 10), self.turn(1, 10)
        demand = self.turn(2, 10, Priority.DEMAND)
        channel.add(begun)
        channel.begin(0)
        channel.add(waiting)
        channel.add(demand)
        assert channel.begin(20) == [(20, demand), (30, waiting)]

    def test_promoted_and_withdrawn(self):
        channel = ThrottledChannel()
        turns = [self.turn(order, 10) for order in range(4)]
        for turn in turns:
            channel.add(turn)
        turns[3].priority = Priority.DEMAND
        channel.add(turns[3])
        turns[0].waiting = False
        assert [turn for _, turn in channel.begin(100)] == [turns[3], turns[1], turns[2]]
        assert channel.next_ns() is None


class TestThrottledTier:
    @pytest.mark.parametrize(
        "options",
        [
            {"write_bytes_per_s": 0, "read_bytes_per_s": 1},
            {"write_bytes_per_s": 1, "read_bytes_per_s": -1},
            {"write_bytes_per_s": 1, "read_bytes_per_s": 1, "latency_s": -0.1},
        ],
    )
    def test_bad_settings(self, stack, options):
        with pytest.raises(ConfigError, match="must be positive"):
            ThrottledTier(host(stack), **options)

    def test_bandwidth_and_latency(self, stack):
        tier = throttled(
            stack, write_bytes_per_s=10 * MIB, read_bytes_per_s=20 * MIB, latency_s=0.02
        )
        source, target = aligned(MIB, seed=1), aligned(MIB)
        start = time.perf_counter()
        tickets = [write(tier, source, 0, MIB // 2) for _ in range(3)]
        for count, ticket in enumerate(tickets, 1):
            ticket.written.wait(20)
            assert time.perf_counter() - start >= 0.05 * count + 0.02
        start = time.perf_counter()
        transfers = [read(tier, ticket, target) for ticket in tickets]
        for transfer in transfers:
            transfer.wait(20)
        seconds = time.perf_counter() - start
        assert seconds >= 3 * 0.025 + 0.02
        assert_equal(target, tickets[0], source[: MIB // 2])

    @pytest.mark.parametrize("shared", [True, False])
    def test_one_channel_or_two(self, stack, shared):
        tier = throttled(stack, write_bytes_per_s=2 * MIB, read_bytes_per_s=2 * MIB, shared=shared)
        source, target = aligned(MIB, seed=2), aligned(MIB)
        first = write(tier, source, 0, 100)
        first.written.wait(20)
        ends = []
        address = source.ctypes.data
        writing = tier.write(address, MIB, keep_alive=source, label="x", priority=Priority.DEMAND)
        writing.written.add_done_callback(lambda _: ends.append("write"))
        transfer = read(tier, first, target)
        transfer.add_done_callback(lambda _: ends.append("read"))
        transfer.wait(20)
        writing.written.wait(20)
        assert ends == (["write", "read"] if shared else ["read", "write"])

    def test_the_source_is_held_meanwhile(self, stack):
        tier = throttled(stack, write_bytes_per_s=2 * MIB, read_bytes_per_s=1)
        source = aligned(MIB, seed=3)
        owner = Owner()
        death = weakref.ref(owner)
        ticket = tier.write(source.ctypes.data, MIB, keep_alive=owner, label="x")
        del owner
        time.sleep(0.03)  # the tier inside is done long since
        assert death() is not None
        assert tier.held_bytes == MIB
        ticket.written.wait(20)
        assert death() is None

    def test_demands_overtake_prefetches(self, stack):
        tier = throttled(stack, write_bytes_per_s=10**12, read_bytes_per_s=2 * MIB)
        source = aligned(MIB, seed=4)
        ticket = write(tier, source, 0, MIB // 2)
        ticket.written.wait(20)
        order = []
        transfers = []
        for name in ("begun", "prefetch", "promoted"):
            transfer = read(tier, ticket, aligned(MIB))
            transfer.add_done_callback(lambda _, name=name: order.append(name))
            transfers.append(transfer)
            if name == "begun":
                wait_until_begun(tier, "read")
        transfers[-1].promote(Priority.DEMAND)
        for transfer in transfers:
            transfer.wait(20)
        assert order == ["begun", "promoted", "prefetch"]

    def test_what_waits_can_be_cancelled(self, stack):
        clock = ManualClock()
        inner = host(stack, 4 * MIB)
        tier = throttled(stack, inner, write_bytes_per_s=10 * MIB, read_bytes_per_s=1, clock=clock)
        source = aligned(MIB, seed=5)
        tickets = [write(tier, source, 0, MIB // 2)]  # 50 ms each
        wait_until_begun(tier, "write")
        tickets += [write(tier, source, 0, MIB // 2) for _ in range(5)]
        assert not tickets[0].written.cancel()  # its turn has come
        for ticket in tickets[1:5]:
            assert comes_true(ticket.written.cancel)  # not while the tier inside copies it
            assert isinstance(outcome(ticket.written), CancelledError)
        clock.advance(50 * MS)
        assert outcome(tickets[0].written) is None
        clock.advance(50 * MS)
        assert outcome(tickets[5].written) is None  # it moved up
        for ticket in tickets:
            tier.discard(ticket)
        assert tier.held_bytes == 0

    def test_promotion_reaches_the_tier_inside(self, stack):
        tier = throttled(stack, write_bytes_per_s=10**9, read_bytes_per_s=10**9)
        promoted = []
        work = Transfer(1, promote=lambda _, priority: promoted.append(priority))
        tier._queue(work, "read", Priority.PREFETCH).promote(Priority.DEMAND)
        work.settle()
        assert promoted == [Priority.DEMAND]

    def test_errors_come_through(self, stack):
        failure = OSError("EIO")
        inner = FaultyTier(host(stack), fail_at={"read": 0}, error=failure)
        tier = throttled(stack, inner, write_bytes_per_s=10**9, read_bytes_per_s=10**9)
        ticket = write(tier, aligned(100), 0, 100)
        ticket.written.wait(20)
        assert outcome(read(tier, ticket, aligned(100))) is failure
        read(tier, ticket, aligned(100)).wait(20)

    def test_never_before_the_tier_inside(self, stack):
        inner = FaultyTier(host(stack), fail_at={"write": 0}, mode="delay", delay_s=0.1)
        tier = throttled(stack, inner, write_bytes_per_s=10**9, read_bytes_per_s=10**9)
        start = time.perf_counter()
        write(tier, aligned(100), 0, 100).written.wait(20)
        assert time.perf_counter() - start >= 0.1

    def test_waiting_costs_nothing(self, stack):
        tier = throttled(stack, write_bytes_per_s=MIB, read_bytes_per_s=1)
        source = aligned(MIB)
        tickets = [write(tier, source, 0, MIB // 8) for _ in range(4)]
        time.sleep(0.01)
        before = time.process_time()
        tickets[-1].written.wait(20)  # half a second
        assert time.process_time() - before < 0.05
