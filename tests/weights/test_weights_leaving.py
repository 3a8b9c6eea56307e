"""Weights that leave after their use: passes of several kinds in turn, and graphs of backward."""

import torch
from torch import nn

from penstock.io.engine import Priority
from weights_rig import (
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    Traffic,
    built,
    flash_adamw,
    on_flash,
    scripted,
    settle,
    train_step,
)


class Two(nn.Module):
    """Two chains of eight layers, of which each call runs one."""

    def __init__(self):
        super().__init__()
        self.chains = nn.ModuleList(Chain(8) for _ in range(2))

    def forward(self, x, which):
        return self.chains[which](x)


def test_passes_in_turn_are_read_ahead(disk_path):
    """Each kind of pass fits in memory alone, so that all of its weights stay while it is repeated."""
    with scripted():
        model = built(Two)
        with on_flash(model, disk_path, limit=10 * WEIGHT_BYTES) as session:
            memory = session._weights._table.memory
            begin, priorities = memory.begin, []

            def noted(home, priority, *, force):
                begun = begin(home, priority, force=force)
                if begun is not None:
                    priorities.append(priority)
                return begun

            memory.begin = noted
            with torch.no_grad():
                for _ in range(5):
                    priorities.clear()
                    for chain in model.chains:
                        for _ in range(2):
                            chain(torch.ones(2, WIDTH))
            assert len(priorities) <= 2 * 8
            assert priorities.count(Priority.DEMAND) <= 2 * 2


def test_what_backward_saves_once_more_is_known_as_a_weight(disk_path):
    """As of a penalty on gradients: else the graph of backward would hold the weights, or write them."""
    depth = 6
    with scripted():
        model = built(lambda: Chain(depth))
        with on_flash(model, disk_path, limit=3 * WEIGHT_BYTES) as session:
            streamer = session._weights
            reference, known = streamer.reference, []

            def noted(tensor, storage):
                found = reference(tensor, storage)
                if storage.nbytes() == WEIGHT_BYTES:
                    known.append(found is not None)
                return found

            streamer.reference = noted
            for _ in range(3):
                known.clear()
                x = torch.ones(4, WIDTH, requires_grad=True)
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                slope.square().sum().backward()
            assert known.count(True) >= 2 * depth
            assert all(known)


def test_models_that_are_trained_in_turn_keep_what_fits(disk_path):
    """A step of one foretells nothing of a step of the other."""
    rounds = 4
    with scripted():
        models = [built(lambda: Chain(8), seed) for seed in range(2)]
        with on_flash(nn.ModuleList(models), disk_path, limit=14 * WEIGHT_BYTES) as session:
            optimizers = [flash_adamw(model, disk_path, overlap=True) for model in models]
            traffic = Traffic(session._weights)
            for step in range(2 + rounds):
                if step == 2:
                    settle(session._weights)
                    traffic.reset()
                for model, optimizer in zip(models, optimizers, strict=True):
                    train_step(model, optimizer, torch.ones(4, WIDTH))
            settle(session._weights)
    # each weight would be read twice in a round, were it to leave after each of its uses
    assert traffic.read <= rounds * 16 * WEIGHT_BYTES
    assert traffic.written <= rounds * 12 * WEIGHT_BYTES
