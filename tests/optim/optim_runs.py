"""What tests of optimizers share: parameters of odd sizes, gradients, comparison to the bit."""

import torch
from torch import nn

SIZES = [(3, 7), (5, 1000), (257,), (1,), (40, 130), (64, 32, 3)]


def parameters(dtype=torch.float32, seed=0, sizes=SIZES):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]


def give_gradients(params, step, skip=()):
    """Random gradients of several magnitudes, laid in memory as autograd lays them."""
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        p.grad = None
        grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 4 - 2)
        if i not in skip:
            p.grad = torch.empty_like(p, requires_grad=False).copy_(grad)


def train(optimizer, params, steps=6, skip=lambda step: (), first=0):
    for step in range(first, first + steps):
        give_gradients(params, step, skip(step))
        optimizer.step()


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def assert_same_states(ours, theirs):
    """Of two state dicts; ours may hold more."""
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        for name, value in state.items():
            mine = ours["state"][key][name]
            same = torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value
            assert same, (key, name)
