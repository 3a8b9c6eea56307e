"""The extent allocator against a map of single bytes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.io.extents import ExtentAllocator
from tries import tries


def test_everything_is_free_at_first():
    extents = ExtentAllocator(100)
    assert (extents.free_bytes, extents.largest_free_bytes) == (100, 100)
    assert list(extents.extents()) == [(0, 100)]
    assert ExtentAllocator().largest_free_bytes == 0
    assert ExtentAllocator().allocate(1) is None


def test_the_smallest_that_fits_is_taken_and_the_lowest_of_equals():
    extents = ExtentAllocator(100)
    extents.take(0, 100)
    for offset, nbytes in ((0, 20), (30, 10), (50, 10), (70, 30)):
        extents.free(offset, nbytes)
    assert extents.allocate(10) == 30
    assert extents.allocate(10) == 50
    assert extents.allocate(21) == 70
    assert extents.allocate(11) == 0
    assert extents.allocate(10) is None
    assert list(extents.extents()) == [(11, 20), (91, 100)]


def test_alignment_leaves_the_gap_free():
    extents = ExtentAllocator(100)
    assert extents.allocate(3) == 0
    assert extents.allocate(8, alignment=16) == 16
    assert list(extents.extents()) == [(3, 16), (24, 100)]
    assert extents.allocate(13) == 3
    assert extents.allocate(90, alignment=16) is None


def test_neighbours_coalesce_in_any_order():
    extents = ExtentAllocator(30)
    for order in ((0, 10, 20), (20, 10, 0), (0, 20, 10), (10, 0, 20)):
        extents.take(0, 30)
        for offset in order:
            extents.free(offset, 10)
        assert list(extents.extents()) == [(0, 30)]


def test_growth_coalesces_with_a_free_end():
    extents = ExtentAllocator(10)
    extents.grow(10)
    assert list(extents.extents()) == [(0, 20)]
    extents.take(0, 20)
    extents.grow(5)
    assert list(extents.extents()) == [(20, 25)]
    assert extents.capacity_bytes == 25


def test_extents_of_a_part():
    extents = ExtentAllocator(100)
    extents.take(0, 100)
    for offset in (0, 20, 40, 60):
        extents.free(offset, 10)
    assert list(extents.extents(20, 60)) == [(20, 30), (40, 50)]
    assert list(extents.extents(41)) == [(60, 70)]


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 10), (5, 1), (8, 4), (0, 1), (18, 4), (95, 10), (-1, 2), (40, 0)]
)
def test_freeing_what_is_free_or_outside_is_found_out(offset, nbytes):
    extents = ExtentAllocator(100)
    extents.take(10, 10)
    before = list(extents.extents())
    with pytest.raises(AssertionError):
        extents.free(offset, nbytes)
    assert list(extents.extents()) == before


@pytest.mark.parametrize(("offset", "nbytes"), [(5, 10), (15, 10), (12, 2), (95, 6), (0, 0)])
def test_taking_what_is_not_free_is_found_out(offset, nbytes):
    extents = ExtentAllocator(100)
    extents.take(10, 10)
    with pytest.raises(AssertionError):
        extents.take(offset, nbytes)


class ExtentMachine(RuleBasedStateMachine):
    """``self.map`` has one entry per byte: the block that holds it, or None."""

    def __init__(self):
        super().__init__()
        self.extents = ExtentAllocator(64)
        self.map = [None] * 64
        self.blocks = {}
        self.next = 0

    def hold(self, offset, nbytes):
        assert self.map[offset : offset + nbytes] == [None] * nbytes
        self.map[offset : offset + nbytes] = [self.next] * nbytes
        self.blocks[self.next] = (offset, nbytes)
        self.next += 1

    def runs(self):
        found, start = [], None
        for index, owner in enumerate([*self.map, -1]):
            if owner is None and start is None:
                start = index
            elif owner is not None and start is not None:
                found.append((start, index))
                start = None
        return found

    @rule(nbytes=st.integers(1, 40), alignment=st.sampled_from([1, 1, 2, 8, 16]))
    def allocate(self, nbytes, alignment):
        offset = self.extents.allocate(nbytes, alignment)
        fits = [
            (end - start, start)
            for start, end in self.runs()
            if -(-start // alignment) * alignment + nbytes <= end
        ]
        if not fits:
            assert offset is None
            return
        start = min(fits)[1]
        assert offset == -(-start // alignment) * alignment
        self.hold(offset, nbytes)

    @precondition(lambda self: None in self.map)
    @rule(data=st.data())
    def take(self, data):
        start, end = data.draw(st.sampled_from(self.runs()))
        offset = data.draw(st.integers(start, end - 1))
        nbytes = data.draw(st.integers(1, end - offset))
        self.extents.take(offset, nbytes)
        self.hold(offset, nbytes)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data):
        offset, nbytes = self.blocks.pop(data.draw(st.sampled_from(sorted(self.blocks))))
        self.extents.free(offset, nbytes)
        self.map[offset : offset + nbytes] = [None] * nbytes

    @precondition(lambda self: len(self.map) < 128)
    @rule(nbytes=st.integers(1, 20))
    def grow(self, nbytes):
        self.extents.grow(nbytes)
        self.map += [None] * nbytes

    @invariant()
    def agree(self):
        runs = self.runs()
        assert list(self.extents.extents()) == runs
        assert self.extents.free_bytes == self.map.count(None)
        assert self.extents.largest_free_bytes == max((end - a for a, end in runs), default=0)
        assert self.extents.capacity_bytes == len(self.map)


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=tries(60), stateful_step_count=40, deadline=None)
