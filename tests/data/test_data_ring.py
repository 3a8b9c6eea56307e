"""The ring: places never overlap, nothing is held beyond the limit, and what is freed is used again."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.data.ring import ByteRing
from penstock.io.mapping import HUGE_PAGE_BYTES

CAPACITY = 1 << 16


class RingMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ring = ByteRing(CAPACITY)
        self.live = []  # (taken, [(start, stop)]), oldest first
        self.lent = []  # (taken, span, array, what is in it)

    @rule(sizes=st.lists(st.integers(1, CAPACITY // 3), min_size=1, max_size=5))
    def take(self, sizes):
        places = self.ring.take(np.array(sizes))
        if places is None:
            assert self.live or self.lent or sum(sizes) > self.ring.limit_bytes
            return
        offsets, taken = places
        spans = [(int(o), int(o) + n) for o, n in zip(offsets, sizes, strict=True)]
        others = [span for _, held in self.live for span in held]
        for start, stop in spans:
            assert 0 <= start < stop <= self.ring.limit_bytes
            assert all(stop <= low or start >= high for low, high in others)
            others.append((start, stop))
        self.live.append((taken, spans))
        for start, stop in spans:
            self.ring.bytes[start:stop] = np.random.default_rng(start).integers(256)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        taken, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.ring.free(taken)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lend(self, data):
        taken, spans = data.draw(st.sampled_from(self.live))
        span = data.draw(st.sampled_from(spans))
        if span not in [other for each, other, *_ in self.lent if each is taken]:
            array = self.ring.lend(taken, span)
            self.lent.append((taken, span, array, array.copy()))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_back(self, data):
        taken, span, *_ = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        self.ring.give_back(taken, span)

    @precondition(lambda self: not self.live)
    @rule()
    def renew(self):
        self.ring.renew()

    @invariant()
    def what_is_lent_is_not_written_to(self):
        for _, _, array, expected in self.lent:
            assert np.array_equal(array, expected)

    @precondition(lambda self: not self.live and not self.lent)
    @rule(limit=st.integers(1, CAPACITY))
    def lower(self, limit):
        self.ring.limit_bytes = limit

    @invariant()
    def all_is_counted(self):
        held = [stop for _, spans in self.live for _, stop in spans]
        assert self.ring.held_bytes >= max(held, default=0)
        assert self.ring.held_bytes <= CAPACITY
        assert self.ring.account.used_bytes == self.ring.held_bytes
        if not self.live and not self.lent:
            assert self.ring.used_bytes == 0

    def teardown(self):
        self.ring.close()
        self.what_is_lent_is_not_written_to()


TestRing = RingMachine.TestCase


def test_what_is_freed_is_used_again_when_all_before_it_is_free():
    ring = ByteRing(CAPACITY)
    part = np.array([CAPACITY // 4])
    first, second, third = (ring.take(part)[1] for _ in range(3))
    ring.free(second)
    assert ring.take(part) is not None
    assert ring.take(part) is None, "the first one is not free"
    ring.free(first)
    assert ring.take(np.array([CAPACITY // 2])) is not None
    assert ring.take(part) is None, "the third one is not free"
    ring.free(third)
    ring.close()


def test_what_is_not_needed_any_more_is_given_back():
    ring = ByteRing(4 * HUGE_PAGE_BYTES)
    _, first = ring.take(np.array([3 * HUGE_PAGE_BYTES + 1]))
    assert ring.held_bytes == 4 * HUGE_PAGE_BYTES
    ring.limit_bytes = HUGE_PAGE_BYTES
    ring.free(first)
    assert ring.held_bytes == HUGE_PAGE_BYTES
    assert ring.take(np.array([HUGE_PAGE_BYTES + 1])) is None
    ring.close()
    assert ring.account.used_bytes == 0


def test_a_ring_grows_as_far_as_the_account_allows():
    ring = ByteRing(8 * HUGE_PAGE_BYTES)
    ring.account.limit_bytes = 4 * HUGE_PAGE_BYTES
    _, first = ring.take(np.array([3 * HUGE_PAGE_BYTES + 1]))
    assert ring.take(np.array([2 * HUGE_PAGE_BYTES])) is None
    ring.free(first)
    assert ring.used_bytes == 0
    _, second = ring.take(np.array([2 * HUGE_PAGE_BYTES]))
    ring.account.limit_bytes = 8 * HUGE_PAGE_BYTES
    assert ring.take(np.array([5 * HUGE_PAGE_BYTES])) is not None
    ring.free(second)
    ring.close()
