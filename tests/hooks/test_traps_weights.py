"""Rules 2 and 3: what belongs to the model is never moved, however it is dressed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trap_runs import LARGE, flow_count, leaf, storage_key, taken_keys

from offload_runs import counted, gradients, same_bits, wait_for_writes
from penstock.observe.recorder import Stage


class FlatLinear(nn.Module):
    """A layer whose weight is a slice of a flat parameter, as FSDP1 makes them."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.randn(2 * LARGE))

    def forward(self, features):
        return F.linear(features, self.flat[LARGE:].view(64, 64))


def tied():
    embedding = nn.Linear(64, 64, bias=False)
    other = nn.Linear(64, 64, bias=False)
    other.weight = embedding.weight
    return nn.Sequential(embedding, other)


def frozen():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(64, 64),
        lambda: nn.Conv2d(16, 64, 3),
        FlatLinear,
        tied,
        frozen,
        lambda: nn.BatchNorm1d(LARGE).eval(),
        lambda: nn.Embedding(64, 64),
    ],
    ids=["linear", "conv", "flat", "tied", "frozen", "batchnorm", "embedding"],
)
@pytest.mark.parametrize("told", [True, False], ids=["given", "found"])
def test_trap_02_weights_and_buffers_are_not_moved(session_for, build, told):
    """``Linear`` saves ``weight.t()``, which is no ``Parameter``; ``BatchNorm`` saves its running
    mean. An offloader that asks ``isinstance(tensor, Parameter)`` writes the whole model each step.
    Here the model is known, or is met when it is called first.
    """
    torch.manual_seed(0)
    model = build()
    state = [*model.parameters(), *model.buffers()]
    if isinstance(model, nn.Embedding):
        features = torch.arange(8)
    elif isinstance(model, nn.Conv2d):
        features = leaf(1, 16, 4, 4)
    else:
        features = leaf(2, LARGE if isinstance(model, nn.BatchNorm1d) else 64)
    with session_for(model if told else None) as session:
        loss = model(features).pow(2).sum()
        assert taken_keys(session).isdisjoint(map(storage_key, state))
        loss.backward()


def test_trap_02_a_leaf_of_no_module_is_not_moved(session_for):
    """Functional code keeps its weights in a list. What requires a gradient and has no history is
    one, also behind views.
    """
    weights = [leaf(64, 64, seed=seed) for seed in range(3)]
    with session_for() as session:
        features = leaf(2, 64)
        for weight in weights:
            features = F.linear(features, weight.t().contiguous().t()[:, :64])
        wait_for_writes(session)
        assert (
            flow_count(session, Stage.WRITE) == 3
        )  # the contiguous copies are tensors by themselves
        features = features @ weights[0] @ weights[1].transpose(0, 1).unsqueeze(0).squeeze(0)
        wait_for_writes(session)
        assert flow_count(session, Stage.WRITE) == 3
        assert taken_keys(session).isdisjoint(map(storage_key, weights))


def test_trap_02_weights_replaced_in_training_are_known_after_the_step(session_for):
    """``model.half()``, an unshard, or a loaded checkpoint give parameters new storages."""
    model = nn.Linear(64, 64).requires_grad_(False)
    features = leaf(2, 64)
    with session_for(model) as session:
        model(features).sum().backward()
        model.weight.data = model.weight.data.clone()
        session.step()
        model(features).sum().backward()
        assert flow_count(session, Stage.WRITE) == 0


def test_trap_02_optimizer_state_is_not_moved(session_for):
    """A differentiable use of a momentum buffer, as meta-learning makes it."""
    weight = leaf(LARGE)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with session_for(optimizer=optimizer) as session:
        weight.pow(2).sum().backward()
        optimizer.step()
        momentum = optimizer.state[weight]["momentum_buffer"]
        loss = (weight * 2 * momentum).sum()
        assert storage_key(momentum) not in taken_keys(session)
        loss.backward()


def test_trap_03_copies_of_weights_under_autocast_are_not_moved(session_for):
    """Under autocast ``Linear`` saves a bfloat16 copy of its weight: a new storage, in no set of
    parameters. Moving those would write the model once more each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 1))
    features = leaf(2, 128)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(features).float().sum()

    leaves = [features, *model.parameters()]
    expected = gradients(loss, leaves)
    with session_for(model) as session:
        found = gradients(loss, leaves)
        assert flow_count(session, Stage.WRITE) == 0
        assert counted(session, "kept.weights") >= 2
    assert all(map(same_bits, found, expected))
