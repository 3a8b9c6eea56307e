"""State machine for hypothesis, which compares a tier with a dict."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from typing import Any, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.errors import ConfigError, NoSpaceError
from penstock.core.units import MIB, round_up
from penstock.io.engine import Transfer
from penstock.store.base import Ticket, Tier
from penstock.testing.engines import Bytes, aligned

PATIENCE_S: Final = 60.0
"""Time limit of a single transfer on a busy machine, in seconds."""


class TierMachine(RuleBasedStateMachine):
    """A tier, and a dict with its expected content."""

    def __init__(
        self, build: Callable[[ExitStack], Tier], *, capacity_bytes: int, unit_bytes: int
    ) -> None:
        """Open an empty tier.

        Args:
            build: Function that builds an empty tier and registers its resources with the stack.
            capacity_bytes: Capacity of each tier.
            unit_bytes: Unit to which the space of a window is rounded up.
        """
        super().__init__()
        self.build = build
        self.capacity_bytes = capacity_bytes
        self.unit_bytes = unit_bytes
        self.source = aligned(1 * MIB, seed=20)
        self.stack = ExitStack()
        self.open()

    def open(self) -> None:
        """Open an empty tier."""
        self.tier = self.build(self.stack)
        self.held: dict[Ticket, bytes] = {}
        self.discarded: list[Ticket] = []
        self.reads: list[tuple[Transfer, Bytes, Ticket, bytes]] = []

    @rule(start=st.integers(0, 9000), nbytes=st.integers(1, 1 * MIB - 9000))
    def write(self, start: int, nbytes: int) -> None:
        """Write; after pending discards it may be refused only if the tier is full."""
        try:
            ticket = write(self.tier, self.source, start, nbytes)
        except NoSpaceError:
            self.quiesce()
            window = self.tier.window(self.source.ctypes.data + start, nbytes)
            taken = sum(self.room(ticket.window.nbytes) for ticket in self.held)
            if taken + self.room(window.nbytes) > self.capacity_bytes:
                return
            ticket = write(self.tier, self.source, start, nbytes)
        self.held[ticket] = self.source[start : start + nbytes].tobytes()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def read(self, which: int) -> None:
        """Begin to read, without waiting."""
        ticket = self.pick(which)
        try:
            ticket.written.wait(PATIENCE_S)
        except CancelledError:
            with pytest.raises(ConfigError, match="writing it failed"):
                read(self.tier, ticket, self.source)
            return
        target = aligned(ticket.window.nbytes)
        self.reads.append((read(self.tier, ticket, target), target, ticket, self.held[ticket]))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def discard(self, which: int) -> None:
        """Discard a ticket, also during a transfer."""
        ticket = self.pick(which)
        del self.held[ticket]
        self.tier.discard(ticket)
        self.discarded.append(ticket)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        """Cancel a write, if that is still possible."""
        self.pick(which).written.cancel()

    @rule()
    def quiesce(self) -> None:
        """Wait for everything, and check the data and the account."""
        for ticket in (*self.held, *self.discarded):
            settled(ticket.written)
        for transfer, target, ticket, expected in self.reads:
            transfer.wait(PATIENCE_S)
            assert_equal(target, ticket, expected)
        self.discarded.clear()
        self.reads.clear()
        assert self.tier.held_bytes == sum(ticket.window.nbytes for ticket in self.held)

    @rule()
    def reopen(self) -> None:
        """Close the tier, also during transfers, and open a new one."""
        self.tier.close()
        for transfer, *_ in self.reads:
            assert transfer.done
        for ticket in self.held:
            self.tier.discard(ticket)
        self.open()

    @invariant()
    def never_over_capacity(self) -> None:
        """Check that the capacity is never exceeded."""
        assert 0 <= self.tier.held_bytes <= self.capacity_bytes

    def teardown(self) -> None:
        """Close the tier, and check that nothing is left."""
        try:
            self.quiesce()
            for ticket in self.held:
                self.tier.discard(ticket)
            check_all_room(self.tier)
        finally:
            self.tier.close()
            self.stack.close()

    def pick(self, which: int) -> Ticket:
        """Choose one of the held tickets."""
        return list(self.held)[which % len(self.held)]

    def room(self, nbytes: int) -> int:
        """Return the space that a window takes of the capacity."""
        return round_up(nbytes, self.unit_bytes)


def write(tier: Tier, source: Bytes, start: int, nbytes: int) -> Ticket:
    """Begin to write a part of ``source``."""
    return tier.write(source.ctypes.data + start, nbytes, keep_alive=source, label="a label")


def read(tier: Tier, ticket: Ticket, target: Bytes) -> Transfer:
    """Begin to read a ticket's window to the start of ``target``."""
    assert len(target) >= ticket.window.nbytes, "the target is shorter than the window"
    return tier.read(ticket, target.ctypes.data, keep_alive=target)


def fill(tier: Tier, source: Bytes, nbytes: int) -> list[Ticket]:
    """Write the same ``nbytes`` until the tier is full, and wait."""
    tickets: list[Ticket] = []
    while True:
        try:
            tickets.append(write(tier, source, 0, nbytes))
        except NoSpaceError:
            break
    for ticket in tickets:
        ticket.written.wait(PATIENCE_S)
    return tickets


def settled(transfer: Transfer) -> None:
    """Wait until a transfer has ended or was cancelled."""
    with suppress(CancelledError):
        transfer.wait(PATIENCE_S)


def assert_equal(target: Bytes, ticket: Ticket, expected: Bytes | bytes) -> None:
    """Check that the ticket's data, in ``target`` at their skew, are ``expected``."""
    skew = ticket.window.skew
    found = target[skew : skew + ticket.nbytes].tobytes()
    wanted = expected if isinstance(expected, bytes) else expected.tobytes()
    assert found == wanted, f"{ticket.nbytes} bytes at skew {skew} differ"


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until another thread has made a condition true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def check_all_room(tier: Tier) -> None:
    """Check that an empty tier can be filled to the last byte of its capacity."""
    nbytes = tier.spec.capacity_bytes
    ticket = write(tier, aligned(nbytes), 0, nbytes)
    ticket.written.wait(PATIENCE_S)
    tier.discard(ticket)
    assert tier.held_bytes == 0
