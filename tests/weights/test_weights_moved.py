"""Weights that rest and are moved to another device, which a warning tells, or are converted."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import penstock
from penstock import weights
from penstock.homed import home_of
from penstock.weights.resting import RestingParameter
from weights_rig import (
    FLOOR,
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    bits,
    built,
    inputs,
    on_flash,
    scripted,
    sgd,
    state_of,
    trained,
)

LIMIT = 3 * WEIGHT_BYTES


class Elsewhere(torch.Tensor):
    """A tensor in host memory that says that it is on a GPU, as this machine may have none."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("cuda:0")


def moved_elsewhere(model):
    """Do as ``model.to("cuda")``."""
    model._apply(lambda each: bits(each).as_subclass(Elsewhere))


MOVED = r"weight layers\.0\.weight was moved to cuda:0, .*offload\(model, weights='flash', device="


@pytest.mark.parametrize("how", ["session", "after a session", "built", "in place"])
def test_a_model_that_is_moved_to_another_device_is_warned_of_once(how, disk_path):
    expected = state_of(built(Chain))
    if how == "built":
        with penstock.built_on_flash(disk_path, floor=FLOOR):
            model = built(Chain)
        named = r"weight Linear\.weight was moved"
    else:
        model, named = built(Chain), MOVED
    if how == "in place":
        weights.save(model, disk_path / "saved")
        weights.load(model.requires_grad_(False), disk_path / "saved", in_place=True, floor=FLOOR)
    if how == "after a session":
        with on_flash(model, disk_path, limit=LIMIT):
            pass
    assert all(type(each) is RestingParameter for each in model.parameters()) == (how != "session")
    with on_flash(model, disk_path, limit=LIMIT) if how == "session" else nullcontext() as session:
        with pytest.warns(penstock.PenstockWarning, match=named) as warned:
            moved_elsewhere(model)
        assert len(warned) == 1
        assert all(type(each) is nn.Parameter for each in model.parameters())
        assert all(home_of(each) is None for each in model.parameters())
        if session is not None:
            assert "6 of them stay in memory" in session._weights.note()
    assert_same(state_of(model), expected)


@pytest.mark.parametrize("in_session", [False, True])
def test_memory_that_torch_refuses_leaves_a_weight_at_home(disk_path, in_session):
    model = built(Chain)
    with on_flash(model, disk_path, limit=LIMIT):
        pass
    with on_flash(model, disk_path, limit=LIMIT) if in_session else nullcontext():
        home = home_of(model.layers[2].weight)
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            model.layers[2].weight.data = torch.empty(WIDTH, WIDTH, device="meta")
        assert home_of(model.layers[2].weight) is home
        assert type(model.layers[2].weight) is RestingParameter
        assert_same(state_of(model), state_of(built(Chain)))
    assert_same(state_of(model), state_of(built(Chain)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", ["built", "in place"])
def test_a_model_that_rests_is_converted(how, dtype, disk_path):
    plain, data = built(Chain).to(dtype), [x.to(dtype) for x in inputs(2)]
    if how == "built":
        with penstock.built_on_flash(disk_path, floor=FLOOR):
            model = built(Chain)
    else:
        weights.save(built(Chain), disk_path / "saved")
        model = built(Chain, seed=1).requires_grad_(False)
        weights.load(model, disk_path / "saved", in_place=True, floor=FLOOR)
    model.to(dtype)
    kind = RestingParameter if how == "built" else nn.Parameter
    assert all(type(each) is kind for each in model.parameters())
    assert_same(state_of(model), state_of(plain))
    model.requires_grad_(True)
    with scripted() as engine, on_flash(model, disk_path, limit=2 * LIMIT):
        assert_same(trained(model, sgd(model), data), trained(plain, sgd(plain), data))
        assert engine.read_bytes > 0 or how == "built"
    assert_same(state_of(model), state_of(plain))
