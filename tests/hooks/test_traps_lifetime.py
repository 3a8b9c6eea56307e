"""Rules 6 to 9: how often a tensor is unpacked, in which order, and when it is let go."""

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from trap_runs import (
    LARGE,
    flow_count,
    flush_engine,
    gated,
    leaf,
    mlp,
    mlp_loss,
    squares,
)

from offload_runs import (
    assert_nothing_held,
    assert_within_budget,
    counted,
    gradients,
    held_bytes,
    same_bits,
    wait_for_writes,
    wait_until,
)
from penstock.observe.recorder import Stage, StallCause
from penstock.runtime.table import SAVED

# -- 6: unpack as often as you like ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_trap_06_a_graph_can_be_walked_again(session_for, policy):
    """With ``retain_graph`` every tensor is unpacked twice. Designs that pop at the first unpack
    raise KeyError at the second, or leak what was never unpacked.
    """
    model = mlp()

    def step():
        model.zero_grad()
        loss = mlp_loss(model)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step()
    with session_for(model, policy=policy) as session:
        for _ in range(2):
            assert all(map(same_bits, step(), expected))
        assert_nothing_held(session)


def test_trap_06_bytes_are_freed_with_the_last_handle(session_for):
    """Not at the first unpack, nor at the second, but when the graph has died."""
    weight = leaf(LARGE)
    with session_for() as session:
        (loss,) = squares(weight, 1)
        wait_for_writes(session)
        held = held_bytes(session)
        assert held > 0
        loss.backward(retain_graph=True)
        assert held_bytes(session) == held
        assert session.inspect().device.restored_bytes == 0, "the restored copy is used up"
        del loss
        assert_nothing_held(session)


def test_trap_06_saved_attributes_can_be_read_at_any_time(session_for):
    """``grad_fn._saved_self`` unpacks outside any backward, as debuggers and visualisers do."""
    weight = leaf(LARGE)
    with session_for() as session:
        square = (weight * 2).pow(2)
        wait_for_writes(session)
        for _ in range(3):
            assert same_bits(square.grad_fn._saved_self, (weight * 2).detach())
        square.sum().backward()
        assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_06_a_function_may_read_its_saved_tensors_twice(session_for):
    """Every access to ``ctx.saved_tensors`` unpacks anew."""
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features):
            ctx.save_for_backward(features, features.exp())
            return features.exp()

        @staticmethod
        def backward(ctx, gradient):
            first, second = ctx.saved_tensors, ctx.saved_tensors
            seen.append([same_bits(a, b) for a, b in zip(first, second, strict=True)])
            return gradient * second[1]

    weight = leaf(LARGE)
    with session_for() as session:
        loss = Twice.apply(weight * 2).sum()
        wait_for_writes(session)
        loss.backward()
        assert seen == [[True, True]]
        del loss
        assert_nothing_held(session)
    assert same_bits(weight.grad, 2 * (weight * 2).exp().detach())


# -- 7: graphs that nobody walks -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_trap_07_a_dropped_graph_gives_everything_back(session_for, policy):
    """Metrics in training mode, an early return, an expert that the router passed over."""
    model = mlp()
    with session_for(model, policy=policy, device_memory="4MiB") as session:
        for _ in range(30):  # more in all than the budget and the spill file hold at once
            mlp_loss(model)
        assert_within_budget(session)
        assert_nothing_held(session)


def test_trap_07_an_exception_in_forward_leaves_nothing(session_for):
    """The traceback goes, and the frames with the half-made graph go with it."""
    model = mlp()
    expected = gradients(lambda: mlp_loss(model), list(model.parameters()))

    def fail(module, args):
        raise ZeroDivisionError("in forward")

    with session_for(model) as session:
        handle = model[7].register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            mlp_loss(model)
        handle.remove()
        assert_nothing_held(session)
        found = gradients(lambda: mlp_loss(model), list(model.parameters()))
    assert all(map(same_bits, found, expected))


def test_trap_07_a_graph_that_dies_while_it_is_written_leaves_nothing(session_for):
    session, made = gated(session_for, "write")
    with session:
        loss = squares(leaf(LARGE), 3)
        assert made[0].arrived["write"].wait(60)
        del loss
        gc.collect()
        assert session.budget.used_bytes > 0, "what is being written is still held"
        made[0].open("write")
        assert_nothing_held(session)


def test_trap_07_an_exception_in_backward_leaves_nothing(session_for):
    """Half of the graph was restored when a gradient hook raised."""
    model = mlp()
    expected = gradients(lambda: mlp_loss(model), list(model.parameters()))
    with session_for(model) as session:

        def fail(gradient):
            raise ZeroDivisionError("in backward")

        handle = model[4].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            mlp_loss(model).backward()
        handle.remove()
        flush_engine()
        assert_nothing_held(session)
        for _ in range(2):
            found = gradients(lambda: mlp_loss(model), list(model.parameters()))
            assert all(map(same_bits, found, expected))


def test_trap_07_part_of_a_graph_is_never_needed(session_for):
    """Two heads, and a loss on one: the other's tensors are packed and never unpacked."""
    model, head, unused = mlp(), nn.Linear(64, 64), mlp(2)
    features = leaf(256, 64)

    def step():
        for each in (model, head, unused):
            each.zero_grad()
        shared = model(features)
        other = unused(shared)
        head(shared).pow(2).sum().backward()
        return other, [p.grad.clone() for p in (*model.parameters(), *head.parameters())]

    _, expected = step()
    with session_for(policy="auto", device_memory="4MiB") as session:
        for _ in range(4):
            other, found = step()
            assert all(map(same_bits, found, expected))
            del other
        assert_nothing_held(session)
        assert_within_budget(session)


# -- 8: the order of need is a guess ---------------------------------------------------------------


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_trap_08_any_order_of_unpacking_is_right(session_for, order):
    """Backward does not always unpack in the reverse of packing, and nothing promises it. Here whole
    graphs are walked in the order that is the worst for a guess, and in no order at all.
    """
    weight = leaf(16 * LARGE)
    with session_for(device_memory="3MiB") as session:
        losses = list(enumerate(squares(weight, 24), start=1))
        wait_for_writes(session)
        if order == "reverse":
            losses.reverse()
        elif order == "random":
            random.Random(0).shuffle(losses)
        while losses:
            n, loss = losses.pop(0)
            weight.grad = None
            loss.backward()
            activation = (weight * n).detach()
            once = activation * n
            assert same_bits(weight.grad, once + once)
        assert_within_budget(session)
        del loss
        assert_nothing_held(session)


def test_trap_08_a_miss_is_counted_and_shown(session_for):
    """Nothing was foreseen for the first tensor of a backward: it is loaded on demand, and told."""
    weight = leaf(LARGE)
    with session_for() as session:
        (loss,) = squares(weight, 1)
        wait_for_writes(session)
        loss.backward()
        assert counted(session, "prefetch.missed") == 2
        assert session.recorder.snapshot().stalls[StallCause.DEMAND].count == 2
        assert session.summary().misses == 2


def test_trap_08_what_follows_is_prefetched(session_for):
    """The guess is of use all the same: of a chain of tensors only the first is waited for on demand."""
    model = mlp(8)
    with session_for(model) as session:
        for _ in range(3):
            loss = mlp_loss(model)
            wait_for_writes(session)
            before = counted(session, "prefetch.missed")
            reads = flow_count(session, Stage.READ)
            loss.backward()
            assert flow_count(session, Stage.READ) - reads >= 15
            assert counted(session, "prefetch.missed") - before <= 3


# -- 9: no cycles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "policy"), [(16, "all"), (1536, "all"), (LARGE, "keep"), (LARGE, "all")]
)
def test_trap_09_a_saved_output_does_not_keep_itself_alive(session_for, size, policy):
    """A hook that returns a saved *output* as it came makes the output keep its own node alive, and
    the node the output: memory that nothing ever frees. Reference counts alone must do.
    """
    weight = leaf(size)
    gc.collect()
    gc.disable()
    try:
        with session_for(policy=policy) as session:
            result = weight.exp()
            wait_for_writes(session)
            alive = weakref.ref(result.untyped_storage())
            del result
            assert alive() is None
            wait_until(lambda: not held_bytes(session), "the bytes are discarded")
            assert session.budget.used_by(SAVED) == 0
    finally:
        gc.enable()
