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
