"""States on flash change nothing: weights and states are torch's, to the bit."""

import pytest
import torch
from optim_runs import assert_same, assert_same_states, give_gradients, parameters, train
from torch import nn

from penstock import optim
from penstock.optim import FlashAdamW, on_flash

NAMED = [
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": False}),
    ("Adam", {"weight_decay": 0.1}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "fused": False}),
    ("Adagrad", {"initial_accumulator_value": 0.25, "lr_decay": 0.01}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Lion", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_each_optimizer_gives_torchs_bits(name, options, small):
    ours, theirs = parameters(), parameters()
    flash = getattr(optim, f"Flash{name}")
    torchs = optim.Lion if name == "Lion" else getattr(torch.optim, name)
    open_choice = options.get("fused") is None and options.get("foreach") is None
    fused = {"fused": True} if flash.preferred and open_choice else {}
    a, b = flash(ours, **options, **small), torchs(theirs, **options, **fused)
    train(a, ours)
    train(b, theirs)
    assert isinstance(a, torchs)
    assert_same(ours, theirs)
    assert_same_states(a.state_dict(), b.state_dict())
    a.close()


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.NAdam,
        lambda p: torch.optim.RAdam(p, foreach=True),
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.Adagrad,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_element_wise_optimizer_runs_its_own_step(make, dtype, small):
    ours, theirs = parameters(dtype), parameters(dtype)
    a, b = on_flash(make(ours), **small), make(theirs)
    train(a, ours, steps=4)
    train(b, theirs, steps=4)
    assert_same(ours, theirs)
    assert_same_states(a.state_dict(), b.state_dict())
    a.close()


class OfTwo(torch.optim.Optimizer):
    """Sums the gradient before the last one, and what ``turn`` does with its states."""

    names = ("first", "second")

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        for name in self.names:
                            state[name] = torch.zeros_like(param)
                    self.turn(state, param.grad)
                    param.add_(state["first"] - 0.5 * state["second"], alpha=-group["lr"])


class Replacing(OfTwo):
    def turn(self, state, grad):
        state["first"].data = state["first"].data * 0.9 + grad
        state["second"].add_(grad)


class Shifting(OfTwo):
    def turn(self, state, grad):
        state["first"] = state["second"]
        state["second"] = grad.clone()


class ShiftingBack(Shifting):
    names = ("second", "first")


class Swapping(OfTwo):
    def turn(self, state, grad):
        state["first"].add_(grad)
        state["first"], state["second"] = state["second"], state["first"]


@pytest.mark.parametrize("make", [Replacing, Shifting, ShiftingBack, Swapping])
def test_an_optimizer_may_exchange_the_memory_of_its_states(make, small):
    ours, theirs = parameters(), parameters()
    a, b = on_flash(make(ours), **small), make(theirs)
    train(a, ours, steps=5)
    train(b, theirs, steps=5)
    assert_same(ours, theirs)
    assert_same_states(a.state_dict(), b.state_dict())
    a.close()


def test_a_trained_optimizer_is_moved_with_its_states(small):
    ours, theirs = parameters(), parameters()
    a, b = torch.optim.AdamW(ours), torch.optim.AdamW(theirs)
    train(a, ours, steps=2)
    train(b, theirs, steps=2)
    a = on_flash(a, **small)
    train(a, ours, steps=3)
    train(b, theirs, steps=3)
    assert_same(ours, theirs)
    a.close()


def test_parameters_without_gradients_are_left_alone(small):
    ours, theirs = parameters(), parameters()
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
    for optimizer, params in ((a, ours), (b, theirs)):
        train(
            optimizer, params, steps=5, skip=lambda step: [(0, 1), (4,), range(6), (), (5, 2)][step]
        )
    assert_same(ours, theirs)
    assert_same_states(a.state_dict(), b.state_dict())
    a.close()


def test_groups_schedulers_and_layouts(small):
    results = []
    for flash in (True, False):
        params = parameters()
        model = nn.Conv2d(8, 24, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            model.weight.copy_(torch.arange(24 * 72).reshape(24, 8, 3, 3) / 1000)
            model.bias.zero_()
        groups = [
            {"params": params[:2], "lr": 1e-2, "weight_decay": 0.0},
            {"params": params[2:], "betas": (0.8, 0.9)},
        ]
        opt = (
            FlashAdamW(groups, lr=1e-3, **small)
            if flash
            else (torch.optim.AdamW(groups, lr=1e-3, fused=True))
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=10)
        everything = list(params)
        for step in range(6):
            if step == 2:
                opt.add_param_group(
                    {
                        "params": list(model.parameters()),
                        "lr": 3e-3,
                        "max_lr": 1,
                        "max_momentum": 0.9,
                        "base_momentum": 0.8,
                        "initial_lr": 1e-3,
                        "min_lr": 1e-4,
                    }
                )
                everything += model.parameters()
            give_gradients(everything, step)
            opt.step()
            scheduler.step()
        results.append(everything)
        if flash:
            opt.close()
    assert_same(*results)


def test_a_bfloat16_model_has_a_float32_master(small):
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in theirs]
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(masters, fused=True)
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        for master, p in zip(masters, theirs, strict=True):
            master.grad = p.grad.float()
        a.step()
        b.step()
        with torch.no_grad():
            for master, p in zip(masters, theirs, strict=True):
                p.copy_(master)
    assert_same(ours, theirs)
    state = a.state_dict()["state"]
    assert_same([state[i]["master"] for i in range(len(masters))], masters)
    a.close()


def test_gradients_that_are_not_finite_do_what_they_do_in_torch(small):
    ours, theirs = parameters(), parameters()
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
    for optimizer, params in ((a, ours), (b, theirs)):
        give_gradients(params, 0)
        params[1].grad[0, 3] = float("nan")
        params[4].grad[2, 5] = float("inf")
        optimizer.step()
        train(optimizer, params, steps=2)
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
    a.close()


def test_closures_hooks_and_zero_grad_are_torchs(small):
    params = parameters()
    a = FlashAdamW(params, **small)
    calls = []
    a.register_step_pre_hook(lambda *_: calls.append("before"))
    a.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        a.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    first = a.step(closure)
    assert a.step(closure) < first
    assert calls == ["before", "after"] * 2
    a.zero_grad()
    assert all(p.grad is None for p in params)
    a.close()


@pytest.mark.parametrize("host_memory", [0, "64KiB", "1GiB"])
def test_memory_decides_what_is_moved_and_never_the_result(host_memory, small):
    ours, theirs = parameters(), parameters()
    a = FlashAdamW(ours, host_memory=host_memory, **small)
    b = torch.optim.AdamW(theirs, fused=True)
    train(a, ours)
    train(b, theirs)
    assert_same(ours, theirs)
    states = a._penstock
    assert (states.store.written == 0) == (host_memory == "1GiB")
    a.close()
