"""The CUDA mover on a simulated device: one story a test. Races are in ``test_cuda_races``."""

import ctypes
import gc
import queue
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from cuda_rig import Rig, check_all_given_back, pattern_of, state_of
from simulated_device import DEVICE, SimEvent, SimLink, io_error

from penstock.core.errors import (
    ClosedError,
    ConfigError,
    HookError,
    NoSpaceError,
    PenstockWarning,
    TransferError,
)
from penstock.core.units import KIB
from penstock.io.engine import Priority
from penstock.observe.recorder import Stage
from penstock.runtime.cuda import link, pinned
from penstock.runtime.cuda.lanes import MOST_ENQUEUED, Copy, CopyLane, start_daemon
from penstock.runtime.movers import RESTORED
from penstock.store.account import Account

NBYTES = 16 * KIB


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()
    assert not rig.link.pinned


def small_rig(**settings):
    """With room to stage one tensor at a time."""
    return Rig(staging=NBYTES, host=0, **settings)


# -- out ------------------------------------------------------------------------------------------


def test_what_is_spilled_comes_back_through_flash_and_through_the_host_tier(rig):
    for number, tier in enumerate((rig.flash, rig.host_tier)):
        ticket = rig.spill(number, NBYTES, tier)
        rig.settle()
        assert state_of(ticket) == ("on flash" if tier is rig.flash else "staged")
        assert rig.bytes_of(ticket) == pattern_of(number, NBYTES).tobytes()
        rig.mover.discard(tier, ticket)
    check_all_given_back(rig)


def test_writing_only_enqueues(rig):
    ticket = rig.spill(1, NBYTES)
    assert not ticket.written.done
    assert state_of(ticket) == "copying"
    assert rig.link.current.queue  # the device has done nothing yet


def test_trap_15_the_source_is_released_only_after_its_copy_has_been_reached(rig):
    source = rig.tensor(1, NBYTES)
    alive = weakref.ref(source)
    ticket = rig.mover.write(source, rig.flash, "slot")
    seen = []
    ticket.written.add_done_callback(lambda done: seen.append(alive()))
    del source
    assert alive() is not None
    rig.link.finish()  # reached, but the host has not seen it
    assert alive() is not None
    rig.serve()
    assert seen == [None]  # nobody who hears of the end finds it alive
    assert alive() is None


def test_trap_15_the_stream_is_the_one_current_at_the_call(rig):
    other = rig.link.stream("compute-1")
    rig.spill(1, NBYTES)
    rig.link.current = other
    ticket = rig.spill(2, NBYTES)
    copies = next(stream for stream in rig.link.streams if stream.name.startswith("copy"))
    for stream in (rig.link.streams[0], copies):
        while stream.runnable:
            stream.step()
    assert not copies.runnable  # although the first stream is done with everything
    rig.settle()
    assert rig.bytes_of(ticket) == pattern_of(2, NBYTES).tobytes()


def test_what_is_spilled_late_waits_for_the_stream_that_produced_it(rig):
    source = rig.tensor(1, NBYTES)
    rig.link.current = other = rig.link.stream("compute-1")
    ticket = rig.mover.write(
        source, rig.flash, "slot"
    )  # an eviction, while another stream is current
    while any(stream.runnable for stream in rig.link.streams[1:]):
        next(stream for stream in rig.link.streams[1:] if stream.runnable).step()
    assert not other.queue
    assert not ticket.written.done
    del source
    rig.settle()
    assert rig.bytes_of(ticket) == pattern_of(1, NBYTES).tobytes()


@pytest.mark.parametrize("reads_before", [True, False])
def test_a_source_is_not_reused_while_another_stream_reads_it(rig, reads_before):
    """Without us autograd would have held it until backward."""
    first = rig.link.current
    other = rig.link.stream("compute-1")
    source = rig.tensor(1, NBYTES)
    address = source.data_ptr()
    if reads_before:
        rig.link.current = other
        rig.mover.use(source)
        rig.link.current = first
    ticket = rig.mover.write(source, rig.flash, "slot")
    if not reads_before:
        rig.link.current = other
        rig.mover.use(source)
        rig.link.current = first
    other.put("wait", stuck := rig.link.record(rig.link.stream("never")))
    del source
    for stream in (other, first):
        while stream.runnable:
            stream.step()
    rig.serve()
    assert ticket.written.done
    assert rig.link.empty(NBYTES, DEVICE).data_ptr() != address
    stuck.reached = True
    rig.link.finish()
    assert rig.link.empty(NBYTES, DEVICE).data_ptr() == address


def test_trap_33_a_source_allocated_on_a_loaders_stream_is_not_reused_while_it_is_read(rig):
    """A batch: its own stream knows nothing of its readers, and is free to fill the next one there."""
    loader, reader = rig.link.stream("loader"), rig.link.current
    rig.link.current = loader
    batch = rig.link.empty(NBYTES, DEVICE)
    address = batch.data_ptr()
    rig.link.current = reader
    rig.mover.use(batch)
    ticket = rig.mover.write(batch, rig.flash, "slot")
    reader.put("wait", stuck := rig.link.record(rig.link.stream("never")))
    del batch
    while reader.runnable:
        reader.step()
    rig.serve()
    assert ticket.written.done
    rig.link.current = loader
    assert rig.link.empty(NBYTES, DEVICE).data_ptr() != address
    stuck.reached = True
    rig.link.finish()
    assert rig.link.empty(NBYTES, DEVICE).data_ptr() == address


def test_a_spill_does_not_wait_for_streams_that_have_nothing_to_do_with_it(rig):
    first = rig.link.current
    rig.link.current = other = rig.link.stream("compute-1")
    unrelated = rig.tensor(0, NBYTES)
    other.put("wait", rig.link.record(rig.link.stream("never")))
    rig.link.current = first
    source = rig.tensor(1, NBYTES)
    address = source.data_ptr()
    rig.link.current = other  # an eviction, in a thread that works on it
    ticket = rig.mover.write(source, rig.flash, "slot")
    del source
    rig.link.step()
    while first.runnable:
        first.step()
    rig.serve()
    assert ticket.written.done
    rig.link.current = first
    assert rig.link.empty(NBYTES, DEVICE).data_ptr() == address
    rig.link.streams[-1].queue.clear()
    other.queue.clear()
    del unrelated


def test_nothing_is_remembered_of_streams_whose_storages_are_gone(rig):
    for number in range(5):
        rig.link.current = rig.link.stream(f"compute-{number + 1}")
        rig.tensor(number, NBYTES)
    assert not len(rig.mover._table)
    source = rig.tensor(9, NBYTES)
    assert rig.mover._table.leave(source) == (rig.link.current,)


def test_what_has_landed_before_it_is_handed_out_is_kept_for_another_stream_that_uses_it(rig):
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()
    storage = rig.restored(ticket)  # on this stream; its copy has ended
    address, first = storage.data_ptr(), rig.link.current
    rig.link.current = other = rig.link.stream("compute-1")
    rig.mover.use(storage)
    other.put("wait", stuck := rig.link.record(rig.link.stream("never")))
    del storage
    rig.link.current = first
    assert rig.mover.allocate(ticket).storage.data_ptr() != address
    stuck.reached = True
    rig.link.finish()
    assert rig.mover.allocate(ticket).storage.data_ptr() == address


def test_a_spill_that_finds_no_buffer_waits_in_a_queue_and_its_source_with_it():
    rig = small_rig()
    tickets = [rig.spill(number, NBYTES) for number in range(3)]
    assert [state_of(ticket) for ticket in tickets] == ["copying", "queued", "queued"]
    assert rig.link.live == 3
    rig.settle()
    assert [state_of(ticket) for ticket in tickets] == ["on flash"] * 3
    assert rig.link.live == 0
    for number, ticket in enumerate(tickets):
        assert rig.bytes_of(ticket) == pattern_of(number, NBYTES).tobytes()
    rig.close()


def test_trap_17_a_spill_in_the_queue_can_be_cancelled():
    rig = small_rig()
    first, second = rig.spill(1, NBYTES), rig.spill(2, NBYTES)
    assert not first.written.cancel()  # its copy is under way
    assert second.written.cancel()
    assert rig.link.live == 1
    rig.mover.discard(rig.flash, second)
    rig.settle()
    assert rig.flash.places == 1
    rig.mover.discard(rig.flash, first)
    check_all_given_back(rig)
    rig.close()


@pytest.mark.parametrize("steps", range(5))
def test_a_ticket_may_be_discarded_in_every_state(steps):
    rig = small_rig()
    blocker = rig.spill(0, NBYTES) if steps == 0 else None
    ticket = rig.spill(1, NBYTES)
    reached = ["queued", "copying", "staged", "staged", "on flash"][steps]
    if steps >= 2:
        rig.serve()  # the write to flash has begun
    if steps == 3:
        rig.fetch(ticket)  # and a copy back from the buffer
    if steps >= 4:
        rig.settle()
    assert state_of(ticket) == reached
    rig.mover.discard(rig.flash, ticket)
    rig.mover.discard(rig.flash, ticket)  # once more is harmless
    rig.settle()
    assert ticket.written.done
    if blocker is not None:
        rig.mover.discard(rig.flash, blocker)
    check_all_given_back(rig)
    with pytest.raises(ConfigError, match="was discarded"):
        rig.mover.read(rig.flash, ticket, None, Priority.DEMAND)
    rig.close()


def test_events_that_nothing_waits_for_are_used_again(rig):
    recorded, reused = [], []
    record, reuse = rig.link.record, rig.link.reuse
    rig.link.record = lambda stream, **how: (recorded.append(record(stream, **how)), recorded[-1])[
        1
    ]
    rig.link.reuse = lambda event: (reused.append(event), reuse(event))[1]
    source = rig.tensor(1, 128 * KIB)
    with pytest.raises(NoSpaceError):
        rig.mover.write(source, rig.host_tier, "slot")
    assert recorded == reused != []
    del source
    for number in range(3):
        ticket = rig.spill(number, NBYTES, rig.host_tier)
        rig.settle()
        rig.bytes_of(ticket)
        rig.mover.discard(rig.host_tier, ticket)
    kept = len(recorded) - len(reused)
    assert 0 < kept <= 2  # where the clocks of both lanes were compared the last time


def test_a_full_host_tier_says_so_at_once(rig):
    tickets = [rig.spill(number, NBYTES, rig.host_tier) for number in range(4)]
    with pytest.raises(NoSpaceError, match="raise host_memory"):
        rig.spill(5, NBYTES, rig.host_tier)
    rig.mover.discard(rig.host_tier, tickets[0])
    rig.settle()
    rig.spill(6, NBYTES, rig.host_tier)


def test_what_is_longer_than_the_staging_memory_is_refused_at_once(rig):
    with pytest.raises(NoSpaceError, match="longer than the staging memory"):
        rig.spill(1, 65 * KIB)


def test_flash_is_full_already_when_all_that_is_on_the_way_there_would_fill_it():
    rig = small_rig()
    rig.flash.spec = rig.flash.spec.__class__(
        name="flash", kind="flash", capacity_bytes=2 * NBYTES, granule_bytes=512, where="sim"
    )
    tickets = [rig.spill(number, NBYTES) for number in range(2)]
    with pytest.raises(NoSpaceError, match="is full"):
        rig.spill(3, NBYTES)
    rig.settle()
    with pytest.raises(NoSpaceError, match="is full"):
        rig.spill(3, NBYTES)
    rig.mover.discard(rig.flash, tickets[0])
    rig.spill(4, NBYTES)
    rig.close()


def test_no_tensor_is_spilled_while_a_graph_is_captured(rig):
    rig.link.is_capturing = True
    with pytest.raises(HookError, match="captured"):
        rig.spill(1, NBYTES)


def test_trap_35_nothing_waits_for_a_stream_that_is_captured_in_another_thread(rig):
    """The event would be a node of the graph, and the copy, too."""
    first = rig.link.current
    source = rig.tensor(1, NBYTES)
    rig.link.current = rig.link.stream("compute-1")
    rig.link.captured.add(first)
    with pytest.raises(TransferError, match="being captured on a stream that works with it"):
        rig.mover.write(source, rig.flash, "slot")
    rig.link.captured.clear()
    ticket = rig.mover.write(source, rig.flash, "slot")
    del source
    rig.settle()
    assert rig.bytes_of(ticket) == pattern_of(1, NBYTES).tobytes()


def test_trap_35_nothing_is_brought_back_while_a_graph_is_captured(rig):
    """Its target's event would be a node of the graph."""
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    rig.link.is_capturing = True
    rig.link.captured.add(rig.link.current)
    assert rig.mover.allocate(ticket) is None
    with pytest.raises(HookError, match="cannot be brought back while a CUDA graph"):
        rig.mover.allocate(ticket, force=True)
    rig.link.is_capturing = False
    rig.link.captured.clear()


def test_draining_waits_for_the_device():
    rig = Rig(threaded=True)
    gate = threading.Event()
    rig.link.launch(lambda: gate.wait(5))
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    threading.Timer(0.05, gate.set).start()
    rig.mover.drain()
    assert gate.is_set()
    assert ticket.written.done
    rig.mover.close()


# -- flash that fails -----------------------------------------------------------------------------


def test_trap_23_what_flash_refuses_stays_in_its_buffer():
    rig = Rig()
    rig.flash.fails = lambda op: io_error(op) if op == "write" else None
    tickets = [rig.spill(number, NBYTES) for number in range(2)]
    with pytest.warns(PenstockWarning, match="stays in pinned host memory") as warned:
        rig.settle()
    assert len(warned) == 1
    assert rig.counters()["spill.failed.flash"] == 2
    assert rig.flash.places == 0
    for number, ticket in enumerate(tickets):
        assert ticket.written.error is None
        assert state_of(ticket) == "staged"
        assert rig.bytes_of(ticket) == pattern_of(number, NBYTES).tobytes()
        rig.mover.discard(rig.flash, ticket)
    check_all_given_back(rig)
    rig.close()


def test_flash_that_turns_out_to_be_full_is_not_asked_again():
    rig = Rig()
    first = rig.spill(1, NBYTES)
    rig.settle()
    rig.flash.full = True
    second = rig.spill(2, NBYTES)
    with pytest.warns(PenstockWarning, match="stays in pinned host memory"):
        rig.settle()
    assert rig.counters()["spill.full.flash"] == 1
    assert rig.bytes_of(second) == pattern_of(2, NBYTES).tobytes()
    with pytest.raises(NoSpaceError, match="is full"):
        rig.spill(3, NBYTES)
    rig.flash.full = False
    rig.mover.discard(rig.flash, first)
    ticket = rig.spill(3, NBYTES)
    rig.settle()
    assert state_of(ticket) == "on flash"
    rig.close()


@pytest.mark.filterwarnings("ignore:.*stays in pinned host memory")
def test_nobody_waits_in_vain_for_a_buffer_that_holds_what_flash_refused():
    rig = small_rig()
    rig.flash.fails = io_error
    first = rig.spill(1, NBYTES)
    second = rig.spill(2, NBYTES)
    assert state_of(second) == "queued"
    rig.settle()
    assert isinstance(second.written.error, NoSpaceError)
    with pytest.raises(NoSpaceError, match="what flash has refused"):
        rig.spill(3, NBYTES)
    assert rig.bytes_of(first) == pattern_of(1, NBYTES).tobytes()
    for ticket in (first, second):
        rig.mover.discard(rig.flash, ticket)
    check_all_given_back(rig)
    rig.close()


@pytest.mark.filterwarnings("ignore:.*stays in pinned host memory")
@pytest.mark.parametrize("queued", [False, True])
def test_a_read_does_without_the_slab_if_waiting_for_it_is_in_vain(queued):
    rig = small_rig()
    on_flash = rig.spill(1, NBYTES)
    rig.settle()
    rig.flash.fails = lambda op: io_error(op) if op == "write" else None
    rig.spill(2, NBYTES)
    if not queued:
        rig.settle()
    target, transfer = rig.fetch(on_flash)
    while rig.flash.pending or rig.link.step() or rig.staging.serve(wait=False):
        rig.flash.finish()
    assert (
        not transfer.done
    )  # to enqueue the copy takes as long as the copy: its lane's thread does it
    del target
    rig.settle()
    assert transfer.done
    rig.recorder.count("staging.beyond", -1)
    assert rig.bytes_of(on_flash) == pattern_of(1, NBYTES).tobytes()
    assert rig.counters()["staging.beyond"] == 1
    rig.close()


def test_a_read_that_fails_tells_who_waits_and_frees_its_buffer(rig):
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


# -- back -----------------------------------------------------------------------------------------


def test_a_reload_is_taken_from_the_buffer_while_flash_is_being_written(rig):
    ticket = rig.spill(1, NBYTES)
    rig.serve()
    assert ticket.written.done
    assert len(rig.flash.pending) == 1  # the write, which has not ended
    _, transfer = rig.fetch(ticket)
    assert transfer.done
    assert [entry[1] for entry in rig.flash.pending] == ["write"]
    rig.settle()
    assert rig.staging.used_bytes == 0


def test_a_reload_of_what_is_not_written_yet_is_a_mistake(rig):
    ticket = rig.spill(1, NBYTES)
    with pytest.raises(ConfigError, match="before it was written"):
        rig.mover.read(rig.flash, ticket, rig.mover.allocate(ticket), Priority.DEMAND)


def test_a_read_settles_when_its_copy_is_enqueued_and_a_user_waits_on_the_device(rig):
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()
    rig.scratch(NBYTES)  # else the right bytes might still lie there
    rig.settle()
    target, transfer = rig.fetch(ticket)
    storage = rig.mover.finish(target)
    assert transfer.done
    assert bytes(storage) != pattern_of(1, NBYTES).tobytes()
    wrong = []
    rig.check(storage, 1, wrong)  # returns at once
    rig.link.finish()
    assert wrong == []


def test_trap_15_what_is_made_again_on_one_stream_is_waited_for_by_another(rig):
    """Else a backward on two streams would read a remade tensor before it is there."""
    other = rig.link.stream("compute-1")
    storage = rig.tensor(1, NBYTES)  # enqueued, not run
    rig.mover.made(storage)
    first, rig.link.current = rig.link.current, other
    wrong = []
    rig.check(storage, 1, wrong)
    while other.runnable:
        other.step()
    assert other.queue
    rig.link.finish()
    assert not wrong
    rig.link.current = first
    waiting = len(first.queue)
    rig.mover.use(storage)
    assert len(first.queue) == waiting  # which made it, so need not wait
    del storage
    check_all_given_back(rig)


def test_targets_are_charged_until_they_die():
    rig = Rig(budget=NBYTES)
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()
    storage = rig.restored(ticket)
    assert rig.mover.used_bytes(rig.budget) == rig.budget.used_by(RESTORED) == NBYTES
    assert rig.mover.allocate(ticket) is None
    beyond = rig.mover.allocate(ticket, force=True)
    assert rig.mover.used_bytes(rig.budget) == 2 * NBYTES == 2 * rig.mover.target_bytes(ticket)
    del storage, beyond
    assert rig.mover.used_bytes(rig.budget) == 0
    rig.close()


def test_a_device_without_memory_is_like_a_full_budget_unless_forced(rig):
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()
    rig.link.out_of_memory = True
    assert rig.mover.allocate(ticket) is None
    assert rig.counters()["device.out_of_memory"] == 1
    with pytest.raises(torch.OutOfMemoryError):
        rig.mover.allocate(ticket, force=True)
    assert rig.mover.used_bytes(rig.budget) == 0


def test_an_unused_target_is_held_until_its_copy_has_landed_and_a_used_one_is_not(rig):
    tickets = [rig.spill(number, NBYTES, rig.host_tier) for number in range(2)]
    rig.settle()
    for ticket, is_used in zip(tickets, (False, True), strict=True):
        storage = rig.mover.finish(rig.fetch(ticket)[0])
        if is_used:
            rig.mover.use(storage)
        del storage
        assert rig.mover.used_bytes(rig.budget) == (0 if is_used else NBYTES)
        rig.settle()
        assert rig.mover.used_bytes(rig.budget) == 0


def test_a_demand_overtakes_prefetches_that_wait_for_a_buffer():
    rig = small_rig()
    tickets = [rig.spill(number, NBYTES) for number in range(4)]
    rig.settle()
    reads = [rig.fetch(ticket, Priority.PREFETCH)[1] for ticket in tickets]
    assert len(rig.flash.pending) == 1
    reads[3].promote(Priority.DEMAND)
    rig.flash.end()
    rig.link.finish()
    rig.serve()
    rig.serve()
    assert rig.flash.pending[0][5] is Priority.DEMAND
    rig.flash.end()
    assert [transfer.done for transfer in reads] == [True, False, False, True]
    rig.settle()
    assert all(transfer.error is None for transfer in reads)
    rig.close()


@pytest.mark.parametrize("through_flash", [False, True])
def test_a_demand_overtakes_the_copies_of_what_is_read_ahead(rig, through_flash):
    tier = rig.flash if through_flash else rig.host_tier
    first, second = (rig.spill(number, NBYTES, tier) for number in range(2))
    rig.settle()
    rig.scratch(NBYTES)
    rig.settle()
    ahead, _ = rig.fetch(first, Priority.PREFETCH)
    rig.flash.finish()
    prefetches = rig.link.streams[-1]
    prefetches.queue.appendleft(("wait", stuck := SimEvent(False), 0, 0))
    target, transfer = rig.fetch(second, Priority.PREFETCH if through_flash else Priority.DEMAND)
    transfer.promote(Priority.DEMAND)
    rig.flash.finish()
    wrong = []
    rig.check(rig.mover.finish(target), 1, wrong)
    while rig.link.current.queue:
        assert rig.link.step()
    assert not wrong
    assert prefetches.queue
    stuck.reached = True
    del ahead


def test_a_demand_raises_the_priority_of_a_read_from_flash_under_way(rig):
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    _, transfer = rig.fetch(ticket, Priority.PREFETCH)
    assert rig.flash.pending[0][5] is Priority.PREFETCH
    transfer.promote(Priority.DEMAND)
    assert rig.flash.pending[0][5] is Priority.DEMAND


def test_making_room_waits_for_what_was_read_ahead_and_given_up():
    rig = Rig(threaded=True)
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    ticket.written.wait(5)
    assert rig.mover.trim(1) == 0
    gate = threading.Event()
    rig.link.launch(lambda: gate.wait(5))
    target, _ = rig.fetch(ticket)
    rig.mover.drop(target)
    del target
    assert rig.mover.used_bytes(rig.budget) == NBYTES
    threading.Timer(0.05, gate.set).start()
    assert rig.mover.trim(1) == NBYTES
    assert rig.mover.used_bytes(rig.budget) == 0
    rig.mover.close()


# -- pinning, accounts, the end -------------------------------------------------------------------


def test_trap_16_memory_is_pinned_once_as_a_whole_and_unpinned_at_the_end():
    rig = Rig()
    assert sorted(rig.link.pinned.values()) == [64 * KIB, 64 * KIB]
    assert rig.host_budget.used_bytes == 128 * KIB
    pinned = dict(rig.link.pinned)
    for number in range(5):
        rig.spill(number, NBYTES)
    rig.settle()
    assert rig.link.pinned == pinned
    rig.close()
    assert not rig.link.pinned
    assert rig.host_budget.used_bytes == 0


def test_trap_16_a_refused_pin_is_said_once_and_copies_do_not_hold_up_the_program():
    with pytest.warns(PenstockWarning, match=r"refuses to pin 128.00 KiB .* \(out of luck\)"):
        rig = Rig(SimLink(refusal="out of luck"))
    assert rig.counters()["pin.failed"] == 1
    ticket = rig.spill(1, NBYTES)
    copies = next(stream for stream in rig.link.streams if stream.name.startswith("copy"))
    assert not copies.queue  # such a copy takes as long to enqueue as to do
    rig.settle()
    assert rig.bytes_of(ticket) == pattern_of(1, NBYTES).tobytes()
    rig.close()


def test_a_slab_that_does_not_fit_the_host_budget_is_refused():
    rig = Rig()
    rig.host_budget.limit_bytes = rig.host_budget.used_bytes + 4096
    with pytest.raises(ConfigError, match="do not fit the host budget"):
        rig._slab(64 * KIB, "staging", None)
    rig.close()


def test_copies_are_recorded_with_the_time_that_the_device_took(rig):
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()
    rig.restored(ticket)
    totals = rig.recorder.snapshot()
    for stage in (Stage.COPY_OUT, Stage.COPY_IN):
        flow = totals.flow(stage, "host")
        assert (flow.count, flow.nbytes, flow.busy_ns) == (1, NBYTES, 1000)


def test_trap_34_every_thread_of_a_lane_is_told_its_device_before_all_else():
    """A new thread's device is the first one, whichever this process uses."""
    rig = Rig(threaded=True)
    calls = []
    reached = rig.link.reached
    rig.link.reached = lambda event: (calls.append(list(rig.link.adopted)), reached(event))[1]
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    ticket.written.wait(5)
    rig.fetch(ticket)[1].wait(5)
    rig.mover.close()
    names = ["penstock-copy-out-cpu", "penstock-copy-demand-cpu"]
    assert rig.link.adopted == [(name, DEVICE) for name in names]
    assert calls[0] == rig.link.adopted[:1]


def test_the_link_is_measured_without_leaving_anything_behind(rig):
    out, back = rig.mover.measure()
    assert out == back == 64 * KIB * 1e9 / 1000
    check_all_given_back(rig)
    assert Rig(staging=0, host=0).mover.measure() == (0.0, 0.0)


def test_copies_of_pinned_memory_use_parts_of_one_tensor(monkeypatch):
    monkeypatch.setattr(link, "_in_thread", lambda call, *args: "")
    memory = torch.zeros(8192, dtype=torch.uint8)
    cuda, begin = link.CudaLink(), memory.data_ptr()
    assert cuda.pin(begin, 8192, DEVICE) == ""
    first, last = cuda._host_bytes(begin, 100), cuda._host_bytes(begin + 8092, 100)
    assert (first.data_ptr(), last.data_ptr()) == (begin, begin + 8092)
    assert first._base is last._base is not None
    beyond = cuda._host_bytes(begin + 8093, 100)
    assert (beyond.data_ptr(), beyond._base) == (begin + 8093, None)
    cuda.unpin(begin, DEVICE)
    assert cuda._host_bytes(begin, 100)._base is None


class Bare:
    """What every module for a kind of device has; one that has no more."""

    class Event:
        made = 0

        def __new__(cls, enable_timing=False):
            cls.made += 1
            return super().__new__(cls)

        def record(self, stream):
            self.device = stream.device

    class device(nullcontext):
        pass

    stream = device


def test_a_link_does_without_what_a_kind_of_device_has_not(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: Bare)
    bare, device = link.CudaLink("xpu"), torch.device("xpu", 0)
    stream = SimpleNamespace(device=device)
    event = bare.record(stream, timed=True)
    bare.reuse(event)
    assert bare.record(stream, timed=True) is event
    assert Bare.Event.made == 1
    assert not bare.capturing()
    assert not bare.capturing(stream)
    assert bare.frees(torch.zeros(1).untyped_storage())
    assert bare.pin(4096, 4096, device) == (
        "torch cannot register host memory for devices of type 'xpu'"
    )
    assert bare.usable_bytes(device) is None


class Telling(Bare):
    """As Intel's: it tells of memory, and not of a limit that the program has set."""

    free = 96

    @classmethod
    def mem_get_info(cls, device):
        assert device.type == "xpu"
        if cls.free is None:
            raise RuntimeError("The device doesn't support querying the available free memory.")
        return cls.free, 256

    @staticmethod
    def memory_reserved(device):
        return 64

    @staticmethod
    def memory_stats_as_nested_dict(device):
        return {"allocated_bytes": {"all": {"current": 1, "peak": 2, "allocated": 3}}}


def allocator_of_others(device):
    raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")


def test_memory_is_asked_of_the_devices_own_module(monkeypatch):
    """Without ``device_memory`` every session does that."""
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: Telling)
    telling, device = link.CudaLink("xpu"), torch.device("xpu", 0)
    assert telling.usable_bytes(device) == 96 + 64
    assert telling.allocated(device) == link.Allocated(1, 2, 3)
    monkeypatch.setattr(
        Telling, "get_per_process_memory_fraction", lambda device: 0.5, raising=False
    )
    assert telling.usable_bytes(device) == 128
    monkeypatch.setattr(Telling, "memory_reserved", allocator_of_others)
    assert telling.usable_bytes(device) is None
    monkeypatch.setattr(Telling, "free", None)
    assert telling.usable_bytes(device) is None


class Ascend(Bare):
    """Registers host memory by a runtime of its own."""

    calls = ()
    code = 0

    @classmethod
    def npurt(cls):
        def call(*arguments):
            cls.calls = (*cls.calls, arguments)
            return cls.code

        return SimpleNamespace(npuHostRegister=call, npuHostUnregister=call)


def test_memory_is_pinned_by_ascends_own_runtime(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: Ascend)
    ascend, device = link.CudaLink("npu"), torch.device("cpu")
    memory = torch.zeros(8192, dtype=torch.uint8)
    address = memory.data_ptr()
    assert ascend.pin(address, 8192, device) == ""
    assert ascend._host_bytes(address, 100)._base is not None
    ascend.unpin(address, device)
    assert Ascend.calls == ((address, 8192, 2), (address,))
    monkeypatch.setattr(Ascend, "code", 507899)
    assert ascend.pin(address, 8192, device) == "npuHostRegister returned 507899"
    assert ascend._host_bytes(address, 100)._base is None


def test_after_the_end_nothing_is_begun_and_discarding_is_harmless():
    rig = Rig()
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    target = rig.mover.allocate(ticket)
    rig.close()
    rig.mover.close()
    with pytest.raises(ClosedError):
        rig.spill(2, NBYTES)
    with pytest.raises(ClosedError):
        rig.mover.read(rig.flash, ticket, target, Priority.DEMAND)
    rig.mover.discard(rig.flash, ticket)


def test_the_end_waits_for_what_is_under_way_and_cancels_what_is_queued():
    rig = small_rig(threaded=True)
    gate = threading.Event()
    rig.link.launch(lambda: gate.wait(5))
    under_way, queued = rig.spill(1, NBYTES), rig.spill(2, NBYTES)
    threading.Timer(0.05, gate.set).start()
    rig.mover.close()
    assert under_way.written.done
    assert under_way.written.error is None
    assert "Cancelled" in repr(queued.written.error)
    assert not rig.link.pinned
    assert not any(stream.queue for stream in rig.link.streams)


def test_when_the_interpreter_ends_memory_is_unpinned_without_another_thread(monkeypatch):
    """From Python 3.12 on none can be started then, and ``penstock run`` closes its session there."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert link._in_thread(lambda *args: f"called with {args}", 1, 2) == "called with (1, 2)"


def test_a_mover_that_is_dropped_unpins_its_memory():
    rig = Rig(threaded=True)
    link = rig.link
    rig.spill(1, NBYTES, rig.host_tier).written.wait(5)
    del rig
    gc.collect()
    assert not link.pinned


def test_trap_24_a_forked_process_is_told_to_spawn_and_touches_nothing(rig):
    ticket = rig.spill(1, NBYTES)
    rig.settle()
    rig.mover._guard.in_child = True
    try:
        with pytest.raises(ClosedError, match="'spawn'"):
            rig.spill(2, NBYTES)
        rig.mover.discard(rig.flash, ticket)
        rig.mover.close()
        assert not ticket.discarded
    finally:
        rig.mover._guard.in_child = False


def test_a_copy_that_fails_leaves_the_source_where_it_is(rig):
    def fail(stream, source, address):
        raise RuntimeError("no such luck")

    rig.link.copy_out = fail
    source = rig.tensor(1, NBYTES)
    ticket = rig.mover.write(source, rig.flash, "slot")
    rig.settle()
    with pytest.raises(RuntimeError, match="no such luck"):
        ticket.written.wait(1)
    rig.mover.discard(rig.flash, ticket)
    del source
    check_all_given_back(rig)


def test_a_copy_back_that_fails_is_told_to_who_waits(rig):
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()

    def fail(stream, target, address):
        raise RuntimeError("no such luck")

    rig.link.copy_in = fail
    target, transfer = rig.fetch(ticket)
    rig.settle()
    with pytest.raises(RuntimeError, match="no such luck"):
        transfer.wait(1)
    del target
    rig.mover.discard(rig.host_tier, ticket)
    check_all_given_back(rig)


def test_an_interrupt_in_the_middle_of_a_copy_frees_nothing_too_early(rig):
    """Ctrl-C in a notebook, where the session goes on."""
    enqueue = rig.link.copy_in

    def interrupted(stream, target, address):
        enqueue(stream, target, address)
        raise KeyboardInterrupt

    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()
    rig.link.copy_in = interrupted
    target = rig.mover.allocate(ticket)
    with pytest.raises(KeyboardInterrupt):
        rig.mover.read(rig.host_tier, ticket, target, Priority.DEMAND)
    rig.link.copy_in = enqueue
    rig.mover.drop(target)
    del target
    rig.mover.discard(rig.host_tier, ticket)
    assert rig.mover.used_bytes(rig.budget) == rig.host.used_bytes == NBYTES
    rig.settle()
    gc.collect()  # the interrupt's frames
    check_all_given_back(rig)


def test_memory_that_may_be_in_use_is_never_given_back(monkeypatch):
    monkeypatch.setattr(pinned, "PATIENCE_S", 0.01)
    rig = Rig()
    rig.staging.take(4096)  # by somebody who was interrupted
    rig.close()
    assert list(rig.link.pinned) == [rig.staging.arena.address]
    assert pinned._never_freed == [rig.staging.arena]
    pinned._never_freed.clear()
    rig.link.unpin(rig.staging.arena.address, DEVICE)


def test_restored_storages_are_charged_to_the_account_of_their_device(rig):
    other = Account(2 * NBYTES, name="another device")
    asked = []
    rig.mover.account(lambda device: asked.append(device) or other)
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()
    storage = rig.restored(ticket)
    assert set(asked) == {DEVICE}
    assert (other.used_by(RESTORED), rig.budget.used_bytes) == (NBYTES, 0)
    del storage
    assert other.used_bytes == 0
    assert other.try_take(2 * NBYTES, "somebody else")
    assert rig.mover.allocate(ticket) is None
    beyond = rig.mover.allocate(ticket, force=True)
    assert other.used_by(RESTORED) == NBYTES
    del beyond
    assert other.used_by(RESTORED) == 0


def test_a_device_is_told_of_a_few_copies_at_a_time():
    """A driver that is told of more lets the thread that enqueues them wait, and the device idle."""
    rig = Rig(host=64 * MOST_ENQUEUED * KIB)
    count = 3 * MOST_ENQUEUED
    tickets = [rig.spill(number, 4 * KIB, rig.host_tier) for number in range(count)]
    (lane,) = rig.mover._lanes.all()

    def told():
        return sum(what.timed for kind, what, *_ in lane._stream.queue if kind == "record") // 2

    assert told() == MOST_ENQUEUED
    rig.serve()
    assert (told(), len(lane._flying)) == (MOST_ENQUEUED, count - 1)
    rig.settle()
    reads = [rig.fetch(ticket, Priority.PREFETCH) for ticket in tickets]
    settled = [transfer.done for _, transfer in reads]
    assert settled == [True] * MOST_ENQUEUED + [False] * (count - MOST_ENQUEUED)
    rig.serve()
    assert reads[MOST_ENQUEUED][1].done, "the lane's thread goes on"
    assert not reads[MOST_ENQUEUED + 1][1].done
    wrong = []
    for number, (target, transfer) in enumerate(reads):
        while not transfer.done:
            assert rig.serve()
        rig.check(rig.mover.finish(target), number, wrong)
    rig.settle()
    assert not wrong
    rig.close()


def test_a_lane_whose_thread_cannot_be_told_its_device_answers_all_the_same(rig):
    def refuse(device):
        raise RuntimeError("the device is lost")

    rig.link.adopt_thread = refuse
    settings = {"recorder": rig.recorder, "inline": False, "start_thread": start_daemon}
    lane = CopyLane(rig.link, DEVICE, "out", **settings)
    landed, there = queue.SimpleQueue(), bytearray(NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(there))
    rig.link.synchronize = refuse
    source = rig.tensor(1, NBYTES)
    lane.submit(Copy(source, NBYTES, (), "slot", "host", landed.put, address=address))
    assert "the device is lost" in str(landed.get(timeout=10).error)
    lane.close()
    rig.link.finish()
