"""``penstock.hooks.functorch_compat``: our hooks off, and on again."""

import pytest
import torch
from torch.autograd import graph

from penstock.hooks.functorch_compat import FunctorchGuard


class Hooks:
    """Hooks that count, and what steps aside for others."""

    def __init__(self):
        self.packed = 0
        self.aside = FunctorchGuard(self.pack, self.unpack)

    def pack(self, tensor):
        self.packed += 1
        return tensor.detach()

    def unpack(self, tensor):
        return tensor

    def saves(self):
        """How many of one tensor's saves come by here."""
        before = self.packed
        torch.ones(2, requires_grad=True).sin()
        return self.packed - before


@pytest.fixture
def hooks():
    hooks = Hooks()
    hooks.aside.attach()
    with graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield hooks
    hooks.aside.detach()


def test_aside_nothing_is_packed_and_afterwards_again(hooks):
    assert hooks.saves() == 1
    with hooks.aside.unhooked():
        assert hooks.saves() == 0
        with hooks.aside.unhooked():
            assert hooks.saves() == 0
        assert hooks.saves() == 0
    assert hooks.saves() == 1
    assert hooks.aside.times == 0, "nobody asked for it but ourselves"


def test_hooks_come_back_after_an_exception(hooks):
    with pytest.raises(ZeroDivisionError), hooks.aside.unhooked():
        raise ZeroDivisionError
    assert hooks.saves() == 1


def test_what_refuses_hooks_gets_none(hooks):
    with graph.disable_saved_tensors_hooks("not here"):
        assert hooks.saves() == 0
    assert hooks.saves() == 1
    assert hooks.aside.times == 1


def test_what_refuses_hooks_still_refuses_those_of_others(hooks):
    with (
        pytest.raises(RuntimeError, match="not here"),
        graph.disable_saved_tensors_hooks("not here"),
        graph.saved_tensors_hooks(hooks.pack, hooks.unpack),
    ):
        pass
    with (
        graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(RuntimeError, match="not here"),
        graph.disable_saved_tensors_hooks("not here"),
    ):
        pass


def test_a_thread_without_hooks_is_left_alone(hooks):
    import threading

    seen = []

    def work():
        with hooks.aside.unhooked():
            seen.append(hooks.saves())
        seen.append(hooks.saves())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 0]


def test_detach_is_idempotent_and_restores():
    original = graph.disable_saved_tensors_hooks
    aside = FunctorchGuard(lambda t: t, lambda t: t)
    aside.attach()
    aside.detach()
    aside.detach()
    assert graph.disable_saved_tensors_hooks is original
