"""Weights that a model gets while its weights rest on flash."""

import gc
import os
from pathlib import Path

import torch
from torch import nn

from penstock.weights.resting import RestingParameter
from weights_rig import (
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    built,
    homes_of,
    inputs,
    on_flash,
    sgd,
    trained,
)

LIMIT = 3 * WEIGHT_BYTES


def test_weights_that_are_assigned_rest_when_they_are_used(disk_path):
    plain, model = built(Chain), built(Chain)
    plain.load_state_dict(built(Chain, seed=1).state_dict(), assign=True)
    expected = trained(plain, sgd(plain), inputs(3))
    with on_flash(model, disk_path, limit=LIMIT) as session:
        model.load_state_dict(built(Chain, seed=1).state_dict(), assign=True)
        found = trained(model, sgd(model), inputs(3))
        large = [each for each in model.parameters() if each.nbytes >= WEIGHT_BYTES]
        assert large
        assert all(type(each) is RestingParameter for each in large)
        names = {name for name, each in model.named_parameters() if each.nbytes >= WEIGHT_BYTES}
        assert set(homes_of(session)) == names
    assert_same(found, expected)


def test_a_module_that_is_added_later_rests_when_it_is_called(disk_path):
    def lengthened(model):
        torch.manual_seed(7)
        width = model(inputs(1)[0]).shape[-1]
        return nn.Sequential(model, nn.Linear(width, width, bias=False))

    plain, model = built(Chain), built(Chain)
    longer = lengthened(plain)
    expected = trained(longer, sgd(longer), inputs(3))
    with on_flash(model, disk_path, limit=LIMIT):
        longer = lengthened(model)
        found = trained(longer, sgd(longer), inputs(3))
        assert type(longer[1].weight) is RestingParameter
    assert_same(found, expected)


def test_weights_of_lazy_modules_rest_in_the_next_session(disk_path):
    def make():
        return nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyLinear(WIDTH))

    def run(model):
        with torch.no_grad():
            model(inputs(1)[0])
        return trained(model, sgd(model), inputs(2))

    plain = built(make)
    expected = run(plain) + trained(plain, sgd(plain), inputs(2))
    model = built(make)
    with on_flash(model, disk_path, limit=LIMIT):
        found = run(model)
    with on_flash(model, disk_path, limit=LIMIT) as session:
        found += trained(model, sgd(model), inputs(2))
        assert len(homes_of(session)) == 2
    assert_same(found, expected)


def test_weights_that_are_assigned_again_and_again_take_no_more_places(disk_path):
    def run(model, after_each):
        found = []
        for seed in range(1, 6):
            model.load_state_dict(built(Chain, seed=seed).state_dict(), assign=True)
            found += trained(model, sgd(model), inputs(2))
            after_each()
        return found

    def disk_bytes():
        gc.collect()
        links = {
            each: os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()
        }
        blocks = [os.stat(each).st_blocks for each, to in links.items() if str(disk_path) in to]
        weights = session._weights
        taken.append((len(blocks), sum(blocks), len(weights._table.stays), weights.total_bytes))

    taken = []
    expected = run(built(Chain), lambda: None)
    model = built(Chain)
    with on_flash(model, disk_path, limit=LIMIT) as session:
        found = run(model, disk_bytes)
    assert taken[-1] == taken[1]
    assert_same(found, expected)


def test_a_new_weight_rests_though_it_has_the_identity_of_the_one_before(disk_path):
    model = built(Chain)
    names = [name for name, each in model.named_parameters() if each.nbytes >= WEIGHT_BYTES]
    with on_flash(model, disk_path, limit=LIMIT):
        for _ in range(3):
            for name in names:
                path, _, own = name.rpartition(".")
                module, shape = model.get_submodule(path), model.get_parameter(name).shape
                values = torch.randn(shape)
                delattr(module, own)
                setattr(module, own, nn.Parameter(values))
                del values
            trained(model, sgd(model), inputs(1))
        assert all(type(model.get_parameter(name)) is RestingParameter for name in names)


def test_a_weight_that_was_dropped_serves_the_backward_that_needs_it(disk_path):
    def run(model):
        x = inputs(1)[0].requires_grad_()
        loss = model(x).square().mean()
        model.load_state_dict(built(Chain, seed=1).state_dict(), assign=True)
        trained(model, sgd(model), inputs(2))
        loss.backward()
        return [x.grad]

    expected = run(built(Chain))
    model = built(Chain)
    with on_flash(model, disk_path, limit=LIMIT):
        found = run(model)
    assert_same(found, expected)


def test_a_dropped_weight_that_somebody_still_sees_keeps_its_values(disk_path):
    model = built(Chain)
    with on_flash(model, disk_path, limit=LIMIT):
        trained(model, sgd(model), inputs(1))
        seen = {name: each.detach().numpy() for name, each in model.named_parameters()}
        values = {name: each.copy() for name, each in seen.items()}
        for seed in range(1, 4):
            model.load_state_dict(built(Chain, seed=seed).state_dict(), assign=True)
            trained(model, sgd(model), inputs(2))
        for name, each in seen.items():
            assert (each == values[name]).all(), name


class Taught(nn.Module):
    """Has a teacher that is no module of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.teachers = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(4)]

    def forward(self, x):
        x = self.layer(x)
        for teacher in self.teachers:
            x = torch.tanh(teacher(x))
        return x


def test_modules_that_a_model_calls_and_does_not_have_rest_too(disk_path):
    plain, model = built(Taught), built(Taught)
    expected = trained(plain, sgd(plain), inputs(3))
    with on_flash(model, disk_path, limit=LIMIT):
        found = trained(model, sgd(model), inputs(3))
        assert all(type(each.weight) is RestingParameter for each in model.teachers)
    assert_same(found, expected)
