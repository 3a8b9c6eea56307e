"""Whose weights are used by which operators of an observed step, and when gradients are final."""

import torch
from torch import nn

from penstock.hooks.module_weights import recorded_weights
from penstock.plan.operators import Operator
from penstock.plan.weights import WeightUse


def operators(*runs):
    """Runs of one unit of time, one after the other; those that begin with ``-`` are of backward."""
    return tuple(
        Operator("Module", run.removeprefix("-"), 1, run.startswith("-"), at, at + 1)
        for at, run in enumerate(runs)
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.last.weight = self.first.weight
        self.attention = nn.MultiheadAttention(4, 1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def found(module, *runs):
    modules = [(f"T.{path}" if path else "T", each) for path, each in module.named_modules()]
    return {one.module: one for one in recorded_weights(modules, operators(*runs))}


def test_shared_weights_are_used_by_all_modules_that_have_them_and_uncalled_ones_by_their_parent():
    module = Tied()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    weights = found(
        module,
        "T.first",
        "T.attention",
        "T.frozen",
        "T.last",
        "-T.last",
        "-T.attention",
        "-T.first",
    )
    assert set(weights) == {"T.first", "T.attention", "T.attention.out_proj", "T.frozen"}
    shared = weights["T.first"]
    assert [use.first for use in shared.uses] == [0, 3, 4, 6]
    assert shared.gradient == WeightUse(4, 6, backward=True)
    assert shared.trained_bytes == shared.nbytes == 4 * 32
    inner = weights["T.attention.out_proj"]
    assert [use.first for use in inner.uses] == [1, 5]
    assert inner.gradient == WeightUse(5, 5, backward=True)
    frozen = weights["T.frozen"]
    assert [use.first for use in frozen.uses] == [2]
    assert (frozen.gradient, frozen.trained_bytes, frozen.nbytes) == (None, 0, 4 * 20)


def test_a_gradient_is_final_after_the_last_pass_and_at_the_end_where_backward_was_not_seen():
    module = nn.Linear(2, 2)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accumulated = found(module, "T", "-T", "T", "-T")["T"]
    assert [(use.first, use.backward) for use in accumulated.uses] == [
        (0, False),
        (1, True),
        (2, False),
        (3, True),
    ]
    assert accumulated.gradient == WeightUse(1, 3, backward=True)
    unseen = found(module, "T", "-other")["T"]
    assert unseen.gradient == WeightUse(1, 1, backward=True)
    assert unseen.updated
