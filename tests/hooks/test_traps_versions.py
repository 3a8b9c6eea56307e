"""Rule 1: hooks switch off autograd's check for edits in place, so we make it."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trap_runs import LARGE, SMALL, TINY, leaf

from offload_runs import gradients, same_bits, wait_for_writes
from penstock.core.errors import HookError, InPlaceError

HANDLES = [
    pytest.param(TINY, "all", id="kept"),
    pytest.param(SMALL, "all", id="small"),
    pytest.param(LARGE, "keep", id="resident"),
    pytest.param(LARGE, "all", id="spilled"),
]


@pytest.mark.parametrize(("size", "policy"), HANDLES)
def test_trap_01_in_place_edit_of_a_kept_tensor_raises(session_for, size, policy):
    """Hooks switch off autograd's own check. A kept tensor that is edited after it was saved then
    gives a wrong gradient in silence: 24 instead of 4 in the first offloader we looked at. Where
    autograd raises without us, it must raise with us, whatever became of the tensor.
    """
    weight = leaf(size)

    def edited():
        activation = weight * 2
        square = activation * activation
        activation.add_(1)
        square.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edited()
    with session_for(policy=policy), pytest.raises(InPlaceError, match="inplace") as caught:
        edited()
    assert isinstance(caught.value, HookError)
    assert f"[{size}]" in str(caught.value)
    assert "is at version 1; expected version 0" in str(caught.value)


@pytest.mark.parametrize(("size", "policy"), HANDLES)
def test_trap_01_edit_through_a_view_raises(session_for, size, policy):
    """A view shares its base's version: writing one element through it counts."""
    weight = leaf(size)
    with session_for(policy=policy):
        activation = weight * 2
        square = activation * activation
        activation.view(2, -1)[0, :3] = 7
        with pytest.raises(InPlaceError):
            square.sum().backward()


@pytest.mark.parametrize(("size", "policy"), HANDLES)
def test_trap_01_edit_of_an_output_after_it_was_saved_raises(session_for, size, policy):
    """``exp`` saves its own output, and that is what the user gets hold of."""
    weight = leaf(size)
    with session_for(policy=policy):
        result = weight.exp()
        result.mul_(2)
        with pytest.raises(InPlaceError):
            result.sum().backward()


def test_trap_01_edit_of_a_kept_parameter_raises(session_for):
    """An optimizer step between forward and backward."""
    layer = nn.Linear(64, 64, bias=False)
    with session_for(layer):
        loss = layer(leaf(8, 64)).sum()
        with torch.no_grad():
            layer.weight.mul_(0.9)
        with pytest.raises(InPlaceError):
            loss.backward()


def test_trap_01_edit_of_a_tensor_of_a_foreign_kind_raises(session_for):
    """A conjugate is no plain strided tensor, so it stays as it is; it can be edited all the same."""
    weight = leaf(LARGE, dtype=torch.complex64)

    def edited():
        activation = weight * 2
        product = activation.conj() * weight
        activation.mul_(3)
        torch.view_as_real(product).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edited()
    with session_for(), pytest.raises(InPlaceError):
        edited()


@pytest.mark.parametrize("count", [LARGE, SMALL, TINY])
def test_trap_01_a_small_view_that_is_copied_out_watches_its_base(session_for, count):
    """The copy would still be right, but autograd raises here: a program must not begin to depend on
    whether a view is small beside its storage.
    """
    weight = leaf(64 * LARGE)
    with session_for() as session:
        activation = weight * 2
        part = activation[:count]
        square = part * part
        activation.add_(1)
        wait_for_writes(session)
        with pytest.raises(InPlaceError):
            square.sum().backward()


@pytest.mark.parametrize(("size", "policy"), HANDLES)
def test_trap_01_an_edit_of_what_was_handed_out_raises(session_for, size, policy):
    """A Function that changes ``ctx.saved_tensors`` in place, or a look at ``grad_fn._saved_result``
    that is written to: autograd raises at the next use, for what it hands out has the same counter.
    """
    weight = leaf(size)
    with session_for(policy=policy) as session:
        result = (weight * 2).exp()
        node = result.grad_fn
        loss = result.sum()
        del result
        wait_for_writes(session)
        node._saved_result.mul_(2)
        with pytest.raises(InPlaceError):
            loss.backward()


class _WritesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 3)
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        saved.add_(1)
        return grad * saved


@pytest.mark.parametrize(("size", "policy"), HANDLES)
def test_trap_01_a_function_that_changes_what_it_saved_fails_the_second_time(
    session_for, size, policy
):
    weight = leaf(size)

    def twice(settle=lambda: None):
        loss = _WritesWhatItSaved.apply(weight * 2).sum()
        settle()
        loss.backward(retain_graph=True)
        settle()
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice()
    with session_for(policy=policy) as session, pytest.raises(InPlaceError):
        twice(lambda: wait_for_writes(session))


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_trap_01_other_memory_for_a_parameter_counts(session_for, policy):
    """``p.data = other`` between forward and backward: autograd holds the parameter, so it uses the
    new memory, and the old goes.
    """
    x, weight, other = leaf(64, 64), leaf(64, 64, seed=1), leaf(64, 64, seed=2).detach()
    with session_for(policy=policy):
        product = x * weight
        old = weakref.ref(weight.untyped_storage())
        weight.data = other
        assert old() is None
        product.sum().backward()
    assert same_bits(x.grad, other)


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_trap_01_saves_at_two_versions_are_two(session_for, policy):
    """One storage, saved, edited, and saved again. Its second save must not be taken for the first:
    then the second graph's gradient would be made of the values before the edit.
    """
    weight = leaf(LARGE)

    def second_graph(written=lambda: None):
        activation = weight * 2
        first = activation.sin()
        written()
        activation.add_(1)
        return first, activation.sin()

    expected = gradients(second_graph()[1].sum, [weight])
    with session_for(policy=policy) as session:
        first, second = second_graph(lambda: wait_for_writes(session))
        wait_for_writes(session)
        weight.grad = None
        second.sum().backward()
        assert same_bits(weight.grad, expected[0])
        with pytest.raises(InPlaceError):
            first.sum().backward()


def test_trap_01_an_edit_before_the_save_is_none(session_for):
    """In-place ReLU edits its input, and what is saved is the edited tensor. Nothing is wrong."""
    weight = leaf(LARGE)

    def loss():
        return F.relu(weight * 2, inplace=True).pow(2).sum()

    expected = gradients(loss, [weight])
    for policy in ("keep", "all"):
        with session_for(policy=policy):
            assert same_bits(gradients(loss, [weight])[0], expected[0])
