"""``penstock.hooks.boundaries``: where a backward and a step end."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from penstock.hooks.boundaries import Boundaries


class Log(list):
    """Ends of backwards and steps, in their order."""

    def __init__(self):
        super().__init__()
        self.boundaries = Boundaries(
            on_backward_end=lambda: self.append("backward"),
            on_step=lambda optimizer, is_inner: self.append(
                ("in", optimizer) if is_inner else optimizer
            ),
        )

    def pack(self, tensor):
        self.boundaries.note_pack()
        return tensor.detach()

    def unpack(self, tensor):
        self.boundaries.note_unpack()
        return tensor


@pytest.fixture
def log():
    log = Log()
    log.boundaries.attach()
    with torch.autograd.graph.saved_tensors_hooks(log.pack, log.unpack):
        yield log
    log.boundaries.detach()


def weight():
    return torch.ones(3, requires_grad=True)


def chain(w):
    return w.sin().cos().exp().sum()


def test_one_backward_is_reported_once_at_its_end(log):
    w = weight()
    loss = chain(w)
    assert log == []
    w.register_post_accumulate_grad_hook(lambda _: log.append("gradient"))
    loss.backward()
    assert log == ["gradient", "backward"]


def test_each_backward_is_reported(log):
    for _ in range(3):
        loss = chain(weight())
        loss.backward(retain_graph=True)
        loss.backward()
    assert log == ["backward"] * 6


def test_autograd_grad_and_a_second_order_are_backwards(log):
    w = weight()
    (slope,) = torch.autograd.grad(chain(w), w, create_graph=True)
    assert log == ["backward"]
    slope.sum().backward()
    assert log == ["backward"] * 2


def test_backwards_inside_a_backward_do_not_count(log):
    w = weight()
    inner = checkpoint(chain, w, use_reentrant=True)
    (checkpoint(chain, w, use_reentrant=True) * inner).backward()
    assert log == ["backward"]


def test_a_look_at_a_saved_tensor_is_no_backward(log):
    square = weight().pow(2)
    square.grad_fn._saved_self
    assert log == []


def test_a_backward_that_raised_is_over_at_the_next_save(log):
    w = weight()

    def fail(gradient):
        raise ZeroDivisionError

    middle = w.sin()
    middle.register_hook(fail)
    loss = middle.cos().sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert log == []
    loss = chain(weight())
    assert log == ["backward"]
    loss.backward()
    assert log == ["backward"] * 2


def test_steps_of_every_optimizer_are_reported(log):
    w = weight()
    first, second = torch.optim.SGD([w]), torch.optim.AdamW([w])
    w.grad = torch.ones(3)
    first.step()
    second.step()
    assert log == [first, second]


def test_detached_no_step_is_reported(log):
    log.boundaries.detach()
    w = weight()
    w.grad = torch.ones(3)
    torch.optim.SGD([w]).step()
    assert log == []


class Container(torch.optim.Optimizer):
    """Steps what it holds, as torchtitan's do."""

    def __init__(self, held):
        super().__init__(held.param_groups, {})
        self.held = held

    def step(self):
        self.held.step()


def test_a_step_within_that_of_another_optimizer_is_told_of_as_such(log):
    held = torch.optim.SGD([weight()], lr=0.1)
    container = Container(held)
    for _ in range(2):
        container.step()
        held.step()
    assert log == [("in", held), container, held] * 2
