"""What the observer of a real device tells the order checker, tried where the truth is known."""

import threading

import emulated_operators
import pytest
import torch

from penstock.testing.access_order import AccessOrder
from penstock.testing.gpu.observer import observed

pytestmark = pytest.mark.gpu


@pytest.fixture
def order():
    """In place of the one that judges all tests here, which the kernels themselves tell."""
    emulated_operators.use(None)
    return AccessOrder()


def fill_and_copy(*, waits):
    """One stream writes, another reads."""
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        source = torch.ones(1024, device="cuda")
    if waits:
        other.wait_stream(one)
    with torch.cuda.stream(other):
        target = source * 2
    torch.cuda.synchronize()
    return target


def test_a_missing_wait_is_complained_of(order):
    with observed(order):
        fill_and_copy(waits=False)
    assert order.complaints
    for each in order.complaints:
        assert "mul" in each
        assert "nothing orders them" in each


def test_a_wait_excuses(order):
    with observed(order):
        target = fill_and_copy(waits=True)
    assert order.checked >= 3
    assert order.complaints == []
    assert target.tolist() == [2.0] * 1024


def test_backward_and_other_threads_are_observed(order):
    with observed(order):
        x = torch.ones(64, device="cuda", requires_grad=True)
        before = order.checked
        loss = (x * x).sum()
        forward = order.checked
        loss.backward()
        backward = order.checked
        thread = threading.Thread(target=lambda: torch.ones(8, device="cuda").add_(1))
        thread.start()
        thread.join()
        assert before < forward < backward < order.checked
        assert x.grad.tolist() == [2.0] * 64
    assert order.complaints == []
    seen = order.checked
    torch.ones(8, device="cuda").add_(1)
    assert order.checked == seen


def test_what_the_host_waited_for_excuses(order):
    with observed(order):
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(one):
            source = torch.ones(64, device="cuda")
            assert source.sum().item() == 64
        with torch.cuda.stream(other):
            source.add_(1)
        torch.cuda.synchronize()
    assert order.complaints == []
