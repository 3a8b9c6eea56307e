"""Which operators use a network's weights, and when gradients are final, on shapes alone."""

from dataclasses import replace

import pytest
import torch
from dry_runs import GPU
from torch import nn
from torch.nn import functional as F

from penstock.lab import zoo
from penstock.lab.dry import dry_step, dry_zoo_step


def mean_loss(model, *inputs):
    return model(*inputs).pow(2).mean()


def shapes(network, *inputs, loss=mean_loss, **settings):
    return dry_step(network, loss, inputs=inputs, machine=GPU, **settings)


def by_module(step):
    return {one.module: one for one in step.weights}


def uses(step, one):
    """(direction, module of the operators) of each use."""
    found = []
    for use in one.uses:
        modules = {each.module for each in step.profile.operators[use.first : use.last + 1]}
        assert len(modules) == 1
        found.append(("backward" if use.backward else "forward", modules.pop()))
    return found


def test_each_module_is_used_forward_and_backward():
    step = shapes(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.empty(2, 8))
    first, last = step.weights
    assert (first.module, first.nbytes, first.trained) == ("0", 4 * (8 * 16 + 16), 8 * 16 + 16)
    assert first.trained_bytes == first.nbytes
    assert first.dtype == "float32"
    for one, name in ((first, "0"), (last, "2")):
        forward, backward = uses(step, one)
        assert [forward[0], backward[0]] == ["forward", "backward"]
        assert forward[1].endswith(name)
        assert one.uses[1].of_update == (one is first)  # the input wants no gradient
        # both gradients are final at the end of its backward
        assert one.gradient == replace(one.uses[1], of_update=False)
    assert last.uses[1].first < first.uses[1].first


def test_bytes_are_those_of_the_parameters():
    step = dry_zoo_step("bert-large", 1, machine=GPU, size="tiny")
    with torch.device("meta"):
        network = zoo.build("bert-large", size="tiny")
    assert sum(one.nbytes for one in step.weights) == sum(
        one.numel() * one.element_size() for one in network.parameters()
    )
    assert all(one.gradient is not None for one in step.weights)


def test_a_tied_head_is_used_four_times_and_its_gradient_lasts_all_of_backward():
    step = dry_zoo_step("gpt2", 2, machine=GPU, size="tiny")
    tokens = by_module(step)["tokens"]
    assert [each for each, _ in uses(step, tokens)] == ["forward"] * 2 + ["backward"] * 2
    assert tokens.gradient.first == tokens.uses[2].first
    assert tokens.gradient.last == tokens.uses[3].last
    assert step.tokens == 2 * 64


def test_frozen_weights_have_no_gradient_and_are_needed_where_gradients_pass_through():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for each in (net[0], net[2], net[3]):
        each.requires_grad_(False)
    step = shapes(net, torch.empty(2, 8))
    found = by_module(step)
    directions = {path: [each for each, _ in uses(step, one)] for path, one in found.items()}
    assert directions == {
        "0": ["forward"],
        "1": ["forward", "backward"],
        "2": ["forward", "backward"],
        "3": ["forward", "backward"],
    }
    assert [one.gradient is None for one in found.values()] == [True, False, True, True]
    assert [one.trained for one in found.values()] == [0, 72, 0, 0]


def test_a_weight_that_another_module_uses_is_found():
    class Borrowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.lender = nn.Linear(8, 8)
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            return F.linear(self.last(self.lender(x)), self.lender.weight)

    step = shapes(Borrowing(), torch.empty(2, 8))
    lender = by_module(step)["lender"]
    assert [each for each, _ in uses(step, lender)] == ["forward"] * 2 + ["backward"] * 2
    assert uses(step, lender)[1][1].endswith("Borrowing")


def test_the_update_needs_weights_that_backward_does_not():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 8)
            self.scale = nn.Linear(8, 8)

        def forward(self, x):
            return self.scale(self.table(x))

    step = shapes(Lookup(), torch.zeros(2, 16, dtype=torch.long))
    table = by_module(step)["table"]
    assert [each for each, _ in uses(step, table)] == ["forward", "backward"]
    assert table.uses[1].of_update
    assert table.gradient == replace(table.uses[1], of_update=False)
    assert step.tokens == 32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_is_the_profile_that_it_was(device):
    step = dry_zoo_step("alexnet", 2, machine=GPU, size="tiny", device=device)
    last = max(use.last for one in step.weights for use in one.uses)
    assert last == len(step.profile.operators) - 1
    assert step.tokens == 0  # images
