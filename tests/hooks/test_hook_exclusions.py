"""``penstock.hooks.exclusions``: what belongs to the model, however it is dressed."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.homed import is_sharded
from penstock.hooks.exclusions import ProtectedStorages, leaf_of


def holds(protected, tensor):
    return protected.holds(tensor.untyped_storage())


def test_parameters_and_buffers_of_a_module_and_all_below():
    protected = ProtectedStorages()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    protected.add_module(model)
    for tensor in (*model.parameters(), *model.buffers()):
        assert holds(protected, tensor)
        assert holds(protected, tensor.detach().view(-1))
    assert not holds(protected, torch.ones(4))


def test_an_optimizers_parameters_and_state():
    protected = ProtectedStorages()
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    protected.add_optimizer(optimizer)
    assert holds(protected, weight)
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state[weight]
    assert not holds(protected, state["exp_avg"])
    protected.refresh()
    assert holds(protected, state["exp_avg"])
    assert holds(protected, state["exp_avg_sq"])


def test_a_lazy_module_has_nothing_to_protect_before_it_runs(session_for):
    """Its first forward may fall into a session, which is where it gets its weights."""

    def trained():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LazyLinear(64), nn.LazyBatchNorm1d())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(256, 64)).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    without = trained()
    with session_for():
        within = trained()
    assert all(torch.equal(without[name], within[name]) for name in without)
    protected = ProtectedStorages()
    lazy = nn.LazyLinear(4)
    protected.add_module(lazy)
    lazy(torch.ones(1, 4))
    protected.refresh()
    assert holds(protected, lazy.weight)


def test_refresh_looks_again_and_forgets_what_is_gone():
    protected = ProtectedStorages()
    model = nn.Linear(4, 4)
    protected.add_module(model)
    before = model.weight.untyped_storage()
    model.weight.data = torch.ones(4, 4)
    assert not holds(protected, model.weight)
    protected.refresh()
    assert holds(protected, model.weight)
    assert not protected.holds(before)


def test_the_address_of_a_dead_parameter_protects_nothing():
    """Its StorageImpl is freed, and an activation's is made at the same place."""
    protected = ProtectedStorages()
    activation = torch.ones(4)
    key = activation.untyped_storage()._cdata
    dead = torch.ones(4)
    protected.storages[key] = weakref.ref(dead.untyped_storage())
    assert not holds(protected, activation)
    del dead
    assert not holds(protected, activation)
    protected.storages[key] = weakref.ref(activation.untyped_storage())
    assert holds(protected, activation)


def test_modules_and_optimizers_are_not_kept_alive():
    protected = ProtectedStorages()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    protected.add_module(model)
    protected.add_optimizer(optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    assert [ref() for ref in gone] == [None, None]
    protected.refresh()
    assert not protected.storages


LEAVES = {
    "itself": lambda w: w,
    "transposed": lambda w: w.t(),
    "slice": lambda w: w[1:],
    "chain": lambda w: w.view(16).narrow(0, 2, 8).view(2, 4).permute(1, 0).unsqueeze(0).squeeze(0),
    "expanded": lambda w: w[0].expand(4, 4),
    "select": lambda w: w.select(0, 1),
    "split": lambda w: w.split(2)[1],
    "chunk": lambda w: w.chunk(2, dim=1)[0],
    "strided": lambda w: w.as_strided((2, 2), (4, 1), 1),
    "cast": lambda w: w.bfloat16(),
    "cast view": lambda w: w.t().bfloat16().t()[1:],
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_views_and_casts_lead_to_their_leaf(make):
    weight = torch.ones(4, 4, requires_grad=True)
    assert leaf_of(make(weight)) is weight


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w * 1,
        lambda w: (w * 2).t(),
        lambda w: w.clone(),
        lambda w: w.t().contiguous(),
        lambda w: F.relu(w).bfloat16(),
        lambda w: w.detach(),
        lambda w: torch.ones(4, 4),
        lambda w: (torch.ones(4, 4) * w).view(16),
    ],
)
def test_what_was_computed_leads_to_none(make):
    assert leaf_of(make(torch.ones(4, 4, requires_grad=True))) is None


def test_a_view_of_a_view_of_a_leaf_through_its_base():
    """Autograd replays chains of views on the base, so the walk need not be long."""
    weight = torch.ones(64, requires_grad=True)
    view = weight
    for _ in range(30):
        view = view.view(64)
    assert leaf_of(view) is weight


def test_plain_tensors_are_no_dtensors():
    assert not is_sharded(torch.ones(1))
    assert not is_sharded(nn.Parameter(torch.ones(1)))
