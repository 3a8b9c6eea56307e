"""Updates during backward, with durable steps and against what users do to gradients."""

import gc

import pytest
import torch
from optim_runs import assert_same
from test_optim_overlap import backward, network

from penstock import ChecksumError, ConfigError
from penstock.optim import FlashAdamW


@pytest.fixture
def make(small):
    made = []

    def one(model, **settings):
        a = FlashAdamW(model.parameters(), lr=1e-2, overlap=True, **{**small, **settings})
        made.append(a)
        return a

    yield one
    for each in made:
        each.close()


def train(model, optimizer, first, steps):
    for step in range(first, first + steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def reference(steps):
    model = network()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), 0, steps)
    return model


def test_gradients_that_are_replaced_after_use_are_an_error(make):
    model = network()
    a = make(model)
    backward(model, 0)
    model[0].weight.grad = model[0].weight.grad.clamp(-1e-3, 1e-3)
    with pytest.raises(ConfigError, match="was changed between backward and step"):
        a.step()


@pytest.fixture
def process_group(tmp_path):
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def parallel(model, **settings):
    return torch.nn.parallel.DistributedDataParallel(model, **settings)


@pytest.mark.parametrize("are_views", [False, True])
def test_a_module_that_averages_later_is_refused_before_a_weight_changes(
    make, process_group, are_views
):
    model = network()
    make(model)
    before = [each.clone() for each in model.parameters()]
    averaging = parallel(model, gradient_as_bucket_view=are_views)
    with pytest.raises(ConfigError, match=r"DistributedDataParallel averages.*update_after"):
        backward(averaging, 0)
    assert_same(model.parameters(), before)


@pytest.mark.parametrize("are_views", [False, True])
def test_parameters_that_are_added_later_are_updated_after_averages_too(
    process_group, small, are_views
):
    model = network()
    averaging = parallel(model, gradient_as_bucket_view=are_views)
    first, *others = model.parameters()
    a = FlashAdamW([first], lr=1e-2, overlap=True, **small)
    a.update_after(averaging)
    train(averaging, a, 0, 2)
    a.add_param_group({"params": others})
    averaging.zero_grad()
    train(averaging, a, 2, 2)
    theirs = network()
    first, *others = theirs.parameters()
    b = torch.optim.AdamW([first], lr=1e-2, fused=True)
    train(theirs, b, 0, 2)
    b.add_param_group({"params": others})
    theirs.zero_grad()
    train(theirs, b, 2, 2)
    assert_same(model.parameters(), theirs.parameters())
    a.close()


@pytest.mark.parametrize("are_views", [False, True])
def test_averaged_gradients_that_are_changed_are_an_error(make, process_group, are_views):
    model = network()
    a = make(model)
    averaging = parallel(model, gradient_as_bucket_view=are_views)
    a.update_after(averaging)
    backward(averaging, 0)
    model[0].weight.grad.mul_(2)
    with pytest.raises(ConfigError, match="was changed between backward and step"):
        a.step()


@pytest.mark.parametrize("change", ["another", "zeroed", "element"])
@pytest.mark.parametrize("are_views", [False, True])
def test_averaged_gradients_that_are_replaced_or_changed_a_little_are_an_error(
    make, process_group, are_views, change
):
    model = network()
    a = make(model)
    averaging = parallel(model, gradient_as_bucket_view=are_views)
    a.update_after(averaging)
    for step in range(2):  # the second time its buckets are other ones
        backward(averaging, step)
        a.step()
        a.zero_grad(set_to_none=not step)
    backward(averaging, 2)
    last = model[2].weight
    if change == "another":
        last.grad = last.grad.clamp(-1e-3, 1e-3)
    elif change == "zeroed":
        a.zero_grad()
    else:
        last.grad[3, 5] += 1
    with pytest.raises(ConfigError, match="was changed between backward and step"):
        a.step()


def test_ranks_that_have_no_inputs_left_are_refused_before_a_weight_changes(make, process_group):
    model = network()
    a = make(model)
    averaging = parallel(model)
    a.update_after(averaging)
    before = [each.clone() for each in model.parameters()]
    with (
        averaging.join(),
        pytest.raises(ConfigError, match=r"join\(\) averages.*leave overlap out"),
    ):
        backward(averaging, 0)
    assert_same(model.parameters(), before)


def test_an_averaged_gradient_too_many_is_an_error(make, process_group):
    model = network()
    a = make(model)
    averaging = parallel(model)
    a.update_after(averaging)
    backward(averaging, 0)
    with pytest.raises(ConfigError, match="got gradient number 2"):
        backward(averaging, 1)


def test_what_cannot_be_followed_is_refused(make, process_group, small):
    model = network()
    a = make(model)
    for settings, text in (
        ({"find_unused_parameters": True}, "find_unused_parameters=True averages zeros"),
        ({"static_graph": True}, "static_graph=True averages zeros"),
    ):
        with pytest.raises(ConfigError, match=text):
            a.update_after(parallel(model, **settings))
    with pytest.raises(ConfigError, match="this is a Sequential"):
        a.update_after(model)
    with pytest.raises(ConfigError, match="none of that module's parameters"):
        a.update_after(parallel(network()))
    averaging = parallel(model)
    a.update_after(averaging)
    with pytest.raises(ConfigError, match="has a communication hook already"):
        a.update_after(averaging)
    a.close()
    with pytest.raises(ConfigError, match="gradient_memory does not go with update_after"):
        make(model, gradient_memory=0).update_after(averaging)
    plain = FlashAdamW(network().parameters(), **small)
    with pytest.raises(ConfigError, match="update_after is for overlap=True"):
        plain.update_after(averaging)
    plain.close()


def test_after_such_an_error_weights_and_a_state_dict_can_be_loaded(make):
    model = network()
    a = make(model)
    train(model, a, 0, 2)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    states = a.state_dict()
    backward(model, 2)
    model[0].weight.grad.mul_(2)
    with pytest.raises(ConfigError, match="was changed"):
        a.step()
    a.zero_grad()
    model.load_state_dict(weights)
    a.load_state_dict(states)
    train(model, a, 2, 2)
    assert_same(model.parameters(), reference(4).parameters())


def test_a_learning_rate_tensor_that_is_filled_anew_is_an_error(make):
    model = network()
    a = make(model)
    a.param_groups[0]["lr"] = torch.tensor(1e-2)
    backward(model, 0)
    a.param_groups[0]["lr"].fill_(1.0)
    with pytest.raises(ConfigError, match="change it after step"):
        a.step()


def test_an_old_gradient_of_a_frozen_parameter_is_used_as_torch_does(make):
    ours, theirs = network(), network()
    for model, optimizer in (
        (ours, make(ours)),
        (theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)),
    ):
        for step in range(3):
            backward(model, step)
            optimizer.step()
            model[2].bias.requires_grad_(False)
            kept = model[2].bias.grad
            optimizer.zero_grad()
            model[2].bias.grad = kept
    assert_same(ours.parameters(), theirs.parameters())


def test_a_gradient_that_comes_too_late_is_an_error(make):
    model = network()
    model[2].bias.requires_grad_(False)
    a = make(model)
    backward(model, 0)
    model[2].bias.grad = torch.ones(130)
    with pytest.raises(ConfigError, match="after its tile was updated"):
        a.step()


def test_a_failure_in_the_rest_of_a_step_is_remembered(make, monkeypatch):
    model = network()
    a = make(model, accumulation=2)  # so that everything is left to step
    backward(model, 0)
    states = a._penstock
    update, calls = states.update, []

    def fail(tile, step):
        calls.append(tile)
        if len(calls) == 5:
            raise ChecksumError("as if")
        update(tile, step)

    monkeypatch.setattr(states, "update", fail)
    with pytest.raises(ChecksumError):
        a.step()
    with pytest.raises(RuntimeError, match="failed in the middle"):
        a.step()


def test_only_one_optimizer_updates_a_parameter_in_backward(make):
    model = network()
    first = make(model)
    with pytest.raises(ConfigError, match="close"):
        make(model)
    first.close()
    make(model).close()


def test_one_that_was_dropped_does_not_go_on(small):
    model = network()
    dropped = FlashAdamW(model.parameters(), overlap=True, **small)
    del dropped
    gc.collect()
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    assert_same(model.parameters(), before)


# -- durable ---------------------------------------------------------------------------------------


def test_a_durable_run_goes_on_with_the_same_bits(make):
    model = network()
    a = make(model, durable=True)
    train(model, a, 0, 3)
    a.close()
    model = network()
    a = make(model, durable=True)
    assert a.resume() == 3
    train(model, a, 3, 2)
    assert_same(model.parameters(), reference(5).parameters())


def test_the_norm_of_the_step_before_is_durable_too(make, small):
    small["flash"].joinpath("b").mkdir()
    whole = network()
    train(whole, make(whole, clip_norm=0.01), 0, 5)
    model = network()
    a = make(model, durable=True, clip_norm=0.01)
    train(model, a, 0, 3)
    states, weights = a.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    a.close()
    model = network()
    a = make(model, durable=True, clip_norm=0.01)
    assert a.resume() == 3
    train(model, a, 3, 2)
    assert_same(model.parameters(), whole.parameters())
    b = network()
    b.load_state_dict(weights)
    c = make(b, clip_norm=0.01, flash=small["flash"] / "b")
    c.load_state_dict(states)
    train(b, c, 3, 2)
    assert_same(b.parameters(), whole.parameters())


def test_backward_does_not_overwrite_what_an_earlier_run_left(make):
    model = network()
    a = make(model, durable=True)
    train(model, a, 0, 1)
    a.close()
    careless = network(seed=1)
    b = make(careless, durable=True)
    with pytest.raises((ConfigError, RuntimeError), match=r"call resume\(\)"):
        train(careless, b, 0, 1)
    b.close()
    model = network()
    c = make(model, durable=True)
    assert c.resume() == 1
    assert_same(model.parameters(), reference(1).parameters())


def test_a_run_that_dies_between_backward_and_step_goes_on_after_the_step_before(make, small):
    model = network()
    a = make(model, durable=True)
    train(model, a, 0, 2)
    backward(model, 2)
    a.close()  # what was updated is on flash, and no journal says so
    model = network()
    b = make(model, durable=True)
    assert b.resume() == 2
    train(model, b, 2, 2)
    assert_same(model.parameters(), reference(4).parameters())
