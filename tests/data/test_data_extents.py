"""What is read for some samples: all of them, nothing twice, and in their order where that is of use."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.data.extents import GAP_BYTES, GRANULE, LONG_BYTES, plan_of
from penstock.data.index import IndexBuilder


def index_of(records):
    """An index of samples (file, offset, nbytes), without files."""
    builder = IndexBuilder("none", ["data"])
    for file, offset, nbytes in records:
        builder.regular(file, 1, (offset, 0, nbytes))
    return builder.build(None, {})


records = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40 * GAP_BYTES), st.integers(1, 2 * LONG_BYTES)),
    min_size=1,
    max_size=12,
)


NESTED = [(0, 0, 30 * GAP_BYTES), (0, GAP_BYTES, 1), (0, 20 * GAP_BYTES, 1)]
"""The last one lies in the first, far behind the second."""


@given(records=records, numbers=st.lists(st.integers(0, 11), min_size=1, max_size=12))
@example(records=NESTED, numbers=[0, 1, 2])
def test_all_is_read_and_nothing_twice(records, numbers):
    chosen = [number % len(records) for number in numbers]
    plan = plan_of(index_of(records), np.array(chosen))
    extents = list(zip(plan.file.tolist(), plan.begin.tolist(), plan.nbytes.tolist(), strict=True))
    for sample, extent in zip(chosen, plan.extent[:, 0].tolist(), strict=True):
        file, offset, nbytes = records[sample]
        assert extents[extent][0] == file
        assert extents[extent][1] <= offset
        assert offset + nbytes <= extents[extent][1] + extents[extent][2]
    ordered = sorted(extents)
    for (file, begin, nbytes), after in itertools.pairwise(ordered):
        assert file != after[0] or begin + nbytes <= after[1]
    assert all(begin % GRANULE == nbytes % GRANULE == 0 for _, begin, nbytes in extents)
    ranges = sorted(records[sample] for sample in chosen)
    assert plan.apart == all(
        one[0] != other[0] or one[1] + one[2] <= other[1]
        for one, other in itertools.pairwise(ranges)
    )


@pytest.mark.parametrize(
    ("nbytes", "chosen", "begins"),
    [
        (GRANULE, [0, 1, 2], [0]),  # neighbours are one read
        (GRANULE, [7, 0, 1], [0, 7]),  # also in another order,
        (LONG_BYTES, [7, 0, 1], [7, 0, 1]),  # unless they are long: then they stay in theirs
        (LONG_BYTES, [0, 1, 7], [0, 7]),
        (LONG_BYTES + 1, [7, 1, 0], [0, 7]),  # but for those that share a block
    ],
)
def test_long_samples_stay_in_order(nbytes, chosen, begins):
    index = index_of([(0, number * nbytes, nbytes) for number in range(8)])
    plan = plan_of(index, np.array(chosen))
    expected = [begin * nbytes // GRANULE * GRANULE for begin in begins]
    assert plan.begin.tolist() == expected
