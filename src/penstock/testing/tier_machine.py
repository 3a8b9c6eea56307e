"""A tier beside a dict: hypothesis does what it likes to both, and they must agree."""

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
from penstock.testing.engines import Bytes, aligned
from penstock.tier.base import Ticket, Tier

PATIENCE_S: Final = 60.0
"""More than any single transfer takes on a busy machine, seconds."""


class TierMachine(RuleBasedStateMachine):
    """A tier beside a dict of what it should hold."""

    def __init__(
        self, build: Callable[[ExitStack], Tier], *, capacity_bytes: int, unit_bytes: int
    ) -> None:
        """Play with tiers.

        Args:
            build: Builds an empty tier; what it needs is closed by the stack.
            capacity_bytes: Of each tier.
            unit_bytes: What a window takes of the capacity is rounded up to this.
        """
        super().__init__()
        self.build = build
        self.capacity_bytes = capacity_bytes
        self.unit_bytes = unit_bytes
        self.source = aligned(1 * MIB, seed=20)
        self.stack = ExitStack()
        self.open()

    def open(self) -> None:
        """Begin with an empty tier."""
        self.tier = self.build(self.stack)
        self.held: dict[Ticket, bytes] = {}
        self.leaving: list[Ticket] = []
        self.reads: list[tuple[Transfer, Bytes, Ticket, bytes]] = []

    @rule(start=st.integers(0, 9000), nbytes=st.integers(1, 1 * MIB - 9000))
    def write(self, start: int, nbytes: int) -> None:
        """Write; once what was discarded is gone, it is refused only if there is no room."""
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
        """Begin to read, without waiting for it."""
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
        """Discard, whatever is in flight."""
        ticket = self.pick(which)
        del self.held[ticket]
        self.tier.discard(ticket)
        self.leaving.append(ticket)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        """Cancel a write, if it still can be."""
        self.pick(which).written.cancel()

    @rule()
    def quiesce(self) -> None:
        """Wait for everything; the data are right and the account is exact."""
        for ticket in (*self.held, *self.leaving):
            settled(ticket.written)
        for transfer, target, ticket, expected in self.reads:
            transfer.wait(PATIENCE_S)
            assert_equal(target, ticket, expected)
        self.leaving.clear()
        self.reads.clear()
        assert self.tier.held_bytes == sum(ticket.window.nbytes for ticket in self.held)

    @rule()
    def reopen(self) -> None:
        """Close with whatever is in flight, and begin anew."""
        self.tier.close()
        for transfer, *_ in self.reads:
            assert transfer.done
        for ticket in self.held:
            self.tier.discard(ticket)
        self.open()

    @invariant()
    def never_over_capacity(self) -> None:
        """The capacity is a promise."""
        assert 0 <= self.tier.held_bytes <= self.capacity_bytes

    def teardown(self) -> None:
        """End in order: nothing is left."""
        try:
            self.quiesce()
            for ticket in self.held:
                self.tier.discard(ticket)
            check_all_room(self.tier)
        finally:
            self.tier.close()
            self.stack.close()

    def pick(self, which: int) -> Ticket:
        """One of the tickets that are held."""
        return list(self.held)[which % len(self.held)]

    def room(self, nbytes: int) -> int:
        """What a window takes of the capacity."""
        return round_up(nbytes, self.unit_bytes)


def write(tier: Tier, source: Bytes, start: int, nbytes: int) -> Ticket:
    """Begin to write a part of ``source``."""
    return tier.write(source.ctypes.data + start, nbytes, keep_alive=source, label="a label")


def read(tier: Tier, ticket: Ticket, target: Bytes) -> Transfer:
    """Begin to read a ticket's window to the start of ``target``."""
    assert len(target) >= ticket.window.nbytes, "the target is shorter than the window"
    return tier.read(ticket, target.ctypes.data, keep_alive=target)


def fill(tier: Tier, source: Bytes, nbytes: int) -> list[Ticket]:
    """Write the same ``nbytes`` until there is no room, and wait for it."""
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
    """Wait until a transfer is over; to be cancelled is a good end, too."""
    with suppress(CancelledError):
        transfer.wait(PATIENCE_S)


def assert_equal(target: Bytes, ticket: Ticket, expected: Bytes | bytes) -> None:
    """The ticket's data, in ``target`` at their skew, are ``expected``."""
    skew = ticket.window.skew
    found = target[skew : skew + ticket.nbytes].tobytes()
    wanted = expected if isinstance(expected, bytes) else expected.tobytes()
    assert found == wanted, f"{ticket.nbytes} bytes at skew {skew} differ"


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait, for what another thread is about to do."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def check_all_room(tier: Tier) -> None:
    """An empty tier can be filled to the last byte of its capacity."""
    nbytes = tier.spec.capacity_bytes
    ticket = write(tier, aligned(nbytes), 0, nbytes)
    ticket.written.wait(PATIENCE_S)
    tier.discard(ticket)
    assert tier.held_bytes == 0
