"""Does training survive states that no code corrects? Bits flipped in the records of a real optimizer.

A small language model learns to predict the bytes of Python's standard library, in bfloat16, with
FlashAdamW: its FP32 masters and both moments rest on flash, and come back at each step with wrong
bits, at a rate, as from a die without error correction; or with OptimStore's check for NaN, with a
check that clears the top bit of the exponent, or with a light BCH code. A check looks at what is
read and at the weights that go to the host, for a wrong sign of a variance makes a NaN of them.
Each run begins alike and sees the same text; the yardstick is the run with no wrong bit. Losses are
of text that was not trained on, at the end.
"""

import argparse
import math
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

os.environ["PENSTOCK_VERIFY"] = "off"  # else a checksum would find each wrong record, as it should
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import _results
from penstock.lab.ssd import load
from penstock.lab.ssd.bit_flips import BitFlips, DieCheck
from penstock.lab.ssd.faults import LIGHT, NO_CODE, raw_rate
from penstock.optim import FlashAdamW
from penstock.testing.corrupting_engine import CorruptingEngine

CONTEXT, BATCH, WIDTH = 32, 64, 256
GUARDS = {
    "nothing": (NO_CODE, DieCheck.NONE),
    "NaN check": (NO_CODE, DieCheck.NAN),
    "top bit of the exponent": (NO_CODE, DieCheck.BELOW_TWO),
    "light BCH": (LIGHT, DieCheck.NONE),
}
RATES = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
SEEDS = (1, 2)


class Model(torch.nn.Module):
    """The next byte from the last 32."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 16)
        self.embed.weight.data.mul_(0.1)  # every state stays below 2, as one of the checks wants
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16 * CONTEXT, WIDTH), torch.nn.GELU(),
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(),
            torch.nn.Linear(WIDTH, 256),
        )  # fmt: skip

    def forward(self, text):
        return self.net(self.embed(text).flatten(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few runs; no result file")
    options = parser.parse_args()
    text, held = corpus()
    clean = train(text, held, options.steps, rate=0.0, guard="nothing", seed=1)
    print(f"no wrong bits: {clean}", flush=True)
    runs = []
    for guard in GUARDS:
        for rate in RATES[2::2] if options.quick else RATES:
            for seed in SEEDS[:1] if options.quick else SEEDS:
                one = train(text, held, options.steps, rate=rate, guard=guard, seed=seed)
                runs.append({"guard": guard, "rate": rate, "seed": seed, **one})
                print(runs[-1], flush=True)
    if options.quick:
        return
    figures = {
        "clean": clean,
        "runs": runs,
        "summary": summary(clean, runs),
        "rates_of_optimstore": {
            f"life {life}, kept {days} days": raw_rate(load("optimstore"), life=life, days=days)
            for life in (0.1, 1.0)
            for days in (0.0, 3.0)
        },
    }
    config = {
        "steps": options.steps, "context": CONTEXT, "batch": BATCH, "width": WIDTH,
        "optimizer": "FlashAdamW, bfloat16 weights, FP32 masters and moments on flash", "lr": 1e-3,
        "seeds": list(SEEDS), "lost_is": "final loss over 1.05 of the clean one, or none",
    }  # fmt: skip
    print(f"wrote {_results.write('flash_faults', figures, config).name}")


def corpus():
    """Two parts of the standard library's sources, as numbers of bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)[:4_000_000]
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


def batch(text, chance, count):
    at = torch.randint(0, len(text) - CONTEXT - 1, (count,), generator=chance)
    rows = text[at[:, None] + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, -1]


def train(text, held, steps, *, rate, guard, seed):
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(0)
    model = Model().bfloat16()
    code, check = GUARDS[guard]
    flips = BitFlips(rate, code=code, check=check, seed=seed)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        # small tiles and no memory for them: nearly all records are read at each step
        optimizer = FlashAdamW(
            model.parameters(), lr=1e-3, flash=directory, tile=8192, squeeze=False
        )
        optimizer.wrap_engine(lambda engine: CorruptingEngine(engine, flips))
        for _ in range(steps):
            inputs, following = batch(text, chance, BATCH)
            loss = torch.nn.functional.cross_entropy(model(inputs).float(), following)
            if not math.isfinite(loss.item()):
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checked(model, check)
        optimizer.close()
    with torch.no_grad():
        inputs, following = batch(held, torch.Generator().manual_seed(1), 4096)
        final = torch.nn.functional.cross_entropy(model(inputs).float(), following).item()
    states = 12 * sum(param.numel() for param in model.parameters())
    return {
        "loss": round(final, 4) if math.isfinite(final) else None,
        "wrong_bits": flips.flipped,
        "caught_words": flips.caught,
        "states_read_each_step": round(flips.bits / 8 / states / steps, 3),
        "s": round(time.perf_counter() - began, 2),
    }


def checked(model, check):
    """What goes to the host passes the same check; bfloat16 has the exponent of FP32."""
    if check is DieCheck.NONE:
        return
    for param in model.parameters():
        words = param.data.view(torch.int16)
        exponent = words & 0x7F80
        odd = exponent == 0x7F80 if check is DieCheck.NAN else (words & 0x4000) != 0
        words[odd] = words[odd] ^ 0x4000


def summary(clean, runs):
    """By guard and rate, the losses, and how many of the runs were lost."""
    told = {}
    for guard in GUARDS:
        for rate in RATES:
            losses = [run["loss"] for run in runs if (run["guard"], run["rate"]) == (guard, rate)]
            lost = [loss is None or loss > 1.05 * clean["loss"] for loss in losses]
            told[f"{guard}, {rate:g}"] = {"losses": losses, "lost": sum(lost)}
    return told


if __name__ == "__main__":
    main()
