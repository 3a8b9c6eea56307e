"""Making room: whether idle pages go, or a write is waited for."""

import threading
from types import SimpleNamespace

import pytest

from penstock.core.errors import BudgetError
from penstock.core.units import MIB
from penstock.observe.clock import RealClock
from penstock.observe.recorder import Recorder
from penstock.runtime import eviction
from penstock.runtime.compute_time import ComputeTime
from penstock.runtime.eviction import Eviction
from penstock.runtime.orders import Orders
from penstock.runtime.table import SAVED, StorageTable
from penstock.store.account import Account

ARENA = "arena"


class Rig:
    """A full budget: half is being written, half are idle pages of the arena."""

    def __init__(self, *, write_ns_per_byte, touch_ns_per_byte, timer=None, parent=None):
        self.budget = Account(8 * MIB, parent=parent)
        assert self.budget.try_take(4 * MIB, SAVED)
        assert self.budget.try_take(4 * MIB, ARENA)
        self.trimmed = []
        table = StorageTable(self.budget)
        table.promote_all = lambda: pytest.fail("nothing that is kept has to go")
        self.transfers = SimpleNamespace(
            table=table,
            closed=False,
            writing=1,
            writing_bytes=4 * MIB,
            write_ns_per_byte=write_ns_per_byte,
            active=SimpleNamespace(orders=Orders()),
            mover=SimpleNamespace(
                trim=self.trim, retouch_ns=lambda nbytes: touch_ns_per_byte * nbytes
            ),
        )
        self.time = ComputeTime(RealClock(), timer)
        self.room = Eviction(
            budget=self.budget,
            transfers=self.transfers,
            recorder=Recorder(),
            time=self.time,
        )

    def trim(self, nbytes):
        self.trimmed.append(nbytes)
        self.budget.free(nbytes, ARENA)
        return nbytes

    def end_write(self):
        with self.transfers.table.lock:
            self.budget.free(4 * MIB, SAVED)
            self.transfers.writing = self.transfers.writing_bytes = 0
            self.transfers.table.changed.notify_all()

    def take(self, nbytes):
        self.room.take(nbytes, "test", name="it", of_pass=None, saved=None)


def test_pages_go_where_touching_them_again_is_quicker_than_writing():
    rig = Rig(write_ns_per_byte=1.0, touch_ns_per_byte=0.1)
    rig.take(2 * MIB)
    assert rig.trimmed == [2 * MIB]


def test_a_write_is_waited_for_where_that_is_quicker():
    rig = Rig(write_ns_per_byte=0.1, touch_ns_per_byte=1.0)
    thread = threading.Timer(0.05, rig.end_write)
    thread.start()
    rig.take(2 * MIB)
    thread.join()
    assert rig.trimmed == []
    assert rig.time.stalled_ns > 0


def test_pages_go_where_writes_would_not_free_enough():
    rig = Rig(write_ns_per_byte=0.1, touch_ns_per_byte=1.0)
    rig.transfers.writing_bytes = MIB
    rig.take(2 * MIB)
    assert rig.trimmed == [2 * MIB]


def test_no_more_pages_go_than_are_missing():
    rig = Rig(write_ns_per_byte=1.0, touch_ns_per_byte=0.0)
    rig.budget.free(MIB, ARENA)
    rig.take(3 * MIB)
    assert rig.trimmed == [2 * MIB]


def test_the_timer_of_a_device_is_told_of_waits_and_of_nothing_else():
    told = []
    timer = SimpleNamespace(
        wait_begins=lambda: told.append("begins") or (1,), wait_ends=told.append
    )
    rig = Rig(write_ns_per_byte=1.0, touch_ns_per_byte=0.1, timer=timer)
    rig.take(2 * MIB)
    assert told == ["begins", (1,)]
    rig.budget.free(2 * MIB, ARENA)
    rig.take(1 * MIB)
    assert told == ["begins", (1,)]


@pytest.fixture
def shared():
    """A rig in whose memory a checkpoint holds 12 MiB of 16, with 3 MiB that cannot be moved."""
    memory = Account(16 * MIB, name="memory")
    rig = Rig(write_ns_per_byte=0.0, touch_ns_per_byte=0.0, parent=memory)
    rig.memory = memory
    rig.end_write()
    rig.budget.free(4 * MIB, ARENA)
    rig.transfers.table.promote_all = lambda: None
    vars(rig.transfers).update(restored={}, tiers={}, failed=False, reading=0)
    rig.transfers.mover.trim = lambda nbytes: 0
    memory.force(12 * MIB, "a checkpoint")
    rig.budget.force(3 * MIB, SAVED)
    of_pass = SimpleNamespace(needed_last=tuple)
    rig.take = lambda n: rig.room.take(n, "test", name="it", of_pass=of_pass, saved=None)
    return rig


def test_memory_of_other_products_is_waited_for(shared, monkeypatch):
    thread = threading.Timer(0.05, shared.memory.free, (4 * MIB, "a checkpoint"))
    thread.start()
    shared.take(2 * MIB)
    thread.join()
    monkeypatch.setattr(eviction, "OTHERS_PATIENCE_S", 0.01)
    shared.memory.force(MIB, "a checkpoint")
    with pytest.raises(BudgetError, match=r"in the memory budget.*a checkpoint 9.00 MiB, device 5"):
        shared.take(3 * MIB)


def test_no_more_memory_of_other_products_is_waited_for_than_is_missing(shared, monkeypatch):
    """Less than a huge page is enough for what needs no more."""
    monkeypatch.setattr(eviction, "OTHERS_PATIENCE_S", 1e6)
    threading.Timer(0.05, shared.memory.free, (MIB // 2, "a checkpoint")).start()
    shared.take(3 * MIB // 2)
    assert shared.memory.used_bytes <= 16 * MIB


@pytest.mark.parametrize("when", ["before the others are looked at", "while another asks"])
def test_memory_that_others_free_at_the_last_moment_is_taken(shared, monkeypatch, when):
    """Neither is a reason to refuse: it fits now, or as soon as the other has what it asked for."""
    memory = shared.memory
    if when == "while another asks":
        memory.free(6 * MIB, "a checkpoint")  # 7 MiB are free, of which 6 are asked for
        monkeypatch.setattr(memory, "_wanted_bytes", 6 * MIB)
        shared.budget.yield_by(lambda nbytes: None)

        def end():
            with memory.changed:
                memory._wanted_bytes = 0
                memory.changed.notify_all()

        threading.Timer(0.05, end).start()
    else:
        shared.transfers.table.promote_all = lambda: memory.free(4 * MIB, "a checkpoint")
    shared.take(2 * MIB)
    assert memory.used_bytes <= 16 * MIB


def test_others_that_have_been_waited_for_in_vain_are_not_waited_for_again(shared, monkeypatch):
    """A limit that was found is exceeded then; each tensor of a step would wait otherwise."""
    shared.budget.advisory = True
    monkeypatch.setattr(eviction, "OTHERS_PATIENCE_S", 0.01)
    shared.take(2 * MIB)
    assert shared.memory.used_bytes == 17 * MIB
    monkeypatch.setattr(eviction, "OTHERS_PATIENCE_S", 1e6)
    shared.take(MIB)
    shared.memory.force(MIB, "a checkpoint")
    shared.take(MIB)
    assert shared.memory.used_bytes == 20 * MIB
    shared.memory.free(3 * MIB, "a checkpoint")
    threading.Timer(0.05, shared.memory.free, (3 * MIB, "a checkpoint")).start()
    shared.take(MIB // 2)
    assert shared.memory.used_bytes <= 16 * MIB, "they hold less, and so were waited for"
