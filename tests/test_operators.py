"""Every differentiable operator of PyTorch computes the same with everything that it saves on flash.

Its outputs and gradients are compared to the last bit, over PyTorch's own sample inputs, with a session
in which every saved tensor moves, however small. What moved is counted, so that nothing passes by
staying where it is.
"""

import warnings
from itertools import islice

import pytest

from operator_runs import Count, differentiable, try_samples

PARTS = 4
"""The long run is cut into so many tests, so that they run side by side."""


def operators():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return sorted(differentiable(op_db), key=lambda pair: pair[0].name)


def try_operators(chosen, everything, samples_of):
    count = Count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that are deprecated, or slow, or in beta
        for op, dtype in chosen:
            samples = op.sample_inputs("cpu", dtype, requires_grad=True)
            try_samples(op, samples_of(samples), everything, count)
    print(count)
    return count


@pytest.fixture(autouse=True)
def no_search_for_a_caller(monkeypatch):
    """torch walks the stack, twice an operator, to find the ``unittest`` that asks for samples."""
    monkeypatch.setattr("inspect.stack", list)


def assert_all_same(count):
    assert not count.wrong, f"{len(count.wrong)}: " + "\n".join(count.wrong[:20])
    assert count.moving_operators == count.saving_operators


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_sample_of_every_operator(everything, part):
    count = try_operators(operators()[part::PARTS], everything, iter)
    assert_all_same(count)


def test_some_samples_of_every_operator(everything):
    count = try_operators(operators(), everything, lambda samples: islice(samples, 2))
    assert_all_same(count)
