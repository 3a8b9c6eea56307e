"""A stage that encodes beside a dict: hypothesis does what it likes to both, and they must agree."""

from concurrent.futures import CancelledError
from contextlib import ExitStack

import pytest
from encoding_rig import PIECE, Rig, bytes_of, floats, outcome, storage_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.core.errors import ClosedError, ConfigError
from penstock.core.units import KIB, MIB
from penstock.io.engine import Priority
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.runtime.storage import Encoding
from penstock.store import FlashTier
from penstock.store.frames import SCRATCH as OWNER
from penstock.store.frames import Frames
from tries import tries

ENCODINGS = [
    None,
    Encoding("zero-value", "float32"),
    Encoding("zero-value", "float64"),
    Encoding("narrow", "int16"),
    Encoding("zero-value+exponent", "float32"),
]


class Machine(RuleBasedStateMachine):
    """Storages that are written, read, cancelled and discarded at any time, in two tiers."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory
        self.open()

    def open(self):
        self.stack = ExitStack()
        engine = ThreadEngine(2, 16 * KIB)
        self.stack.callback(engine.close)
        tier = FlashTier(
            self.directory, capacity_bytes=16 * MIB, engine=engine, recorder=Recorder()
        )
        self.rig = self.stack.enter_context(Rig(tier=tier, budget=6 * MIB))
        self.held = {}
        self.leaving = []
        self.reads = []

    @rule(
        nbytes=st.integers(1, 30 * PIECE),
        skew=st.sampled_from([0, 8, 40]),
        encoding=st.sampled_from(ENCODINGS),
        seed=st.integers(0, 9),
    )
    def write(self, nbytes, skew, encoding, seed):
        content = floats(nbytes, seed)
        source = storage_of(content, skew)
        ticket = self.rig.stage.write(source, self.rig.tier, "slot", encoding)
        assert isinstance(ticket, Frames) == (encoding is not None)
        self.held[ticket] = content

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), priority=st.sampled_from(Priority))
    def read(self, which, priority):
        ticket = self.pick(which)
        failed = outcome(ticket.written) is not None
        target = self.rig.mover.allocate(ticket)
        if target is None:
            self.quiesce()
            return
        if failed:
            with pytest.raises(ConfigError):
                self.rig.stage.read(self.rig.tier, ticket, target, priority)
            self.rig.mover.drop(target)
            return
        transfer = self.rig.stage.read(self.rig.tier, ticket, target, priority)
        self.reads.append((ticket, target, transfer, self.held[ticket]))

    @rule(which=st.integers(0, 99))
    def promote(self, which):
        if self.reads:  # no precondition: what was cancelled in time is not the same in every run
            self.reads[which % len(self.reads)][2].promote(Priority.DEMAND)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def discard(self, which):
        ticket = self.pick(which)
        del self.held[ticket]
        self.rig.discard(ticket)
        self.leaving.append(ticket)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        self.pick(which).written.cancel()

    @rule()
    def quiesce(self):
        """Wait for everything: what was read is what was written, and the account is exact."""
        for ticket in (*self.held, *self.leaving):
            assert isinstance(outcome(ticket.written), CancelledError | None)
        for ticket, target, transfer, content in self.reads:
            error = outcome(transfer)
            if error is None:
                assert bytes_of(self.rig.mover.finish(target)) == content
            else:
                assert isinstance(error, CancelledError)
                assert ticket in self.leaving
                self.rig.mover.drop(target)
        self.leaving.clear()
        self.reads.clear()
        assert self.rig.tier.held_bytes == sum(map(held_bytes, self.held))
        assert self.rig.mover.used_bytes(self.rig.budget) == 0

    @rule()
    def reopen(self):
        """Close with whatever is in flight, the tier first or the mover."""
        if len(self.held) % 2:
            self.rig.tier.close()
        self.rig.stage.close()
        for ticket in (*self.held, *self.leaving):
            error = outcome(ticket.written)
            assert isinstance(error, CancelledError | ClosedError | None)
        for _, target, transfer, content in self.reads:
            if outcome(transfer) is None:
                assert bytes_of(self.rig.mover.finish(target)) == content
            else:
                self.rig.mover.drop(target)
        self.rig.discard(*self.held)
        self.stack.close()
        assert self.rig.budget.used_bytes == 0
        self.open()

    @invariant()
    def within_the_budget(self):
        budget = self.rig.budget
        assert budget.used_by(OWNER) > 0
        assert budget.peak_bytes <= budget.limit_bytes

    def teardown(self):
        try:
            self.quiesce()
            self.rig.discard(*self.held)
            assert self.rig.tier.held_bytes == 0
        finally:
            self.stack.close()

    def pick(self, which):
        return list(self.held)[which % len(self.held)]


def held_bytes(ticket):
    """What a ticket holds in the tier."""
    if ticket.written.error is not None:
        return 0 if isinstance(ticket, Frames) else ticket.window.nbytes
    parts = ticket.parts if isinstance(ticket, Frames) else [ticket]
    return sum(part.window.nbytes for part in parts)


def test_any_order(disk_path, small_knobs):
    run_state_machine_as_test(
        lambda: Machine(str(disk_path)),
        settings=settings(max_examples=tries(40), stateful_step_count=30, deadline=None),
    )
