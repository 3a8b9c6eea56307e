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


def noted(order, uses):
    """Note the uses of one step; what leaves after them, by weight."""
    leaves = {}
    for index in uses:
        leaves.setdefault(index, []).append(order.note(index))
    order.end()
    order.choose([4] * 4, [True] * 4, 8)
    return leaves


def test_updates_that_come_earlier_or_later_change_nothing_of_what_leaves():
    """Backward uses 2, 1 and 0, and an update uses each again, in a thread of its own."""
    seen, other = [0, 1, 2, 2, 2, 1, 1, 0, 0], [0, 1, 2, 2, 1, 0, 2, 1, 0]
    order = UseOrder()
    order.add(3)
    for _ in range(2):
        assert not order.is_steady
        assert not any(leaves for each in noted(order, seen).values() for leaves in each)
    assert order.is_steady
    before = noted(order, seen)
    assert any(leaves for each in before.values() for leaves in each)
    assert noted(order, other) == before
    assert noted(order, seen) == before


def test_nothing_leaves_where_passes_differ():
    """As of two models that are trained in turn, and as of experts."""
    order = UseOrder()
    order.add(4)
    for uses in [[0, 1, 1, 0], [2, 3, 3, 2]] * 3:
        assert not any(leaves for each in noted(order, uses).values() for leaves in each)
        assert not order.is_steady


def test_a_weight_that_was_not_foretold_does_not_leave_at_once():
    order = UseOrder()
    order.add(4)
    for _ in range(3):
        leaves = noted(order, [0, 1, 2, 2, 1, 0])
    assert any(each[0] for each in leaves.values())
    assert not order.note(3)
    assert not order.stays(3)  # but it may, for others
    assert order.next_use(3) == NEVER


def test_what_stays_is_known_of_weights_that_are_used_no_more():
    order = UseOrder()
    order.add(4)
    for _ in range(2):
        noted(order, [0, 3, 3, 0])
    assert order.stays(0)
    assert order.stays(3)
    for _ in range(2):
        noted(order, [1, 2, 2, 1])
    assert [order.stays(index) for index in range(4)] == [False, True, True, False]


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
