"""What the public methods of every tier do, on a tier whose transfers the test settles."""

import threading
from concurrent.futures import CancelledError

import pytest

from penstock.core.errors import ChecksumError, ClosedError, ConfigError, NoSpaceError
from penstock.io.engine import Transfer
from penstock.observe.clock import ManualClock
from penstock.observe.recorder import Recorder, Stage
from penstock.store import Tier, TierSpec
from penstock.testing.engines import aligned, run_in_fork


class HandTier(Tier):
    """Moves nothing; remembers what it was asked to do."""

    def __init__(self, granule_bytes=512):
        spec = TierSpec(
            name="hand",
            kind="flash",
            capacity_bytes=1 << 20,
            granule_bytes=granule_bytes,
            where="nowhere",
        )
        super().__init__(spec, recorder=Recorder(clock=ManualClock()))
        self.full = False
        self.cancellable = True
        self.moves = []
        self.transfers = []
        self.discarded = []
        self.closed = 0

    def _allocate(self, nbytes):
        if self.full:
            raise NoSpaceError(errno=28, op="allocate", path="x", offset_bytes=0, nbytes=nbytes)
        return f"place {len(self.transfers)}"

    def _write(self, place, address, nbytes, keep_alive, priority):
        return self._move(address, nbytes)

    def _read(self, place, address, nbytes, keep_alive, priority):
        if self.full:
            raise ClosedError("the engine is closed")
        return self._move(address, nbytes)

    def _move(self, address, nbytes):
        self.moves.append((address, nbytes))
        self.transfers.append(Transfer(nbytes, cancel=lambda _: self.cancellable))
        return self.transfers[-1]

    def _discard(self, place):
        self.discarded.append(place)

    def _close(self):
        assert all(transfer.done for transfer in self.transfers)
        self.closed += 1


@pytest.fixture
def tier():
    return HandTier()


@pytest.fixture
def memory():
    return aligned(16384, seed=1)


def write(tier, memory, start=0, nbytes=100):
    return tier.write(memory.ctypes.data + start, nbytes, keep_alive=memory, label="x")


def written(tier, memory):
    ticket = write(tier, memory)
    tier.transfers[-1].settle()
    return ticket


def test_windows(tier, memory):
    base = memory.ctypes.data
    for start, nbytes, low, high in (
        (0, 512, 0, 512),
        (0, 1, 0, 512),
        (511, 1, 0, 512),
        (511, 2, 0, 1024),
        (512, 513, 512, 1536),
    ):
        window = tier.window(base + start, nbytes)
        assert (window.address, window.nbytes) == (base + low, high - low)
        assert window.address + window.skew == base + start
    write(tier, memory, 600, 1000)
    assert tier.moves == [(base + 512, 1536)]


def test_held_bytes_follow_the_windows(tier, memory):
    one, two = write(tier, memory, 0, 100), write(tier, memory, 500, 100)
    assert tier.held_bytes == 512 + 1024
    tier.transfers[0].settle()
    tier.discard(one)
    assert tier.held_bytes == 1024
    tier.transfers[1].settle(OSError("EIO"))
    assert tier.held_bytes == 1024  # a failed write keeps its place until it is discarded
    tier.discard(two)
    assert tier.held_bytes == 0
    assert tier.discarded == ["place 0", "place 1"]


def test_a_refused_write_leaves_nothing(tier, memory):
    tier.full = True
    with pytest.raises(NoSpaceError):
        write(tier, memory)
    assert tier.held_bytes == 0
    tier.close()
    assert tier.closed == 1


def test_a_refused_read_leaves_nothing(tier, memory):
    ticket = written(tier, memory)
    tier.full = True
    with pytest.raises(ClosedError):
        tier.read(ticket, memory.ctypes.data, keep_alive=memory)
    tier.discard(ticket)
    assert tier.discarded
    tier.close()
    assert tier.closed == 1


def test_the_room_is_back_before_the_waiter_knows(tier, memory):
    """Else who has waited, discards and writes again could be told that there is no room."""
    ticket = write(tier, memory)
    tier.discard(ticket)  # cancels the write
    assert tier.discarded == ["place 0"]
    tier.cancellable = False
    ticket = write(tier, memory)
    found = []
    ticket.written.add_done_callback(lambda _: found.append((tier.held_bytes, len(tier.discarded))))
    tier.discard(ticket)
    assert tier.held_bytes == 512
    tier.transfers[-1].settle()
    assert found == [(0, 2)]


def test_discarded_while_read_twice(tier, memory):
    ticket = written(tier, memory)
    tier.cancellable = False
    reads = [tier.read(ticket, memory.ctypes.data, keep_alive=memory) for _ in range(2)]
    tier.discard(ticket)
    tier.discard(ticket)
    tier.transfers[1].settle()
    assert not tier.discarded
    tier.transfers[2].settle()
    assert tier.discarded == ["place 0"]
    assert all(transfer.error is None for transfer in reads)


def test_a_read_that_meets_a_discard_is_refused(tier, memory):
    """Checked and counted under one lock: no read of a place that is another's already."""
    for _ in range(200):
        ticket = written(tier, memory)
        start = threading.Barrier(2)

        def discard(ticket=ticket, start=start):
            start.wait()
            tier.discard(ticket)

        thread = threading.Thread(target=discard)
        thread.start()
        start.wait()
        try:
            tier.read(ticket, memory.ctypes.data, keep_alive=memory)
        except ConfigError:
            thread.join()
            assert ticket.place in tier.discarded
        else:
            thread.join()
            assert ticket.place not in tier.discarded
            tier.transfers[-1].settle()
            assert ticket.place in tier.discarded


def test_wrong_bytes_are_an_error_of_the_read(tier, memory):
    ticket = write(tier, memory, 3, 100)
    tier.transfers[0].settle()
    target = aligned(512)
    target[:] = memory[:512]
    transfer = tier.read(ticket, target.ctypes.data, keep_alive=target)
    tier.transfers[1].settle()
    assert transfer.error is None
    for index, wrong in ((2, False), (3, True), (102, True), (103, False)):
        target[:] = memory[:512]
        target[index] ^= 1
        transfer = tier.read(ticket, target.ctypes.data, keep_alive=target)
        tier.transfers[-1].settle()
        assert isinstance(transfer.error, ChecksumError) == wrong
    assert "place 0" in str(transfer.error) or transfer.error is None


def test_spans_and_counters(tier, memory):
    clock = tier.recorder.clock
    write(tier, memory, 500, 100)
    clock.advance(7)
    tier.transfers[0].settle()
    write(tier, memory)
    tier.transfers[1].settle(OSError("EIO"))
    write(tier, memory).written.cancel()
    totals = tier.recorder.snapshot()
    flow = totals.flows[Stage.WRITE, "hand"]
    assert (flow.count, flow.nbytes, flow.busy_ns) == (1, 1024, 7)
    assert totals.counters == {"write.failed.hand": 1, "write.cancelled.hand": 1}


class TestClose:
    def test_cancels_what_has_not_begun(self, tier, memory):
        ticket = written(tier, memory)
        reading = tier.read(ticket, memory.ctypes.data, keep_alive=memory)
        writing = write(tier, memory)
        tier.close()
        assert isinstance(reading.error, CancelledError)
        assert isinstance(writing.written.error, CancelledError)
        assert tier.closed == 1

    def test_waits_for_what_has(self, tier, memory):
        tier.cancellable = False
        ticket = write(tier, memory)
        thread = threading.Thread(target=tier.close)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        assert not tier.closed
        with pytest.raises(ClosedError, match=r"tier hand \(nowhere\) is closed"):
            write(tier, memory)
        tier.transfers[0].settle()
        thread.join(20)
        assert tier.closed == 1
        assert ticket.written.wait(0) == 512

    def test_twice_and_discards_after_it(self, tier, memory):
        ticket = written(tier, memory)
        tier.close()
        tier.close()
        assert tier.closed == 1
        tier.discard(ticket)
        assert not tier.discarded  # close has released everything
        with pytest.raises(ClosedError):
            tier.read(ticket, memory.ctypes.data, keep_alive=memory)


def test_a_forked_child_is_refused_though_another_thread_had_the_lock():
    tier, memory = HandTier(), aligned(512)

    def child():
        for action in (
            lambda: tier.write(memory.ctypes.data, 512, keep_alive=memory, label="x"),
            lambda: tier.read(ticket, memory.ctypes.data, keep_alive=memory),
        ):
            with pytest.raises(ClosedError, match="was forked"):
                action()

    ticket = tier.write(memory.ctypes.data, 512, keep_alive=memory, label="x")
    tier.transfers[-1].settle()
    with tier._lock:
        run_in_fork(child)
