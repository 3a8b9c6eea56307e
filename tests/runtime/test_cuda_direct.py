"""The GPU-direct mover on a simulated device: one story a test; races are in ``test_cuda_races``, too."""

import random
import weakref
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuda_rig import Rig, check_all_given_back, pattern_of, state_of
from simulated_device import DEVICE, io_error
from test_cuda_races import Program

from penstock.core.errors import (
    ChecksumError,
    ClosedError,
    ConfigError,
    NoSpaceError,
    PenstockWarning,
    TransferError,
)
from penstock.core.units import KIB
from penstock.io.engine import Priority
from penstock.runtime.cuda.direct import DirectInbound, DirectOutbound
from penstock.runtime.movers import RESTORED

NBYTES = 16 * KIB
ODD_BYTES = 5000
"""A length that is a multiple of nothing."""


@pytest.fixture(params=["full", "off"], ids=["digests", "no digests"])
def rig(request, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", request.param)
    rig = Rig(direct=True)
    yield rig
    rig.close()
    assert not rig.link.pinned


def fail_writes(op):
    return io_error(op) if op == "write" else None


def run_stream(stream):
    while stream.runnable:
        stream.step()


# -- out ------------------------------------------------------------------------------------------


def test_exactly_the_bytes_of_a_storage_go_to_flash_and_back_and_none_to_the_host(rig):
    for number, nbytes in enumerate((NBYTES, ODD_BYTES, 1)):
        ticket = rig.spill(number, nbytes)
        rig.settle()
        assert state_of(ticket) == "on flash"
        window = ticket.on_flash.window
        assert (window.nbytes, window.skew) == (nbytes, 0)
        assert rig.host.used_bytes == 0
        target = rig.mover.allocate(ticket)
        assert target.storage.nbytes() == rig.budget.used_by(RESTORED) == nbytes
        rig.mover.drop(target)
        del target
        assert rig.bytes_of(ticket) == pattern_of(number, nbytes).tobytes()
        rig.mover.discard(rig.flash, ticket)
    check_all_given_back(rig)


def test_the_write_is_not_submitted_before_the_device_has_come_to_its_events(rig):
    ticket = rig.spill(1, NBYTES)
    assert rig.link.current.queue  # the device has done nothing yet
    assert not rig.flash.pending
    rig.serve()  # the fence, which waits for the device
    if not rig.flash.pending:
        rig.serve()  # the digest
    assert [entry[1] for entry in rig.flash.pending] == ["write"]
    assert not rig.link.current.queue
    assert state_of(ticket) == "copying"


def test_trap_15_the_source_is_held_until_the_write_has_ended(rig):
    source = rig.tensor(1, NBYTES)
    alive = weakref.ref(source)
    ticket = rig.mover.write(source, rig.flash, "slot")
    seen = []
    ticket.written.add_done_callback(lambda done: seen.append(alive()))
    del source
    while not rig.flash.pending:
        rig.serve()
    assert alive() is not None
    assert not ticket.written.done
    rig.flash.end()
    assert seen == [None]  # nobody who hears of the end finds it alive
    assert alive() is None


def test_what_is_spilled_late_waits_for_the_stream_that_produced_it(rig):
    source = rig.tensor(1, NBYTES)
    rig.link.current = other = rig.link.stream("compute-1")
    ticket = rig.mover.write(source, rig.flash, "slot")
    run_stream(other)
    assert not ticket.written.done
    del source
    rig.settle()
    assert rig.bytes_of(ticket) == pattern_of(1, NBYTES).tobytes()


@pytest.mark.parametrize("begun", [False, True])
def test_trap_17_a_write_can_be_called_off_until_it_has_begun(rig, begun):
    source = rig.tensor(1, NBYTES)
    ticket = rig.mover.write(source, rig.flash, "slot")
    while begun and not rig.flash.pending:
        rig.serve()
    assert ticket.written.cancel() is begun  # the fence still holds the source: it is not over yet
    rig.settle()
    assert isinstance(ticket.written.error, CancelledError)
    assert state_of(ticket) == "gone"
    assert bytes(source) == pattern_of(1, NBYTES).tobytes()
    rig.mover.discard(rig.flash, ticket)
    del source
    check_all_given_back(rig)


@pytest.mark.parametrize("serves", range(4))
def test_a_ticket_may_be_discarded_in_every_state(rig, serves):
    ticket = rig.spill(1, NBYTES)
    for _ in range(serves):
        rig.serve()
    if serves == 3:
        rig.settle()
        assert state_of(ticket) == "on flash"
    rig.mover.discard(rig.flash, ticket)
    rig.mover.discard(rig.flash, ticket)  # once more is harmless
    rig.settle()
    assert ticket.written.done
    check_all_given_back(rig)
    with pytest.raises(ConfigError, match="was discarded"):
        rig.mover.read(rig.flash, ticket, None, Priority.DEMAND)


def test_a_storage_at_an_odd_address_goes_elsewhere(rig):
    odd = torch.from_numpy(np.zeros(NBYTES + 8, np.uint8)[3:]).untyped_storage()
    assert odd.data_ptr() % 8
    with pytest.raises(NoSpaceError, match="not torch's own memory"):
        rig.mover.write(odd, rig.flash, "slot")
    ticket = rig.mover.write(odd, rig.host_tier, "slot")
    rig.settle()
    assert state_of(ticket) == "staged"
    rig.mover.discard(rig.host_tier, ticket)


def test_what_the_tier_could_not_hold_is_refused_at_once(rig):
    rig.flash.spec = rig.flash.spec.__class__(
        name="flash",
        kind="flash",
        capacity_bytes=NBYTES,
        granule_bytes=1,
        where="sim",
        gpu_direct=True,
    )
    first = rig.spill(1, NBYTES)
    with pytest.raises(NoSpaceError, match="is full"):
        rig.spill(2, NBYTES)
    assert first.written.cancel() is False
    rig.settle()
    rig.spill(3, NBYTES)  # what was called off is no longer promised


# -- flash that fails -----------------------------------------------------------------------------


def test_trap_23_what_flash_refuses_goes_to_pinned_memory(rig):
    rig.flash.fails = fail_writes
    tickets = [rig.spill(number, NBYTES) for number in range(2)]
    with pytest.warns(PenstockWarning, match="stays in pinned host memory") as warned:
        rig.settle()
    assert len(warned) == 1
    assert rig.counters()["spill.failed.flash"] == 2
    assert (rig.flash.places, rig.link.live) == (0, 0)
    for number, ticket in enumerate(tickets):
        assert ticket.written.error is None
        assert state_of(ticket) == "staged"
        assert rig.bytes_of(ticket) == pattern_of(number, NBYTES).tobytes()
        rig.mover.discard(rig.flash, ticket)
    check_all_given_back(rig)


@pytest.mark.parametrize("host", [0, 4096])
def test_trap_23_without_room_there_it_stays_on_the_device(host):
    rig = Rig(direct=True, host=host)
    rig.flash.fails = fail_writes
    source = rig.tensor(1, NBYTES)
    ticket = rig.mover.write(source, rig.flash, "slot")
    rig.settle()
    with pytest.raises(TransferError):
        ticket.written.wait(1)
    assert bytes(source) == pattern_of(1, NBYTES).tobytes()
    rig.mover.discard(rig.flash, ticket)
    del source
    check_all_given_back(rig)
    rig.close()


def test_flash_that_turns_out_to_be_full_is_not_asked_again(rig):
    rig.flash.full = True
    ticket = rig.spill(1, NBYTES)
    with pytest.warns(PenstockWarning, match="stays in pinned host memory"):
        rig.settle()
    assert rig.counters()["spill.full.flash"] == 1
    assert rig.bytes_of(ticket) == pattern_of(1, NBYTES).tobytes()
    with pytest.raises(NoSpaceError, match="is full"):
        rig.spill(2, NBYTES)


def test_a_read_that_fails_tells_who_waits_and_frees_the_target(rig):
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    rig.flash.fails = io_error
    target, transfer = rig.fetch(ticket)
    rig.settle()
    with pytest.raises(TransferError):
        transfer.wait(1)
    rig.mover.drop(target)
    del target
    rig.mover.discard(rig.flash, ticket)
    check_all_given_back(rig)


def test_wrong_bytes_are_an_error_and_never_a_result():
    rig = Rig(direct=True)
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    ticket.on_flash.place[4097] ^= 1
    _, transfer = rig.fetch(ticket)
    rig.settle()
    with pytest.raises(ChecksumError, match=r"slot 1: 16384 bytes .* have digest .* written were"):
        transfer.wait(1)
    rig.close()


def test_a_fence_that_fails_leaves_the_source_where_it_is(rig, monkeypatch):
    source = rig.tensor(1, NBYTES)
    ticket = rig.mover.write(source, rig.flash, "slot")

    def fail(event):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(rig.link, "synchronize", fail)
    rig.serve()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="lost"):
        ticket.written.wait(1)
    rig.mover.discard(rig.flash, ticket)
    del source
    check_all_given_back(rig)


# -- back -----------------------------------------------------------------------------------------


def test_the_read_is_not_submitted_before_the_targets_memory_is_free(rig):
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    rig.scratch(NBYTES)  # a kernel that will write to what the target is given
    _, transfer = rig.fetch(ticket)
    assert not rig.flash.pending
    rig.serve()
    assert not rig.link.current.queue
    assert [entry[1] for entry in rig.flash.pending] == ["read"]
    rig.settle()
    assert transfer.error is None


def test_a_read_settles_when_the_bytes_are_there(rig):
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    target, transfer = rig.fetch(ticket)
    rig.serve()
    assert not transfer.done
    rig.settle()
    assert transfer.done
    assert bytes(rig.mover.finish(target)) == pattern_of(1, NBYTES).tobytes()


def test_the_allocator_is_told_of_another_stream_though_nothing_is_on_its_way(rig):
    """The only stream known from saving is not the one that the target was allocated on."""
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    known = rig.link.current
    rig.link.current = allocating = rig.link.stream("compute-1")
    storage = rig.restored(ticket)
    address = storage.data_ptr()
    rig.link.current = known
    rig.mover.use(storage)
    known.put("wait", stuck := rig.link.record(rig.link.stream("never")))
    del storage
    rig.link.current = allocating
    assert rig.link.empty(NBYTES, DEVICE).data_ptr() != address
    stuck.reached = True
    rig.link.finish()
    rig.link.current = known


@pytest.mark.parametrize("begun", [False, True])
def test_a_demand_raises_the_priority_of_a_read(rig, begun):
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    _, transfer = rig.fetch(ticket, Priority.PREFETCH)
    if begun:
        rig.serve()
    transfer.promote(Priority.DEMAND)
    if not begun:
        rig.serve()
    assert rig.flash.pending[0][5] is Priority.DEMAND


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("serves", range(3))
def test_the_end_cancels_writes_and_every_promise_is_settled(serves):
    rig = Rig(direct=True)
    source = rig.tensor(1, NBYTES)
    ticket = rig.mover.write(source, rig.flash, "slot")
    for _ in range(serves):
        rig.serve()
    rig.close_flash_first()
    assert ticket.written.done
    assert isinstance(ticket.written.error, ClosedError | CancelledError)
    assert bytes(source) == pattern_of(1, NBYTES).tobytes()
    assert set(rig.mover._out._promised.values()) <= {0}


# -- that the races are really looked for ---------------------------------------------------------


def deaf_out(monkeypatch):
    """Writes that do not wait for what produces the source."""
    write = DirectOutbound.write
    deaf = lambda self, storage, tier, label, after: write(self, storage, tier, label, ())  # noqa: E731
    monkeypatch.setattr(DirectOutbound, "write", deaf)


def deaf_in(monkeypatch):
    """Reads that do not wait for what used the target's memory."""
    deaf = lambda self, read: self._fenced(read, SimpleNamespace(error=None))  # noqa: E731
    monkeypatch.setattr(DirectInbound, "_begin", deaf)


@pytest.mark.parametrize("leave_out", [deaf_out, deaf_in])
def test_the_simulation_notices_what_is_left_out(leave_out, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", "off")  # or digests would notice first
    leave_out(monkeypatch)
    for seed in range(600):
        program = Program(random.Random(seed).randbytes(800), direct=True)
        try:
            if program.run():
                return
        except (AssertionError, OSError):
            return
    pytest.fail(f"nothing went wrong although there was {leave_out.__name__}")
