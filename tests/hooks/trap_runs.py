"""What the tests of TRAPS' rules share: tensors of telling sizes, little networks, and a look inside."""

import torch
from torch import nn
from torch.nn import functional as F

from offload_runs import GatedTier, gradients, slots

ITEM = 4
LARGE = 4096
"""Floats of a storage above the floor of 8 KiB: it moves."""
SMALL = 1536
"""Of one below: it stays, and counts."""
TINY = 16
"""Of one that is not even counted."""


def leaf(*shape, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, **options).requires_grad_()


def flow_count(session, stage, tier="flash"):
    return session.recorder.snapshot().flow(stage, tier).count


def storage_key(tensor):
    return tensor.untyped_storage()._cdata


def taken_keys(session):
    """Keys of the storages that the executor is in charge of."""
    return {slot.storage_key for slot in slots(session)}


def squares(weight, count, *, first=1):
    """Losses of as many graphs, each of which saves one storage of its own."""
    return [((weight * n) * (weight * n)).sum() for n in range(first, first + count)]


def flush_engine():
    """After an error autograd's engine keeps the nodes it did not come to until its next backward."""
    torch.ones(1, requires_grad=True).sum().backward()


def mlp(depth=6, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())))


def mlp_loss(model, rows=256, width=64, seed=3):
    return model(leaf(rows, width, seed=seed).detach()).pow(2).mean()


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, features):
        return features + self.down(F.gelu(self.up(self.norm(features))))


def blocks(depth=4, dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Sequential(Block(), nn.Dropout(dropout)) for _ in range(depth)]
    return nn.ModuleList(layers)


def run_through(model, features, run=lambda block, features: block(features)):
    for block in model:
        features = run(block, features)
    return features.pow(2).mean()


def gradients_of(loss_of, model, features):
    torch.manual_seed(1)
    return gradients(loss_of, [features, *model.parameters()])


def gated(session_for, *kinds, cancellable=False, **settings):
    """A session whose flash tier has a gate."""
    made = []

    def wrap(tier):
        made.append(GatedTier(tier, *kinds, cancellable=cancellable))
        return made[0]

    session = session_for(wrap_tier=wrap, **settings)
    return session, made
