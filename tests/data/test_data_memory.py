"""Memory that samples are read into: places never overlap, nothing is held beyond the limit, and what is
freed is used again.
"""

import gc
import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.errors import BudgetError, DatasetError
from penstock.data.dataset import FlashDataset
from penstock.data.group import ReadMemory
from penstock.data.loader import FlashLoader
from penstock.io.mapping import HUGE_PAGE_BYTES, PAGE_BYTES
from penstock.store.account import host_account

CAPACITY = 1 << 18


class MemoryMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.memory = ReadMemory(CAPACITY)
        self.live = []  # (blocks, [(start, stop)]), oldest first
        self.lent = []  # (arena, span, array, contents)

    @rule(sizes=st.lists(st.integers(1, CAPACITY // PAGE_BYTES // 3), min_size=1, max_size=5))
    def take(self, sizes):
        sizes = [each * PAGE_BYTES for each in sizes]
        places = self.memory.take(np.array(sizes))
        if places is None:
            assert self.live or self.lent or sum(sizes) > self.memory.limit_bytes
            return
        offsets, blocks = places
        spans = [(int(o), int(o) + n) for o, n in zip(offsets, sizes, strict=True)]
        others = [span for _, held in self.live for span in held]
        others += [span for arena, span, *_ in self.lent if arena is self.memory.arena]
        for start, stop in spans:
            assert 0 <= start < stop <= self.memory.limit_bytes
            assert any(
                block.offset <= start and stop <= block.offset + len(block.array)
                for block in blocks
            )
            assert all(stop <= low or start >= high for low, high in others)
            others.append((start, stop))
        self.live.append((blocks, spans))
        for start, stop in spans:
            self.memory.bytes[start:stop] = np.random.default_rng(start).integers(256)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        blocks, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        blocks.clear()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lend(self, data):
        blocks, _ = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        block = blocks[data.draw(st.integers(0, len(blocks) - 1))]
        array = block.array[:PAGE_BYTES]
        span = (block.offset, block.offset + len(block.array))
        self.lent.append((self.memory.arena, span, array, array.copy()))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def drop(self, data):
        self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))

    @precondition(lambda self: not self.live)
    @rule()
    def renew(self):
        self.memory.renew()

    @rule(limit=st.integers(PAGE_BYTES, CAPACITY))
    def lower(self, limit):
        self.memory.limit_bytes = limit // PAGE_BYTES * PAGE_BYTES

    @invariant()
    def what_is_lent_is_not_written_to(self):
        for *_, array, expected in self.lent:
            assert np.array_equal(array, expected)

    @invariant()
    def all_is_counted(self):
        assert self.memory.held_bytes <= CAPACITY
        assert self.memory.account.used_bytes == self.memory.held_bytes
        if not self.live and not self.lent:
            assert self.memory.used_bytes == 0

    def teardown(self):
        self.memory.close()
        self.what_is_lent_is_not_written_to()


TestReadMemory = MemoryMachine.TestCase


def test_scattered_room_is_used():
    """Extents that do not fit in one piece are put into several."""
    memory = ReadMemory(8 * PAGE_BYTES)
    each = [memory.take(np.array([PAGE_BYTES]))[1] for _ in range(8)]
    for blocks in each[::2]:
        blocks.clear()
    assert memory.take(np.array([2 * PAGE_BYTES])) is None
    _, blocks = memory.take(np.full(4, PAGE_BYTES))
    assert len(blocks) == 4
    memory.close()


def test_what_is_not_needed_any_more_is_freed():
    memory = ReadMemory(4 * HUGE_PAGE_BYTES)
    _, first = memory.take(np.array([3 * HUGE_PAGE_BYTES + PAGE_BYTES]))
    assert memory.held_bytes == 4 * HUGE_PAGE_BYTES
    memory.limit_bytes = HUGE_PAGE_BYTES
    assert memory.take(np.array([PAGE_BYTES])) is None
    first.clear()
    _, second = memory.take(np.array([PAGE_BYTES]))
    assert memory.held_bytes == HUGE_PAGE_BYTES
    assert memory.take(np.array([HUGE_PAGE_BYTES])) is None
    second.clear()
    memory.close()
    assert memory.account.used_bytes == 0


def test_as_much_is_taken_as_the_account_allows(monkeypatch):
    account = host_account()
    limit = account.used_bytes + 4 * HUGE_PAGE_BYTES + PAGE_BYTES
    monkeypatch.setattr(account, "limit_bytes", limit)
    memory = ReadMemory(8 * HUGE_PAGE_BYTES)
    _, first = memory.take(np.array([3 * HUGE_PAGE_BYTES + PAGE_BYTES]))
    assert memory.take(np.array([2 * HUGE_PAGE_BYTES])) is None
    first.clear()
    assert memory.used_bytes == 0
    _, second = memory.take(np.array([4 * HUGE_PAGE_BYTES + PAGE_BYTES]))
    assert memory.take(np.array([PAGE_BYTES])) is None
    second.clear()
    memory.close()


@pytest.mark.parametrize("end", [ReadMemory.renew, ReadMemory.close])
def test_what_is_lent_lasts_and_is_the_holders(end):
    before = host_account().used_bytes
    memory = ReadMemory(4 * HUGE_PAGE_BYTES)
    arena = memory.arena
    _, blocks = memory.take(np.full(4, HUGE_PAGE_BYTES))
    lent = blocks[0].array[:PAGE_BYTES]
    lent[:] = 7
    blocks.clear()
    end(memory)
    assert host_account().used_bytes == before
    assert (lent == 7).all()
    del lent
    gc.collect()
    assert arena.touched_bytes == 0
    memory.close()


@pytest.fixture
def rows(tmp_path):
    """Sixteen files of 1 MiB, each of four samples."""
    for number in range(16):
        np.save(tmp_path / f"{number:02}.npy", np.full((4, 1 << 18), number, np.uint8))
    return tmp_path


def test_batches_that_are_dropped_as_there_is_no_room_are_no_refusal(rows, monkeypatch):
    reader = FlashDataset(rows, memory=8 << 20).resources().reader
    kept = []
    while (pending := reader.start(reader.plan(np.arange(4) + 4 * len(kept)))) is not None:
        group = pending.wait("raise")
        kept.append(group.lend(int(group.offset[0, 0]), 4 << 18))
        group.free()
    del group, pending
    real = ReadMemory.take

    def take(self, sizes):
        found = real(self, sizes)
        if found is None:
            other = threading.Thread(target=kept.clear)  # before it is looked at what is in use
            other.start()
            other.join()
        return found

    monkeypatch.setattr(ReadMemory, "take", take)
    assert reader.start(reader.plan(np.arange(4))).wait("raise").nbytes.sum() == 4 << 18


def test_errors_that_are_kept_keep_no_memory(rows):
    data = FlashDataset(rows, memory=6 << 20)
    data[0]
    for path in sorted(rows.iterdir())[1:]:
        if path.suffix == ".npy":
            path.rename(path.with_suffix(".gone"))
    errors = []
    for number in range(1, 16):
        with pytest.raises(DatasetError) as caught:
            data.__getitems__([4 * number + i for i in range(4)])
        errors.append(caught.value)
    assert data.resources().reader.memory.used_bytes == 0


@pytest.mark.parametrize("free_mib", [3, 5, 7, 9])
def test_a_group_of_several_extents_that_the_account_admits_in_part_is_refused(
    free_mib, rows, monkeypatch
):
    data = FlashDataset(rows, memory=96 << 20)
    account = host_account()
    with FlashLoader(data, 64, order="full") as loader:
        monkeypatch.setattr(account, "limit_bytes", account.used_bytes + (free_mib << 20))
        with pytest.raises(BudgetError):
            list(loader)
