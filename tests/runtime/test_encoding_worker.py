"""The thread that encodes and decodes: order, slots, cancelling, faults, closing, forks."""

import errno
import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest
from encoding_rig import (
    FLOATS,
    PIECE,
    GatedCodec,
    GateTier,
    Rig,
    bytes_of,
    floats,
    outcome,
    storage_of,
)

from penstock.codec import registry
from penstock.core.errors import (
    ChecksumError,
    ClosedError,
    CodecError,
    ConfigError,
    NoSpaceError,
    TransferError,
)
from penstock.core.units import MIB
from penstock.io.engine import Priority
from penstock.runtime.encoding import SLOTS
from penstock.store import FaultyTier, LogEntry, LoggedTier
from penstock.store.frames import SCRATCH as OWNER
from penstock.testing.engines import run_in_fork
from penstock.testing.tier_machine import wait_until

ENCODING_SLOTS = SLOTS // 2
MANY = 3 * SLOTS
"""Pieces of a storage, or storages: more than there are slots."""


@pytest.fixture
def gated():
    """A rig whose tier lets transfers end one by one."""
    with Rig(wrap=GateTier) as rig:
        yield rig
        rig.tier.open()
        rig.stage.close()
        assert rig.tier.held_bytes == 0
        assert rig.budget.used_by(OWNER) == 0


@pytest.fixture
def codec(monkeypatch):
    """Everybody's codec: stands before each piece until it is let through."""
    codec = GatedCodec(registry.get("zero-value"))
    monkeypatch.setattr(registry, "get", lambda name: codec)
    return codec


@pytest.fixture
def slow(codec):
    """A rig with that codec."""
    with Rig() as rig:
        yield rig
        codec.open()
        rig.stage.close()
        assert rig.tier.held_bytes == 0


def faulty(**options):
    return lambda inner: FaultyTier(inner, **options)


# -- slots ----------------------------------------------------------------------------------------


def test_writes_that_stand_still_leave_slots_for_reads(gated):
    """A tier that writes nothing for a while: encoding stops at half of the slots; reads go on."""
    gated.tier._ops.discard("write")
    content = floats(MANY * PIECE, seed=1)
    old = gated.written(content)
    gated.tier._ops = {"write"}
    tickets = [gated.begin(floats(2 * PIECE, seed=index)) for index in range(MANY)]
    gated.tier.wait_for(ENCODING_SLOTS)
    for _ in range(3):
        assert bytes_of(gated.restored(old)) == content
    assert len(gated.tier.held) == ENCODING_SLOTS
    assert sum(len(ticket.parts) for ticket in tickets) == ENCODING_SLOTS
    gated.tier.open()
    for index, ticket in enumerate(tickets):
        ticket.written.wait(20)
        assert bytes_of(gated.restored(ticket)) == floats(2 * PIECE, seed=index)
    gated.discard(old, *tickets)


def test_more_reads_than_slots(gated):
    """All slots may be taken by reads; each that ends makes room for the next."""
    gated.tier._ops = {"read"}
    contents = [floats(3 * PIECE + index, seed=index) for index in range(MANY)]
    tickets = [gated.written(content) for content in contents]
    reads = [gated.reading(ticket) for ticket in tickets]
    late = gated.begin(floats(PIECE))

    def all_read():
        return all(transfer.done for _, transfer in reads)

    while not all_read():
        wait_until(lambda: gated.tier.held or all_read())
        assert len(gated.tier.held) <= SLOTS
        gated.tier.let_through(len(gated.tier.held))
    for content, (target, transfer) in zip(contents, reads, strict=True):
        transfer.wait(20)
        assert bytes_of(gated.mover.finish(target)) == content
    late.written.wait(20)
    gated.discard(late, *tickets)


def test_threads_that_write_and_read_at_once():
    problems = []

    def work(number):
        try:
            for index in range(6):
                content = floats(MANY * PIECE - 100 * index, seed=10 * number + index)
                ticket = rig.written(content)
                if bytes_of(rig.restored(ticket)) != content:
                    problems.append((number, index))
                rig.discard(ticket)
        except Exception as error:  # noqa: BLE001  (the test's to see)
            problems.append(error)

    with Rig() as rig:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        assert rig.tier.held_bytes == 0


# -- order ----------------------------------------------------------------------------------------


def test_a_demand_goes_before_a_prefetch_and_that_before_encoding(slow, codec):
    contents = [floats(2 * PIECE, seed=index) for index in range(2)]
    codec.let_through(4)
    first, second = tickets = [slow.written(content) for content in contents]
    busy = slow.begin(floats(PIECE))  # the thread is at it
    for _ in range(5):
        codec.wait_for_call()
    behind = slow.begin(floats(4 * MANY * PIECE))  # some of it while frames are on their way
    order = []
    reads = []
    for ticket, priority in ((first, Priority.PREFETCH), (second, Priority.DEMAND)):
        target, transfer = slow.reading(ticket, priority)
        transfer.add_done_callback(lambda _, name=priority: order.append(name))
        reads.append((target, transfer))
    behind.written.add_done_callback(lambda _: order.append("encoded"))
    codec.open()
    for content, (target, transfer) in zip(contents, reads, strict=True):
        transfer.wait(20)
        assert bytes_of(slow.mover.finish(target)) == content
    behind.written.wait(20)
    assert order == [Priority.DEMAND, Priority.PREFETCH, "encoded"]
    slow.discard(busy, behind, *tickets)


def test_promoting_what_has_not_begun(slow, codec):
    codec.let_through(2)
    tickets = [slow.written(floats(PIECE, seed=index)) for index in range(2)]
    busy = slow.begin(floats(PIECE))
    for _ in range(3):
        codec.wait_for_call()
    order = []
    reads = [slow.reading(ticket) for ticket in tickets]
    for index, (_, transfer) in enumerate(reads):
        transfer.add_done_callback(lambda _, index=index: order.append(index))
    reads[1][1].promote(Priority.DEMAND)
    reads[1][1].promote(Priority.WRITE_BEHIND)  # a lower one is ignored
    codec.open()
    for target, transfer in reads:
        transfer.wait(20)
        slow.mover.drop(target)
    assert order == [1, 0]
    busy.written.wait(20)  # before it is discarded, which would cancel what has not been written
    slow.discard(busy, *tickets)


def test_promoting_reaches_the_frames_on_their_way(gated):
    gated.tier._ops = {"read"}
    ticket = gated.written(floats(MANY * PIECE))
    target, transfer = gated.reading(ticket)
    gated.tier.wait_for(SLOTS)
    transfer.promote(Priority.DEMAND)
    assert gated.tier.promoted == [Priority.DEMAND] * SLOTS
    gated.tier.open()
    transfer.wait(20)
    transfer.promote(Priority.DEMAND)
    gated.mover.drop(target)
    gated.discard(ticket)


def test_the_tier_is_told_the_priority():
    log: list[LogEntry] = []
    with Rig(wrap=lambda inner: LoggedTier(inner, log)) as rig:
        ticket = rig.written(floats(3 * PIECE))
        target, transfer = rig.reading(ticket, Priority.DEMAND)
        transfer.wait(20)
        assert [each.priority for each in log if each.what == "read"] == [Priority.DEMAND] * 3
        rig.mover.drop(target)


# -- cancelling and discarding --------------------------------------------------------------------


def test_cancelled_before_it_began(slow, codec):
    """TRAPS rule 17: the caller keeps the source, and at once."""
    busy = slow.begin(floats(2 * PIECE))
    codec.wait_for_call()
    source = storage_of(floats(2 * PIECE))
    alive = weakref.ref(source)
    ticket = slow.stage.write(source, slow.tier, "slot", FLOATS)
    del source
    assert alive() is not None
    assert ticket.written.cancel()
    assert alive() is None
    assert isinstance(outcome(ticket.written), CancelledError)
    assert not ticket.written.cancel()
    assert not ticket.parts
    codec.open()
    busy.written.wait(20)
    slow.discard(ticket, busy)


def test_cancelled_while_a_piece_is_encoded(slow, codec):
    ticket = slow.begin(floats(5 * PIECE))
    codec.wait_for_call()
    codec.let_through(2)
    codec.wait_for_call()
    codec.wait_for_call()
    assert not ticket.written.cancel()
    assert not ticket.written.done
    codec.open()
    assert isinstance(outcome(ticket.written), CancelledError)
    assert slow.tier.held_bytes == 0
    assert codec.log == ["encode"] * 3
    slow.discard(ticket)


@pytest.mark.parametrize("cancellable", [True, False])
def test_cancelled_while_frames_are_written(cancellable):
    """The tier may still cancel some, or have to end them; either way nothing is left."""
    with Rig(wrap=lambda inner: GateTier(inner, cancellable=cancellable)) as rig:
        ticket = rig.begin(floats(MANY * PIECE))
        rig.tier.wait_for(ENCODING_SLOTS)
        rig.tier.let_through(2)
        rig.tier.wait_for(ENCODING_SLOTS)
        ticket.written.cancel()
        if not cancellable:
            assert not ticket.written.done
            rig.tier.open()
        assert isinstance(outcome(ticket.written), CancelledError)
        assert rig.tier.held_bytes == 0
        rig.tier.open()
        rig.discard(rig.written(floats(MANY * PIECE)))


def test_who_has_waited_for_a_cancelled_write_finds_the_tier_empty(gated):
    """Also of frames that were written before others that are cancelled only now."""
    ticket = gated.begin(floats(2 * PIECE))
    gated.tier.wait_for(2)
    gated.tier.let_through(which=1)
    held = []
    ticket.written.add_done_callback(lambda _: held.append(gated.tier.held_bytes))
    ticket.written.cancel()
    assert isinstance(outcome(ticket.written), CancelledError)
    assert held == [0]


def test_cancelled_too_late(gated):
    gated.tier.open()
    content = floats(2 * PIECE)
    ticket = gated.written(content)
    assert not ticket.written.cancel()
    assert bytes_of(gated.restored(ticket)) == content
    gated.discard(ticket)


def test_discarded_at_every_stage_of_writing():
    """Whatever was let through by then, nothing of it stays."""
    for stage in range(7):
        with Rig(wrap=GateTier) as rig:
            ticket = rig.begin(floats(6 * PIECE))
            for _ in range(stage):
                rig.tier.wait_for(1)
                rig.tier.let_through()
            rig.discard(ticket)
            outcome(ticket.written)
            wait_until(lambda: rig.tier.held_bytes == 0)
            rig.tier.open()


def test_discarded_at_every_stage_of_reading():
    for stage in range(MANY + 1):
        with Rig(wrap=lambda inner: GateTier(inner, ops=["read"], cancellable=False)) as rig:
            ticket = rig.written(floats(MANY * PIECE))
            target, transfer = rig.reading(ticket)
            for _ in range(stage):
                rig.tier.wait_for(1)
                rig.tier.let_through()
            rig.discard(ticket)
            rig.tier.open()
            error = outcome(transfer)
            assert isinstance(error, CancelledError) if stage < MANY else True
            rig.mover.drop(target)
            wait_until(lambda: rig.tier.held_bytes == 0)
            assert rig.mover.used_bytes(rig.budget) == 0


def test_a_read_can_be_cancelled(gated):
    gated.tier._ops = {"read"}
    content = floats(MANY * PIECE)
    ticket = gated.written(content)
    target, transfer = gated.reading(ticket)
    gated.tier.wait_for(SLOTS)
    transfer.cancel()
    assert isinstance(outcome(transfer), CancelledError)
    gated.mover.drop(target)
    gated.tier.open()
    assert bytes_of(gated.restored(ticket)) == content
    gated.discard(ticket)


@pytest.mark.parametrize("what", ["cancel", "promote"])
def test_a_read_that_is_spoken_to_just_as_a_frame_is_asked_for(gated, what):
    gated.tier._ops = {"read"}
    ticket = gated.written(floats(MANY * PIECE))
    begun, spoken = threading.Event(), threading.Event()

    def before_read():
        begun.set()
        assert spoken.wait(20)

    gated.tier.before_read = before_read
    target, transfer = gated.reading(ticket)
    assert begun.wait(20)
    _ = transfer.cancel() if what == "cancel" else transfer.promote(Priority.DEMAND)
    spoken.set()
    if what == "cancel":
        assert isinstance(outcome(transfer), CancelledError)
    else:
        gated.tier.wait_for(SLOTS)
        assert gated.tier.promoted == [Priority.DEMAND]  # the others are asked for with it
        gated.tier.open()
        transfer.wait(20)
    gated.mover.drop(target)
    gated.discard(ticket)


def test_frames_that_have_arrived_for_nobody(slow, codec):
    """Their slots come back, and who waits need not wait for them to be decoded."""
    codec.let_through(SLOTS)
    ticket = slow.written(floats(SLOTS * PIECE))
    target, transfer = slow.reading(ticket)
    for _ in range(SLOTS + 1):
        codec.wait_for_call()
    (job,) = slow.stage._worker._live
    wait_until(lambda: len(job.arrived) == SLOTS - 1)
    assert slow.free_slots() == 0
    assert not transfer.cancel()
    assert slow.free_slots() == SLOTS - 1
    codec.let_through()
    assert isinstance(outcome(transfer), CancelledError)
    assert slow.free_slots() == SLOTS
    assert codec.log.count("decode") == 1
    slow.mover.drop(target)
    slow.discard(ticket)


def test_the_source_is_let_go_when_it_is_written(gated):
    source = storage_of(floats(2 * PIECE))
    alive = weakref.ref(source)
    ticket = gated.stage.write(source, gated.tier, "slot", FLOATS)
    del source
    seen = []
    ticket.written.add_done_callback(lambda _: seen.append(alive()))
    gated.tier.wait_for(2)
    assert alive() is not None
    gated.tier.let_through(2)
    ticket.written.wait(20)
    assert seen == [None]
    gated.discard(ticket)


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raise", "settle"])
@pytest.mark.parametrize("index", range(7))
def test_a_part_that_cannot_be_written(mode, index):
    """The first error is the storage's; the source is kept till then; nothing is left in the tier."""
    with Rig(wrap=faulty(fail_at={"write": index}, mode=mode)) as rig:
        content = floats(7 * PIECE, seed=index)
        source = storage_of(content)
        ticket = rig.stage.write(source, rig.tier, "slot", FLOATS)
        error = outcome(ticket.written)
        assert type(error) is (NoSpaceError if mode == "raise" else TransferError)
        assert rig.tier.held_bytes == 0
        assert bytes_of(source) == content
        with pytest.raises(ConfigError):
            rig.stage.read(rig.tier, ticket, None, Priority.DEMAND)
        rig.discard(ticket)
        again = rig.written(content)
        assert bytes_of(rig.restored(again)) == content
        rig.discard(again)
        assert rig.tier.held_bytes == 0


def test_a_full_tier():
    with Rig(capacity=2 * MIB) as rig:
        tickets = [rig.begin(floats(MIB, seed=seed)) for seed in range(8)]
        errors = [outcome(ticket.written) for ticket in tickets]
        assert any(isinstance(error, NoSpaceError) for error in errors)
        for seed, ticket in enumerate(tickets):
            if errors[seed] is None:
                assert bytes_of(rig.restored(ticket)) == floats(MIB, seed=seed)
        rig.discard(*tickets)
        assert rig.tier.held_bytes == 0


@pytest.mark.parametrize("mode", ["raise", "settle"])
@pytest.mark.parametrize("index", range(0, MANY, 5))
def test_a_part_that_cannot_be_read(mode, index):
    error = TransferError(errno=errno.EIO, op="read", path="x", offset_bytes=0, nbytes=0)
    with Rig(wrap=faulty(fail_at={"read": index}, mode=mode, error=error)) as rig:
        content = floats(MANY * PIECE)
        ticket = rig.written(content)
        target, transfer = rig.reading(ticket)
        assert outcome(transfer) is error
        rig.mover.drop(target)
        assert bytes_of(rig.restored(ticket)) == content
        rig.discard(ticket)
        assert rig.tier.held_bytes == 0


@pytest.mark.parametrize("index", [0, 3, 6])
def test_a_damaged_frame_is_an_error(index):
    with Rig(wrap=faulty(fail_at={"read": index}, mode="corrupt")) as rig:
        ticket = rig.written(floats(7 * PIECE))
        target, transfer = rig.reading(ticket)
        assert isinstance(outcome(transfer), ChecksumError)
        rig.mover.drop(target)


def test_a_damaged_frame_is_an_error_without_checksums_too(monkeypatch):
    """As far as a codec can know: the header of each frame says what it is."""
    monkeypatch.setenv("PENSTOCK_VERIFY", "off")
    with Rig(wrap=faulty(fail_at={"read": 2}, mode="corrupt")) as rig:
        ticket = rig.written(floats(7 * PIECE), label="conv1[0]")
        target, transfer = rig.reading(ticket)
        error = outcome(transfer)
        assert isinstance(error, CodecError)
        assert "conv1[0]: piece 2 of 7, as read from tier host" in str(error)
        rig.mover.drop(target)


@pytest.mark.parametrize("after", [0, 2])
def test_a_codec_that_fails(slow, codec, after):
    """It should not; whatever it raises, who waits gets it, and the thread goes on."""
    ticket = slow.begin(floats(4 * PIECE))
    for _ in range(after):
        codec.wait_for_call()
        codec.let_through()
    codec.wait_for_call()
    codec.error = MemoryError("no memory for a codec")
    frames = []
    ticket.written.add_done_callback(lambda done: frames.append(done.error.__traceback__))
    codec.let_through()
    assert outcome(ticket.written) is codec.error
    assert frames == [None], "an error that is kept must not keep what its frames hold"
    assert slow.tier.held_bytes == 0
    codec.error = None
    codec.open()
    content = floats(4 * PIECE)
    again = slow.written(content)
    codec.error = MemoryError("again")
    target, transfer = slow.reading(again)
    assert outcome(transfer) is codec.error
    slow.mover.drop(target)
    codec.error = None
    assert bytes_of(slow.restored(again)) == content
    slow.discard(ticket, again)


# -- the end --------------------------------------------------------------------------------------


def test_close_cancels_what_waits_and_ends_what_has_begun(slow, codec):
    contents = [floats(3 * PIECE, seed=index) for index in range(4)]
    codec.let_through(3)
    old = slow.written(contents[0])
    begun = slow.begin(contents[1])
    for _ in range(4):
        codec.wait_for_call()
    waiting = slow.begin(contents[2])
    target, read = slow.reading(old)
    closing = threading.Thread(target=slow.stage.close)
    closing.start()
    assert isinstance(outcome(waiting.written), CancelledError)
    assert isinstance(outcome(read), CancelledError)
    assert closing.is_alive()
    codec.open()
    closing.join(20)
    assert not closing.is_alive()
    assert begun.written.done
    assert begun.written.error is None
    slow.mover.drop(target)
    gc.collect()
    assert slow.budget.used_bytes == 0
    with pytest.raises(ClosedError):
        slow.stage.read(slow.tier, begun, target, Priority.DEMAND)
    slow.discard(old, begun, waiting)


def test_a_tier_that_is_closed_first():
    """As a session does: what was under way ends, with an error that says so."""
    rig = Rig(wrap=lambda inner: GateTier(inner, ops=["write"]))
    tickets = [rig.begin(floats(MANY * PIECE, seed=index)) for index in range(3)]
    rig.tier.wait_for(ENCODING_SLOTS)
    rig.tier.close()
    for ticket in tickets:
        assert isinstance(outcome(ticket.written), ClosedError | CancelledError)
    rig.close()
    gc.collect()
    assert rig.budget.used_bytes == 0


def test_a_forked_child_does_nothing(gated):
    content = floats(MANY * PIECE)
    ticket = gated.begin(content)
    gated.tier.wait_for(ENCODING_SLOTS)
    source = storage_of(content)

    def in_child():
        with pytest.raises(ClosedError, match="belongs to process"):
            gated.stage.write(source, gated.tier, "slot", FLOATS)
        assert not ticket.written.cancel()
        gated.discard(ticket)
        gated.stage.close()
        gated.stage.__dict__.clear()
        gated.mover.__dict__.clear()
        gc.collect()

    run_in_fork(in_child)
    gated.tier.open()
    ticket.written.wait(20)
    assert bytes_of(gated.restored(ticket)) == content
    gated.discard(ticket)
