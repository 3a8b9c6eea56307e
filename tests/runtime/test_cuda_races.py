"""Races of a device that runs behind the interpreter, in simulation (TRAPS rule 15).

A program saves, spills, restores, uses and drops tensors on two streams, in an order that hypothesis
chooses, while device, threads and disk proceed as it chooses. Kernels look at the bytes they find.
"""

import random

import pytest
from cuda_rig import Rig, check_all_given_back
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import Schedule, SimLink, io_error

from penstock.core.errors import NoSpaceError
from penstock.core.units import KIB
from penstock.io.engine import Priority
from tries import tries

SIZES = (4096, 12_288, 5000)
ALIVE = 12


class Saved:
    def __init__(self, number, storage, stream):
        self.number = number
        self.source = storage
        self.stream = stream
        self.ticket = None
        self.target = None
        self.transfer = None
        self.storage = None


class Program:
    """A training loop without a network, on two streams."""

    def __init__(self, decisions, *, broken="", refusal="", flash_fails=False, direct=False):
        self.schedule = Schedule(decisions)
        self.link = SimLink(self.schedule, broken=broken, refusal=refusal)
        self.compute = [self.link.current, self.link.stream("compute-1")]
        self.rig = Rig(self.link, staging=32 * KIB, host=24 * KIB, direct=direct)
        self.flash_fails = flash_fails
        self.rig.flash.fails = self._fails
        self.saved = []
        self.number = 0
        self.checks = 0
        self.wrong = []

    def _fails(self, op):
        fails = self.flash_fails and op == "write" and self.schedule.pick([False, False, True])
        return io_error(op) if fails else None

    # -- actions ----------------------------------------------------------------------------------

    def save(self):
        if len(self.saved) < ALIVE:
            self.number += 1
            producer = self.schedule.pick([None, None, *self.compute])  # as a loader's
            storage = self.rig.tensor(self.number, self.schedule.pick(SIZES), producer)
            self.saved.append(Saved(self.number, storage, self.link.current))
            self.schedule.pick([lambda: None, self.spill])()

    def look(self):
        """Another operator of the forward, perhaps on another stream, which then waits for the first."""
        kept = [one for one in self.saved if one.source is not None]
        if kept:
            one = self.schedule.pick(kept)
            if self.link.current is not one.stream:
                self.link.wait(self.link.current, self.link.record(one.stream))
            self.rig.check(one.source, one.number, self.wrong)

    def spill(self):
        """Also of what was saved long ago, on another stream."""
        kept = [one for one in self.saved if one.source is not None and one.ticket is None]
        if not kept:
            return
        one = kept[-1]
        tier = self.schedule.pick([self.rig.flash, self.rig.host_tier])
        try:
            one.ticket = self.rig.mover.write(one.source, tier, f"slot {one.number}")
        except NoSpaceError:
            return
        one.ticket.written.add_done_callback(lambda done: self._written(one, done))

    def _written(self, one, transfer):
        if transfer.error is not None:
            ticket, one.ticket = one.ticket, None
            self.rig.mover.discard(ticket.tier, ticket)
        else:
            one.source = None

    def fetch(self):
        spilled = [one for one in self.saved if one.source is None and one.target is None]
        if not spilled:
            return
        one = self.schedule.pick(spilled)
        one.target = self.rig.mover.allocate(one.ticket)
        priority = self.schedule.pick([Priority.DEMAND, Priority.PREFETCH])
        one.transfer = self.rig.mover.read(one.ticket.tier, one.ticket, one.target, priority)
        one.transfer.add_done_callback(lambda done: self._arrived(one, done))

    def _arrived(self, one, transfer):
        assert transfer.error is None, transfer.error
        one.storage = self.rig.mover.finish(one.target)
        one.target = None

    def use(self):
        """A node uses what is in memory, perhaps twice, and lets go of it."""
        ready = [one for one in self.saved if one.storage is not None]
        if not ready:
            return
        one = self.schedule.pick(ready)
        self.rig.check(one.storage, one.number, self.wrong)
        self.checks += 1
        self.schedule.pick([lambda: self.drop(one), lambda: None])()

    def drop(self, one=None):
        """Also of what nobody has used, as of a prefetch that is given up."""
        ready = [one] if one else [each for each in self.saved if each.storage is not None]
        if ready:
            self.schedule.pick(ready).storage = None

    def forget(self):
        """A graph dies."""
        if self.saved:
            one = self.schedule.pick(self.saved)
            if one.ticket is not None and one.target is None:
                self.saved.remove(one)
                self.rig.mover.discard(one.ticket.tier, one.ticket)

    def scratch(self):
        self.rig.scratch(self.schedule.pick(SIZES))

    def switch(self):
        self.link.current = self.schedule.pick(self.compute)

    def end_io(self):
        pending = self.rig.flash.pending
        if pending:
            self.rig.flash.end(self.schedule.pick(pending))

    def run(self):
        actions = [
            *(
                self.save,
                self.look,
                self.spill,
                self.fetch,
                self.use,
                self.use,
                self.drop,
                self.forget,
            ),
            *(self.scratch, self.scratch, self.switch, self.end_io, self.end_io),
            *(self.link.step, self.link.step, self.link.step, self.rig.serve, self.rig.serve),
        ]
        while not self.schedule.spent:
            self.schedule.pick(actions)()
        self.rig.settle()
        for one in self.saved:
            if one.source is None and one.storage is None:
                assert one.ticket is not None
                one.storage = self.rig.restored(one.ticket)
        for one in self.saved:
            if one.storage is not None:
                self.rig.check(one.storage, one.number, self.wrong)
        self.rig.settle()
        return self.wrong

    def finish(self):
        while self.saved:
            one = self.saved.pop()
            if one.ticket is not None:
                self.rig.mover.discard(one.ticket.tier, one.ticket)
            one.source = one.storage = None
        one = None  # its storage would be alive
        self.rig.settle()
        check_all_given_back(self.rig)
        self.rig.close()
        assert not self.link.pinned


@settings(max_examples=tries(150))
@given(
    decisions=st.binary(min_size=200, max_size=900), flash_fails=st.booleans(), direct=st.booleans()
)
@pytest.mark.filterwarnings("ignore:.*cannot be written")
def test_every_kernel_finds_the_right_bytes_in_any_schedule(decisions, flash_fails, direct):
    program = Program(decisions, flash_fails=flash_fails, direct=direct)
    assert program.run() == []
    program.finish()


@settings(max_examples=tries(40))
@given(decisions=st.binary(min_size=200, max_size=900), direct=st.booleans())
@pytest.mark.filterwarnings("ignore:the driver refuses")
def test_the_same_where_the_driver_refuses_to_pin(decisions, direct):
    program = Program(decisions, refusal="no", direct=direct)
    assert program.run() == []
    program.finish()


@pytest.mark.parametrize(
    "broken",
    [
        "copy streams do not wait",
        "compute streams do not wait",
        "the host does not wait",
        "nothing is kept",
    ],
)
@pytest.mark.parametrize("direct", [False, True])
def test_the_simulation_notices_what_is_left_out(broken, direct, monkeypatch):
    """Else the tests above would prove nothing."""
    monkeypatch.setenv("PENSTOCK_VERIFY", "off")  # or digests would notice first
    for seed in range(600):
        program = Program(random.Random(seed).randbytes(800), broken=broken, direct=direct)
        try:
            if program.run():
                return
        except (AssertionError, OSError):
            return
    pytest.fail(f"nothing went wrong although {broken}")


@pytest.mark.parametrize("direct", [False, True])
def test_long_programs_and_that_they_really_use_what_was_spilled(direct):
    checks = 0
    for seed in range(30):
        program = Program(random.Random(seed).randbytes(1500), direct=direct)
        assert program.run() == []
        checks += program.checks
        program.finish()
    assert checks > 300
