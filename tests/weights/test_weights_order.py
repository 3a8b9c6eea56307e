"""The order of uses agrees with a simple model of it."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.weights.order import NEVER, UseOrder


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 12))
def test_the_next_use_is_that_of_the_last_step(uses, done):
    order = UseOrder()
    order.add(5)
    for index in uses:
        order.note(index)
    order.end()
    done = min(done, len(uses))
    for index in uses[:done]:
        order.note(index)
    coming = uses[done:] + uses[:done]
    assert list(order.upcoming()) == coming
    for index in range(5):
        expected = coming.index(index) if index in coming else NEVER
        assert order.next_use(index) == expected


def test_updates_that_come_earlier_or_later_change_nothing_of_what_stays():
    """Backward uses 2, 1 and 0, and an update uses each again, in a thread of its own."""
    seen, other = [0, 1, 2, 2, 2, 1, 1, 0, 0], [0, 1, 2, 2, 1, 0, 2, 1, 0]

    def kept(uses):
        found = {}
        for index in uses:
            found.setdefault(index, []).append(order.note(index))
        order.end()
        order.choose([4, 4, 4], [True] * 3, 8)
        return found

    order = UseOrder()
    order.add(3)
    assert not order.is_seen
    assert all(stays for each in kept(seen).values() for stays in each)  # nothing is known yet
    assert order.is_seen
    before = kept(seen)
    assert not all(stays for each in before.values() for stays in each)
    assert kept(other) == before


def test_a_pass_that_is_begun_again_starts_over():
    """As when a program never says that a step has ended."""
    order = UseOrder()
    order.add(2)
    for index in [0, 1, 1, 0]:
        order.note(index)
    order.end()
    for _ in range(2):
        for index, next_ones in [(0, [1, 1, 0, 0]), (1, [1, 0, 0, 1]), (1, [0, 0, 1, 1])]:
            order.note(index)
            assert list(order.upcoming()) == next_ones
        order.note(0)


def test_a_pass_that_uses_weights_once_more_is_followed_again_after_a_few():
    """As a checkpoint that is saved in the middle of training, which reads each weight once."""
    count, order = 40, UseOrder()
    uses = [*range(count), *reversed(range(count))]
    order.add(count)
    for index in uses:
        order.note(index)
    order.end()
    for index in range(count):  # the checkpoint
        order.note(index)
    wrong = 0
    for place, index in enumerate(uses):
        order.note(index)
        wrong += next(order.upcoming()) != uses[(place + 1) % len(uses)]
    assert wrong <= 10
