"""Compact states: split is a float32 master's training to the bit; the others converge beside it."""

import pytest
import torch
from optim_runs import assert_same, give_gradients, parameters, train
from torch import nn

from penstock import ConfigError
from penstock.lab import zoo
from penstock.optim import FlashAdamW, FlashLion, FlashSGD, on_flash


class Reference:
    """Mixed precision by hand: bfloat16 weights, a float32 master, torch's own optimizer."""

    def __init__(self, params, **options):
        self.params = params
        self.masters = [nn.Parameter(p.detach().float()) for p in params]
        self.inner = torch.optim.AdamW(self.masters, fused=True, **options)

    def step(self):
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.copy_(master)


def with_ties(params):
    """A few weights whose first updates land between two bfloat16 numbers."""
    with torch.no_grad():
        for p in params:
            p.view(-1)[:3] = 1.0
    return params


@pytest.mark.parametrize("format_name", ["exact", "split"])
def test_split_and_exact_are_training_with_a_float32_master(format_name, small):
    ours, theirs = (with_ties(parameters(torch.bfloat16)) for _ in range(2))
    a = FlashAdamW(ours, lr=2.0**-8, weight_decay=0, format=format_name, **small)
    b = Reference(theirs, lr=2.0**-8, weight_decay=0)
    for step in range(8):
        give_gradients(ours, step, skip=(2,) if step == 3 else ())
        give_gradients(theirs, step, skip=(2,) if step == 3 else ())
        a.step()
        b.step()
        assert_same(ours, theirs)
    assert_same([s["master"] for s in a.state_dict()["state"].values()], b.masters)
    a.close()


BYTES = {
    ("exact", torch.float32): 8,
    ("exact", torch.bfloat16): 12,
    ("split", torch.bfloat16): 10.125,
    ("bf16", torch.bfloat16): 6,
    ("int8", torch.bfloat16): 4 + 2 / 256,
    ("bf16", torch.float32): 4,
    ("int8", torch.float32): 2 + 2 / 256,
}


@pytest.mark.parametrize(("form", "expected"), BYTES.items())
def test_bytes_per_parameter_are_those_documented(form, expected, small):
    name, dtype = form
    a = FlashAdamW(parameters(dtype), format=name, **small)
    assert a._penstock.groups.laid[0].forms[0].bytes_per_parameter == expected
    a.close()


@pytest.mark.parametrize("format_name", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compact_states_do_not_depend_on_tiles_or_threads(format_name, dtype, small):
    results = []
    for tile, threads in ((1024, 2), (1 << 16, 1)):
        params = parameters(dtype)
        a = FlashAdamW(
            params, format=format_name, seed=3, **{**small, "tile": tile, "threads": threads}
        )
        train(a, params)
        results.append(params)
        a.close()
    assert_same(*results)
    other = parameters(dtype)
    a = FlashAdamW(other, format=format_name, seed=4, **small)
    train(a, other)
    assert any(not torch.equal(x, y) for x, y in zip(other, results[0], strict=True))
    a.close()


@pytest.mark.parametrize("format_name", ["bf16", "int8"])
def test_a_slowly_growing_variance_is_not_lost(format_name, small):
    """Nearest rounding would leave it where it is: an increment is below half of the last bit."""
    p = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    a = FlashAdamW([p], betas=(0.9, 0.999), format=format_name, **small)
    for step in range(300):
        p.grad = torch.full_like(p, 1.0 if step else 0.5)
        a.step()
    v = a.state_dict()["state"][0]["exp_avg_sq"]
    expected = 1 - 0.999**300 - 0.75 * 0.001 * 0.999**299
    assert abs(v.mean().item() / expected - 1) < 0.01
    a.close()


def test_formats_belong_to_groups(small):
    params = parameters(torch.bfloat16)
    a = FlashAdamW(
        [{"params": params[:3], "format": "split"}, {"params": params[3:]}], format="int8", **small
    )
    assert [form.format for laid in a._penstock.groups.laid for form in laid.forms] == [
        "split",
        "int8",
    ]
    train(a, params, steps=2)
    a.close()


@pytest.mark.parametrize("make", [FlashSGD, FlashLion])
def test_momentum_is_packed_for_other_optimizers_too(make, small):
    options = {"lr": 0.1, "momentum": 0.9} if make is FlashSGD else {}
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    a, b = make(ours, format="bf16", **options, **small), make(theirs, **options, **small)
    train(a, ours)
    train(b, theirs)
    packed, whole = a.state_dict()["state"], b.state_dict()["state"]
    name = "momentum_buffer" if make is FlashSGD else "exp_avg"
    for key, state in whole.items():
        difference = (packed[key][name] - state[name]).norm() / state[name].norm()
        assert 0 < difference < 0.02
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).float().norm() < 0.05 * y.float().norm()
    a.close()
    b.close()


def test_what_a_format_cannot_keep_is_refused(small):
    with pytest.raises(ConfigError, match="make the model bfloat16, or use 'exact'"):
        FlashAdamW(parameters(), format="split", **small)
    with pytest.raises(ConfigError, match="none of exact, split, bf16, int8"):
        FlashAdamW([{"params": parameters(), "format": "fp8"}], **small)
    with pytest.raises(ConfigError, match="cannot keep the state 'exp_inf'"):
        on_flash(torch.optim.Adamax(parameters()), format="int8", **small)
    with pytest.raises(ConfigError, match="use 'exact'"):
        FlashAdamW(parameters(torch.float16), format="bf16", fused=False, **small)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*takes more memory than in memory")
def test_compact_states_converge_beside_exact_ones_on_real_text(small):
    text = zoo.stdlib_text_bytes("1MiB")
    losses = {}
    for name in ("exact", "split", "bf16", "int8"):
        torch.manual_seed(0)
        model = zoo.build("gpt2", size="tiny")
        model = model.to(torch.bfloat16)
        a = FlashAdamW(model.parameters(), lr=1e-3, format=name, **{**small, "tile": 1 << 16})
        generator = torch.Generator().manual_seed(0)
        last = []
        for _ in range(200):
            a.zero_grad()
            loss = model(*text.batch(model.config, 8, generator=generator))
            loss.backward()
            a.step()
            last.append(loss.item())
        losses[name] = sum(last[-20:]) / 20
        a.close()
    assert losses["split"] == losses["exact"]
    assert losses["exact"] < 3
    assert abs(losses["bf16"] - losses["exact"]) < 0.05
    assert abs(losses["int8"] - losses["exact"]) < 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*takes more memory than in memory")
@pytest.mark.parametrize("format_name", ["exact", "split"])
def test_200_steps_on_real_text_are_training_with_a_float32_master(format_name, small):
    """The gradients come from the weights, so one bit that differs would spread."""
    text = zoo.stdlib_text_bytes("1MiB")
    weights = []
    for flash in (True, False):
        torch.manual_seed(0)
        model = zoo.build("gpt2", size="tiny").to(torch.bfloat16)
        params = list(model.parameters())
        options = {"lr": 1e-3, "weight_decay": 0.1}
        if flash:
            a = FlashAdamW(params, format=format_name, **options, **{**small, "tile": 1 << 14})
        optimizer = a if flash else Reference(params, **options)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            model.zero_grad()
            model(*text.batch(model.config, 4, generator=generator)).backward()
            optimizer.step()
        weights.append(params)
    a.close()
    assert_same(*weights)
