"""Conformance suite of tiers. A subclass defines how to build one.

::

    class TestMine(TierTests):
        def build(self, stack, directory, capacity_bytes):
            engine = ThreadEngine()
            stack.callback(engine.close)
            return MyTier(directory, capacity_bytes, engine, Recorder())

        def corrupt(self, tier, ticket):
            ...  # change a byte of this ticket's data

``test_any_order`` lets hypothesis choose operations and compares the tier with a dict of bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from penstock.core.errors import ChecksumError, ClosedError, ConfigError, NoSpaceError
from penstock.core.units import KIB, MIB
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Stage
from penstock.store.base import Ticket, Tier
from penstock.store.wrappers import FaultyTier
from penstock.testing.engines import aligned, run_in_fork
from penstock.testing.tier_machine import (
    PATIENCE_S,
    TierMachine,
    assert_equal,
    check_all_room,
    fill,
    read,
    settled,
    write,
)


class TrackedOwner:
    """Object for ``keep_alive`` whose deletion can be observed."""


class TierTests:
    """Roundtrips at every skew, room, discarding and closing at bad moments, threads, forks."""

    capacity_bytes: ClassVar[int] = 2 * MIB
    """Capacity of the tiers, a multiple of ``unit_bytes``."""
    unit_bytes: ClassVar[int] = 4 * KIB
    """Unit to which the space of a ticket's window is rounded up."""
    long_bytes: ClassVar[int] = 300_001
    """Size that the tier has to split, if it ever does; at most a quarter of the capacity."""
    examples: ClassVar[int] = 40
    """Number of examples of hypothesis."""

    def build(self, stack: ExitStack, directory: Path, capacity_bytes: int) -> Tier:
        """Build a tier, and register its resources with ``stack``. To be overridden."""
        raise NotImplementedError

    def corrupt(self, tier: Tier, ticket: Ticket) -> None:
        """Change a byte of the data that the tier holds for a ticket. To be overridden."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A tier of ``capacity_bytes``."""
        with ExitStack() as stack:
            tier = self.build(stack, tmp_path, self.capacity_bytes)
            stack.callback(tier.close)
            yield tier

    # -- roundtrips ---------------------------------------------------------------------------

    def test_the_spec_says_what_it_is(self, tier: Tier) -> None:
        """Capabilities are data."""
        spec = tier.spec
        assert spec.name
        assert spec.where
        assert spec.capacity_bytes == self.capacity_bytes
        assert 1 <= spec.granule_bytes <= 4096
        assert spec.granule_bytes.bit_count() == 1

    def test_every_skew(self, tier: Tier) -> None:
        """Data may begin and end anywhere; the window never leaves the pages they lie in."""
        granule = tier.spec.granule_bytes
        source, target = aligned(4 * 4096, seed=1), aligned(4 * 4096)
        lengths = (1, granule, granule + 1, 4096 + 7)
        for skew in range(min(granule, 512)):
            for nbytes in lengths if skew % 37 == 0 else (lengths[skew % 4],):
                ticket = write(tier, source, skew, nbytes)
                ticket.written.wait(PATIENCE_S)
                assert ticket.window.skew == skew % granule
                assert ticket.window.nbytes < nbytes + 2 * granule
                assert source.ctypes.data <= ticket.window.address
                target[:] = 0
                read(tier, ticket, target).wait(PATIENCE_S)
                assert_equal(target, ticket, source[skew : skew + nbytes])
                tier.discard(ticket)
        assert tier.held_bytes == 0

    def test_long_data(self, tier: Tier) -> None:
        """Several stripes, at several skews, and read twice."""
        source, target = aligned(self.long_bytes + 8192, seed=2), aligned(self.long_bytes + 8192)
        for skew in (0, 1, 511, 512, 4095):
            ticket = write(tier, source, skew, self.long_bytes)
            assert ticket.written.wait(PATIENCE_S) == ticket.window.nbytes
            for _ in range(2):
                target[:] = 0
                read(tier, ticket, target).wait(PATIENCE_S)
                assert_equal(target, ticket, source[skew : skew + self.long_bytes])
            tier.discard(ticket)

    def test_many_tickets(self, tier: Tier) -> None:
        """Simultaneous transfers are read in another order than written."""
        random = np.random.default_rng(3)
        source = aligned(64 * KIB, seed=3)
        tickets = []
        for _ in range(min(100, self.capacity_bytes // (20 * KIB))):
            start, end = sorted(int(each) for each in random.integers(0, 16 * KIB, 2))
            tickets.append((write(tier, source, start, end - start + 1), start, end + 1))
        for ticket, _, _ in tickets:
            ticket.written.wait(PATIENCE_S)
        targets = [aligned(ticket.window.nbytes) for ticket, _, _ in tickets]
        order = random.permutation(len(tickets))
        reads = [read(tier, tickets[index][0], targets[index]) for index in order]
        for transfer in reads:
            transfer.wait(PATIENCE_S)
        for (ticket, start, end), target in zip(tickets, targets, strict=True):
            assert_equal(target, ticket, source[start:end])
            tier.discard(ticket)
        assert tier.held_bytes == 0

    def test_the_recorder_hears_of_it(self, tier: Tier) -> None:
        """Spans have the bytes that were really moved, which wear an SSD."""
        source = aligned(8192, seed=4)
        ticket = write(tier, source, 3, 5000)
        ticket.written.wait(PATIENCE_S)
        read(tier, ticket, aligned(8192)).wait(PATIENCE_S)
        tier.discard(ticket)
        flows = tier.recorder.snapshot().flows
        for stage in (Stage.WRITE, Stage.READ):
            assert flows[stage, tier.spec.name].nbytes == ticket.window.nbytes

    def test_sources_and_targets_are_let_go(self, tier: Tier) -> None:
        """The tier holds ``keep_alive`` until the transfer is settled, and not a moment longer."""
        nbytes = self.long_bytes
        source, target = aligned(nbytes, seed=5), aligned(nbytes + 4096)
        seen: list[object] = []

        def watch(transfer: Transfer, death: weakref.ref[TrackedOwner]) -> None:
            transfer.add_done_callback(lambda _: seen.append(death()))
            transfer.wait(PATIENCE_S)

        owner = TrackedOwner()
        ticket = tier.write(source.ctypes.data, nbytes, keep_alive=owner, label="x")
        death = weakref.ref(owner)
        del owner
        watch(ticket.written, death)
        owner = TrackedOwner()
        transfer = tier.read(ticket, target.ctypes.data, keep_alive=owner)
        death = weakref.ref(owner)
        del owner
        watch(transfer, death)
        assert seen == [None, None]

    # -- room -------------------------------------------------------------------------------------

    def test_room_is_used_again(self, tier: Tier) -> None:
        """A tier can repeatedly be filled to the last unit: nothing leaks."""
        piece = 8 * self.unit_bytes
        source = aligned(piece, seed=6)
        for _ in range(6):
            tickets = fill(tier, source, piece)
            assert len(tickets) == self.capacity_bytes // piece
            assert tier.held_bytes == len(tickets) * piece
            with pytest.raises(NoSpaceError):
                write(tier, source, 0, piece)
            for ticket in tickets:
                tier.discard(ticket)
            assert tier.held_bytes == 0

    def test_scattered_room_suffices(self, tier: Tier) -> None:
        """Free space suffices even if it is fragmented."""
        piece = 4 * self.unit_bytes
        small, big = aligned(piece, seed=7), aligned(self.capacity_bytes // 2, seed=8)
        tickets = fill(tier, small, piece)
        for ticket in tickets[::2]:
            tier.discard(ticket)
        nbytes = len(tickets[::2]) * piece
        ticket = write(tier, big, 0, nbytes)
        ticket.written.wait(PATIENCE_S)
        with pytest.raises(NoSpaceError):
            write(tier, small, 0, 1)
        target = aligned(nbytes)
        read(tier, ticket, target).wait(PATIENCE_S)
        assert_equal(target, ticket, big[:nbytes])
        for other in tickets[1::2]:
            read(tier, other, target).wait(PATIENCE_S)
            assert_equal(target, other, small)

    def test_no_space_says_so_and_costs_nothing(self, tier: Tier) -> None:
        """The error is raised at once; the remaining space stays usable."""
        source = aligned(self.capacity_bytes + 4096, seed=9)
        for _ in range(3):
            with pytest.raises(NoSpaceError) as caught:
                write(tier, source, 0, self.capacity_bytes + 1)
            assert "capacity" in str(caught.value)
            assert tier.held_bytes == 0
        ticket = write(tier, source, 0, self.capacity_bytes)
        ticket.written.wait(PATIENCE_S)

    # -- discarding at bad moments ------------------------------------------------------------

    def test_discard_during_write(self, tier: Tier) -> None:
        """The write ends, begun or not, the source is released, and the space is free."""
        source = aligned(self.long_bytes, seed=10)
        before = source.copy()
        for _ in range(20):
            ticket = write(tier, source, 0, self.long_bytes)
            tier.discard(ticket)
            tier.discard(ticket)
            settled(ticket.written)
        assert tier.held_bytes == 0
        assert (source == before).all()
        check_all_room(tier)

    def test_discard_during_read(self, tier: Tier) -> None:
        """The read still returns the data, even if another write needs the space."""
        source, target = aligned(self.long_bytes, seed=11), aligned(self.long_bytes + 4096)
        other = aligned(self.long_bytes, seed=12)
        for _ in range(10):
            ticket = write(tier, source, 0, self.long_bytes)
            ticket.written.wait(PATIENCE_S)
            target[:] = 0
            transfer = read(tier, ticket, target)
            tier.discard(ticket)
            overwriting = write(tier, other, 0, self.long_bytes)
            transfer.wait(PATIENCE_S)
            assert_equal(target, ticket, source)
            tier.discard(overwriting)
            settled(overwriting.written)
        assert tier.held_bytes == 0
        check_all_room(tier)

    def test_cancelled_writes(self, tier: Tier) -> None:
        """A cancelled write is settled as such, and its ticket holds space until discarded."""
        source = aligned(self.long_bytes, seed=13)
        tickets = [write(tier, source, 0, self.long_bytes // 4) for _ in range(12)]
        for ticket in reversed(tickets):
            if ticket.written.cancel():
                assert isinstance(ticket.written.error, CancelledError)
                with pytest.raises(ConfigError, match="writing it failed"):
                    read(tier, ticket, source)
            else:
                ticket.written.wait(PATIENCE_S)
        assert tier.held_bytes == sum(ticket.window.nbytes for ticket in tickets)
        for ticket in tickets:
            tier.discard(ticket)
        check_all_room(tier)

    def test_promoted_transfers(self, tier: Tier) -> None:
        """Promotion changes the order and nothing else."""
        source, target = aligned(self.long_bytes, seed=14), aligned(self.long_bytes + 4096)
        ticket = write(tier, source, 0, self.long_bytes)
        ticket.written.promote(Priority.DEMAND)
        ticket.written.wait(PATIENCE_S)
        ticket.written.promote(Priority.DEMAND)
        transfer = read(tier, ticket, target)
        transfer.promote(Priority.DEMAND)
        transfer.wait(PATIENCE_S)
        assert_equal(target, ticket, source)

    # -- misuse and damage --------------------------------------------------------------------

    def test_misuse_is_refused(self, tier: Tier) -> None:
        """Empty data, and tickets that cannot be read or no longer, are refused."""
        source = aligned(8192, seed=15)
        with pytest.raises(ConfigError, match="0 bytes"):
            write(tier, source, 0, 0)
        ticket = write(tier, source, 0, 100)
        ticket.written.wait(PATIENCE_S)
        if tier.spec.granule_bytes > 1:
            with pytest.raises(ConfigError, match="multiple of"):
                tier.read(ticket, source.ctypes.data + 1, keep_alive=source)
        tier.discard(ticket)
        with pytest.raises(ConfigError, match="discarded"):
            read(tier, ticket, source)
        assert tier.held_bytes == 0

    def test_reading_what_is_still_written_is_refused(self, tmp_path: Path) -> None:
        """The data are still in memory, so no read is needed."""
        source = aligned(8192, seed=16)
        with ExitStack() as stack:
            inner = self.build(stack, tmp_path, self.capacity_bytes)
            slow = FaultyTier(inner, fail_at={"write": 0}, mode="delay", delay_s=0.3)
            stack.callback(slow.close)
            ticket = write(slow, source, 0, 100)
            with pytest.raises(ConfigError, match="before it was written"):
                read(slow, ticket, source)

    def test_damage_is_found(self, tier: Tier) -> None:
        """One wrong byte is an error, not a wrong gradient; the next ticket is fine."""
        source, target = aligned(self.long_bytes, seed=17), aligned(self.long_bytes + 8192)
        for skew, nbytes in ((0, 1), (5, 5000), (7, self.long_bytes - 7)):
            bad, good = write(tier, source, skew, nbytes), write(tier, source, skew, nbytes)
            bad.written.wait(PATIENCE_S)
            good.written.wait(PATIENCE_S)
            self.corrupt(tier, bad)
            with pytest.raises(ChecksumError, match="a label"):
                read(tier, bad, target).wait(PATIENCE_S)
            read(tier, good, target).wait(PATIENCE_S)
            tier.discard(bad)
            tier.discard(good)

    # -- closing, threads, processes --------------------------------------------------------------

    def test_close_with_work_in_flight(self, tmp_path: Path) -> None:
        """Closing settles every transfer, as done or as cancelled."""
        source, target = aligned(self.long_bytes, seed=18), aligned(self.long_bytes)
        for _ in range(5):
            with ExitStack() as stack:
                tier = self.build(stack, tmp_path, self.capacity_bytes)
                first = write(tier, source, 0, 5000)
                first.written.wait(PATIENCE_S)
                transfers = [read(tier, first, target)]
                tickets = [write(tier, source, 0, self.long_bytes // 8) for _ in range(10)]
                transfers += [ticket.written for ticket in tickets]
                tier.close()
                for transfer in transfers:
                    assert transfer.done
                    assert transfer.error is None or isinstance(transfer.error, CancelledError)
                tier.close()
                for ticket in (first, *tickets):
                    tier.discard(ticket)
                with pytest.raises(ClosedError, match="closed"):
                    write(tier, source, 0, 1)
                with pytest.raises(ClosedError, match="closed"):
                    read(tier, first, target)

    def test_threads(self, tier: Tier) -> None:
        """Several threads, each with its own tickets, may use a tier in any order."""
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                _random_walk(tier, seed, steps=40, most_bytes=self.capacity_bytes // 40)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not failures
        assert tier.held_bytes == 0
        check_all_room(tier)

    def test_a_forked_child_is_refused(self, tier: Tier) -> None:
        """A child cannot use the tier, nor harm it, nor hang in it."""
        source, target = aligned(8192, seed=19), aligned(8192)
        ticket = write(tier, source, 0, 8192)
        ticket.written.wait(PATIENCE_S)

        def child() -> None:
            with pytest.raises(ClosedError, match="fork"):
                write(tier, source, 0, 8192)
            with pytest.raises(ClosedError, match="fork"):
                read(tier, ticket, target)
            tier.discard(ticket)
            tier.close()

        run_in_fork(child)
        read(tier, ticket, target).wait(PATIENCE_S)
        assert_equal(target, ticket, source)
        tier.discard(ticket)
        check_all_room(tier)

    # -- against a dict -----------------------------------------------------------------------

    def test_any_order(self, tmp_path: Path) -> None:
        """The tier holds the same as a dict after any sequence of operations."""

        def machine() -> TierMachine:
            return TierMachine(
                lambda stack: self.build(stack, tmp_path, self.capacity_bytes),
                capacity_bytes=self.capacity_bytes,
                unit_bytes=self.unit_bytes,
            )

        run_state_machine_as_test(
            cast("type[TierMachine]", machine),  # a factory works, despite the annotation
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=30,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def _random_walk(tier: Tier, seed: int, *, steps: int, most_bytes: int) -> None:
    """Write, read back and discard at random, and check the data."""
    random = np.random.default_rng(seed)
    source, target = aligned(most_bytes + 4096, seed=seed), aligned(most_bytes + 8192)
    tickets: list[tuple[Ticket, bytes]] = []
    for _ in range(steps):
        start, nbytes = int(random.integers(0, 4096)), int(random.integers(1, most_bytes))
        ticket = write(tier, source, start, nbytes)
        tickets.append((ticket, source[start : start + nbytes].tobytes()))
        if len(tickets) > 5:
            ticket, expected = tickets.pop(int(random.integers(0, 6)))
            if random.random() < 0.7:
                ticket.written.wait(PATIENCE_S)
                read(tier, ticket, target).wait(PATIENCE_S)
                assert_equal(target, ticket, expected)
            tier.discard(ticket)
    for ticket, _ in tickets:
        tier.discard(ticket)
        settled(ticket.written)
