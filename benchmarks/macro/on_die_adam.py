"""What on-die arithmetic costs in accuracy: networks trained by the simulated element, and by torch.

The element has no division: Adam is fused into five passes, its root is a guess from the bits of a number
and Newton steps, constants are broadcast (lab.ssd.element). Two small networks are trained by it on
real data, a perceptron on scikit-learn's digits and a GPT on the bytes of Python's standard library: with
0 to 3 Newton steps, with new weights returned in bfloat16 as OptimStore does, with states of two bytes,
by three kinds of rounding, and with bits of flash that are wrong in what is read, behind a check or none.
Beside each, torch.optim.Adam from the same beginning and on the same batches, in double precision as
well, which tells how much any rounding changes a run; where new weights come back in bfloat16, torch's do
as well. Seeds change the beginning, the batches and the wrong bits.
"""

import argparse
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import _results
from penstock.lab.ssd.bit_flips import BitFlips, DieCheck
from penstock.lab.ssd.processing_element import Element, Rounding, constants, inverse_root, to_fp32

RATE = 1e-3
CONTEXT, WIDTH = 32, 64
LOST = 1.25
"""A run whose final loss is over so many times torch's, or no number, is lost."""
SHORT = {rounding: f"moments of two bytes, {rounding}" for rounding in Rounding}
WRONG = (1e-8, 1e-7, 1e-6, 1e-5)


class Digits:
    """A perceptron of 26 000 weights; a fifth of the 1797 pictures is held out."""

    name, steps, batch, seeds = "digits", 900, 64, (1, 2, 3, 4, 5)

    def __init__(self):
        pictures, labels = load_digits(return_X_y=True)
        self.x = torch.from_numpy(pictures / 16).float()
        self.y = torch.from_numpy(labels)
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(0))
        self.held, self.part = order[:360], order[360:]

    def made(self):
        return nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def drawn(self, chance):
        at = self.part[torch.randint(0, len(self.part), (self.batch,), generator=chance)]
        return self.x[at], self.y[at]

    def test(self):
        return self.x[self.held], self.y[self.held]


class Gpt(nn.Module):
    """Two layers; every state stays below 2, as one of the checks wants."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
        self.embed.weight.data.mul_(0.1)
        layers = [
            nn.TransformerEncoderLayer(
                WIDTH,
                4,
                2 * WIDTH,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(2)
        ]
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text):
        x = self.embed(text) + self.place
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.last(x)


class Text:
    """The next byte; the last tenth of the sources is held out."""

    name, steps, batch, seeds = "gpt", 300, 16, (1, 2, 3)

    def __init__(self):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        data = b"".join(file.read_bytes() for file in files)[:4_000_000]
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        cut = len(whole) * 9 // 10
        self.part, self.held = whole[:cut], whole[cut:]

    def made(self):
        return Gpt()

    def drawn(self, chance, text=None, batch=None):
        text = self.part if text is None else text
        at = torch.randint(0, len(text) - CONTEXT - 1, (batch or self.batch,), generator=chance)
        rows = text[at[:, None] + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]

    def test(self):
        return self.drawn(torch.Generator().manual_seed(1), self.held, 256)


class Torch:
    """torch.optim.Adam over all weights as one tensor."""

    def __init__(self, weights, *, seed, dtype=torch.float32):
        self.weights = nn.Parameter(weights.to(dtype, copy=True))
        self.optimizer = torch.optim.Adam([self.weights], lr=RATE)

    def step(self, number, gradient):
        self.weights.grad = gradient.to(self.weights.dtype)
        self.optimizer.step()
        return self.weights.detach()


class OnDie:
    """The element over the same, its states as flash has them."""

    def __init__(self, weights, *, seed, wrong=0.0, check=DieCheck.NONE, **settings):
        self.flips, look = BitFlips(wrong, seed=seed), BitFlips(0.0, check=check)
        if wrong:
            settings["read"] = lambda page: self.flips(page.ctypes.data, page.nbytes)
            settings["check"] = lambda words: look(words.ctypes.data, words.nbytes)
        self.element = Element(random=np.random.default_rng(seed), **settings)
        self.pages = self.element.programmed("adam", weights.numpy().copy())

    def step(self, number, gradient):
        told = constants("adam", number, rate=RATE)
        self.pages = self.element.step("adam", self.pages, gradient.numpy(), told)
        return torch.from_numpy(to_fp32(self.pages[0]))


def variants():
    """Name: (who steps, bytes of a returned weight, settings)."""
    yield "torch", (Torch, 4, {})
    yield "torch, double precision", (Torch, 4, {"dtype": torch.float64})
    for steps in (3, 2, 1, 0):
        yield f"{steps} Newton steps", (OnDie, 4, {"newton_steps": steps})
    yield "torch, bfloat16 returned", (Torch, 2, {})
    yield "bfloat16 returned", (OnDie, 2, {})
    for rounding, name in SHORT.items():
        yield name, (OnDie, 2, {"state_bytes": (4, 2, 2), "rounding": rounding})
    for rounding in (Rounding.NEAREST, Rounding.STOCHASTIC):
        name = f"all states of two bytes, {rounding}"
        yield name, (OnDie, 2, {"state_bytes": (2, 2, 2), "rounding": rounding})
    for check in DieCheck:
        for wrong in WRONG:
            yield (
                f"{wrong:g} wrong bits, check {check}",
                (OnDie, 2, {"wrong": wrong, "check": check}),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps; no result file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {"inverse_root_off_most": {steps: root_off(steps) for steps in range(4)}}
    print(figures, flush=True)
    for task in (Digits(), Text()):
        steps, seeds = (20, task.seeds[:1]) if options.quick else (task.steps, task.seeds)
        runs = {
            name: [trained(task, one, steps, seed) for seed in seeds] for name, one in variants()
        }
        figures[task.name] = {
            "weights": sum(each.numel() for each in task.made().parameters()),
            "steps": steps,
            "variants": {name: summary(ran, runs["torch"]) for name, ran in runs.items()},
        }
        for name, told in figures[task.name]["variants"].items():
            print(f"{task.name}: {name}: {told}", flush=True)
    if options.quick:
        return
    config = {
        "rate": RATE, "lost_is": f"loss over {LOST} of torch's of the same seed, or no number",
        "seeds": {task.name: list(task.seeds) for task in (Digits, Text)},
        "batch": {task.name: task.batch for task in (Digits, Text)},
    }  # fmt: skip
    print(f"wrote {_results.write('on_die_adam', figures, config).name}")


def root_off(newton_steps):
    """The most that the inverse root is off, a share, over the range of FP32 but its ends."""
    x = np.logspace(-30, 30, 1_000_001).astype(np.float32)
    off = np.abs(inverse_root(x, newton_steps) * np.sqrt(x.astype(np.float64)) - 1)
    return float(f"{off.max():.3g}")


def trained(task, variant, steps, seed):
    """Final loss and accuracy on what was held out."""
    who, returned, settings = variant
    torch.manual_seed(seed)
    network = task.made()
    flat = flattened(network)
    stepper = who(flat, seed=seed, **settings)
    chance = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for number in range(1, steps + 1):
        inputs, wanted = task.drawn(chance)
        loss, _ = loss_of(network, inputs, wanted)
        if not math.isfinite(loss.item()):
            break
        loss.backward()
        gradient = torch.cat([each.grad.flatten() for each in network.parameters()])
        network.zero_grad()
        new = stepper.step(number, gradient)
        flat.copy_(new if returned == 4 else new.bfloat16())
    with torch.no_grad():
        loss, accuracy = loss_of(network, *task.test())
    wrong = stepper.flips.flipped if who is OnDie else 0
    took = (time.perf_counter() - began) / number * 1e3
    return {"loss": loss.item(), "accuracy": accuracy, "wrong_bits": wrong, "ms_a_step": took}


def loss_of(network, inputs, wanted):
    told, wanted = network(inputs).flatten(0, -2), wanted.flatten()
    right = (told.argmax(1) == wanted).float().mean().item()
    return nn.functional.cross_entropy(told, wanted), right


def flattened(network):
    """One tensor that all parameters are views of."""
    flat = torch.cat([each.detach().flatten() for each in network.parameters()])
    at = 0
    for each in network.parameters():
        each.data = flat[at : at + each.numel()].view_as(each)
        at += each.numel()
    return flat


def summary(runs, yardstick):
    """Over seeds; differences are seed by seed."""
    lost = [
        not math.isfinite(one["loss"]) or one["loss"] > LOST * torchs["loss"]
        for one, torchs in zip(runs, yardstick, strict=True)
    ]
    finite = [one["loss"] if math.isfinite(one["loss"]) else None for one in runs]
    off = [
        one["loss"] / torchs["loss"] - 1
        for one, torchs in zip(runs, yardstick, strict=True)
        if math.isfinite(one["loss"])
    ]
    return {
        "losses": [None if loss is None else round(loss, 5) for loss in finite],
        "loss_mean": None if None in finite else round(statistics.mean(finite), 4),
        "loss_off_mean": round(statistics.mean(off), 5) if off else None,
        "loss_off_most": round(max(off, key=abs), 5) if off else None,
        "accuracies": [round(one["accuracy"], 4) for one in runs],
        "accuracy_mean": round(statistics.mean(one["accuracy"] for one in runs), 4),
        "lost": sum(lost),
        "wrong_bits": [one["wrong_bits"] for one in runs],
        "ms_a_step": round(statistics.mean(one["ms_a_step"] for one in runs), 2),
    }


if __name__ == "__main__":
    main()
