"""Training with each lossy codec beside exact training, and the codecs' bounds on what is really saved.

A residual network learns scikit-learn's digits for 300 steps: in plain PyTorch; with everything on flash,
by lossless codecs (which must give the same losses and weights, bit for bit); by each lossy one; and,
as a yardstick for the differences, in plain PyTorch from another seed. All else is alike.

At some steps of the exact run every saved float32 tensor is encoded and decoded by every lossy codec,
and each element's error divided by what the codec's ``ErrorBound`` allows it: that share must not be
above 1 anywhere.

    python benchmarks/macro/lossy.py --plot docs/lossy.png
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

import _activations
import _results
import penstock
from penstock.codec import registry
from penstock.lab import zoo
from penstock.plan import Machine

LOSSY = ("bfloat16", "int8", "zero-value+bfloat16")
NETWORK = "resnet20"
IMAGE_SIZE = 16
BATCH = 64
EVERY = 5
"""Steps between the points of a curve."""
LAST = 20
"""Steps whose mean loss is called final."""
FLOOR_BYTES = 4096
SLOW = Machine("a slow flash", 10e6, 10e6, 1e-4, 1e9, 1e9)
"""So that "auto" takes every codec that shortens."""
OTHER_SEED = "exact, another seed"


def main() -> None:
    args = parse()
    if args.redraw:
        plot(_results.earlier("lossy"), args.plot)
        return
    audit = Audit(args.audited)
    runs = {"exact": train(args, audit=audit), OTHER_SEED: train(args, seed=1)}
    for codec in ("auto", *LOSSY):
        runs[codec] = train(args, codec=codec)
    exact, lossless = runs["exact"], runs.pop("auto")
    same = exact["losses"] == lossless["losses"] and exact["weights"] == lossless["weights"]
    bounds = audit.figures()
    figures = {
        "lossless_codecs_same_losses_and_weights": same,
        "bounds_hold": all(row["holds"] for row in bounds.values()),
        "bounds": bounds,
        "runs": {name: summary(run, exact) for name, run in runs.items()},
    }
    show(figures)
    if args.plot:
        plot(figures, args.plot)
    if not args.quick:
        path = _results.write("lossy", figures, configuration(args), directory=args.dir)
        print(f"wrote {path.name}")
    if not (same and figures["bounds_hold"]):
        raise SystemExit("a lossless run differed, or a bound did not hold: see above")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--plot", type=Path, help="write a picture of the curves to this file")
    parser.add_argument("--redraw", action="store_true", help="only draw the known result")
    parser.add_argument("--quick", action="store_true", help="20 steps; no result file")
    args = parser.parse_args()
    if args.redraw and not args.plot:
        parser.error("--redraw needs --plot")
    args.steps = args.steps or (20 if args.quick else 300)
    args.audited = sorted({0, args.steps // 3, 2 * args.steps // 3, args.steps - 1})
    return args


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "network": NETWORK,
        "image_size": IMAGE_SIZE,
        "batch": BATCH,
        "data": zoo.digits().source.content,
        "optimizer": f"SGD, lr={_activations.LEARNING_RATE}, momentum=0.9",
        "steps": args.steps,
        "floor_bytes": FLOOR_BYTES,
        "policy": "all",
        "threads": torch.get_num_threads(),
    }


# -- one run ------------------------------------------------------------------------------------------


def train(
    args: argparse.Namespace, *, codec: str = "", seed: int = 0, audit: Audit | None = None
) -> dict[str, Any]:
    """Losses, weights and bytes of a run; in plain PyTorch if no codec is named."""
    digits = zoo.digits()
    trainee = _activations.Trainee(
        NETWORK, batch_size=BATCH, seed=seed, data=digits, image_size=IMAGE_SIZE
    )
    session = open_session(codec, trainee, args) if codec else None
    losses, wrote = [], {}
    with session or nullcontext():
        for step in range(args.steps):
            before = session.recorder.snapshot() if session else None
            looked_at = audit is not None and step in audit.steps
            loss = audit.forward(trainee) if looked_at else trainee.loss()
            trainee.learn(loss)
            losses.append(loss.item())
            if session and step == args.steps - 1:
                wrote = _activations.moved(before, session.recorder.snapshot())
    return {
        "losses": losses,
        "weights": _activations.digest(trainee.network),
        "last_step": wrote,
    } | evaluate(trainee)


def open_session(
    codec: str, trainee: _activations.Trainee, args: argparse.Namespace
) -> penstock.Session:
    config = penstock.OffloadConfig(flash=args.dir, policy="all", codec=codec, floor=FLOOR_BYTES)
    return penstock.Session(
        config, model=trainee.network, optimizer=trainee.optimizer, machine=SLOW
    )


def evaluate(trainee: _activations.Trainee) -> dict[str, float]:
    """Loss and accuracy, as for inference, on as many images of the training set as it has."""
    data = trainee.data
    generator = torch.Generator().manual_seed(99)
    images, labels = data.batch(trainee.config, len(data.labels), generator=generator)
    trainee.network.eval()
    with torch.no_grad():
        logits = trainee.network(images)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(1) == labels).float().mean().item()
    return {"evaluated_loss": loss, "evaluated_accuracy": accuracy}


def summary(run: dict[str, Any], exact: dict[str, Any]) -> dict[str, Any]:
    losses = run["losses"]
    final, wanted = (final_loss(one["losses"]) for one in (run, exact))
    return {
        "final_loss": final,
        "final_loss_less_exact": final - wanted,
        "evaluated_loss": run["evaluated_loss"],
        "evaluated_accuracy": run["evaluated_accuracy"],
        "curve_every": EVERY,
        "curve": [round(loss, 6) for loss in losses[::EVERY]],
        "last_step": run["last_step"],
        "weights": run["weights"],
    }


def final_loss(losses: list[float]) -> float:
    last = losses[-LAST:]
    return sum(last) / len(last)


# -- the bounds ---------------------------------------------------------------------------------------


class Audit:
    """Holds lossy codecs to their bounds on what a network saves."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps
        self.tensors = self.elements = 0
        self.worst = dict.fromkeys(LOSSY, (0.0, 0.0))
        """The largest share of the bound, and the largest absolute error."""
        self.frame_bytes = dict.fromkeys(LOSSY, 0)

    def forward(self, trainee: _activations.Trainee) -> torch.Tensor:
        """A forward whose saved tensors are looked at."""
        with trainee.watched(FLOOR_BYTES) as storages:
            loss = trainee.loss()
        for dtype, storage in storages:
            if dtype == "float32":
                self.look_at(_activations.sample(storage))
        return loss

    def look_at(self, source: np.ndarray) -> None:
        self.tensors += 1
        self.elements += source.size // 4
        for name in LOSSY:
            share, error, frame_bytes = share_of_bound(name, source)
            self.frame_bytes[name] += frame_bytes
            self.worst[name] = (max(self.worst[name][0], share), max(self.worst[name][1], error))

    def figures(self) -> dict[str, Any]:
        return {name: self.figures_of(name) for name in LOSSY}

    def figures_of(self, name: str) -> dict[str, Any]:
        bound = registry.get(name).spec("float32", 4 * 256).error_bound
        share, error = self.worst[name]
        return {
            "holds": share <= 1,
            "largest_share_of_bound": share,
            "largest_absolute_error": error,
            "bound_relative": bound.relative,
            "bound_relative_to": "the element" if bound.block == 1 else f"a block of {bound.block}",
            "bound_absolute": bound.absolute,
            "bytes_per_source_byte": round(self.frame_bytes[name] / (4 * self.elements), 4),
            "tensors": self.tensors,
            "elements": self.elements,
            "at_steps": self.steps,
        }


def share_of_bound(name: str, source: np.ndarray) -> tuple[float, float, int]:
    """The largest error over what is allowed, the largest error, and the length of the frame.

    A share of infinity stands for an error where none is allowed.
    """
    codec = registry.get(name)
    spec = codec.spec("float32", source.size)
    frame, back = np.empty(spec.bound_bytes, np.uint8), np.empty_like(source)
    length = codec.encode(source, frame, dtype="float32")
    codec.decode(frame[:length], back)
    wanted, found = (each.view(np.float32).astype(np.float64) for each in (source, back))
    if not np.isfinite(wanted).all():
        raise SystemExit("the network saved infinities or NaNs: nothing to hold a bound to")
    bound = spec.error_bound
    magnitude = np.abs(wanted)
    if bound.block > 1:
        starts = np.arange(0, magnitude.size, bound.block)
        largest = np.maximum.reduceat(magnitude, starts)
        magnitude = np.repeat(largest, bound.block)[: magnitude.size]
    allowed = np.maximum(bound.relative * magnitude, bound.absolute)
    error = np.abs(found - np.clip(wanted, -bound.largest, bound.largest))
    share = np.where(np.isfinite(found), error / allowed, math.inf)
    return float(share.max()), float(error.max()), length


# -- what it looks like -------------------------------------------------------------------------------


def show(figures: dict[str, Any]) -> None:
    print(f"lossless codecs, same bits: {figures['lossless_codecs_same_losses_and_weights']}")
    for name, run in figures["runs"].items():
        bound = figures["bounds"].get(name)
        held = f"{bound['largest_share_of_bound']:.4f} of its bound" if bound else ""
        print(
            f"{name:<20} final loss {run['final_loss']:.5f} ({run['final_loss_less_exact']:+.5f}),"
            f" {run['evaluated_accuracy']:.4f} right   {held}"
        )


def plot(figures: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415  (an extra)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    colours = ("#d9730d", "#4d6461", "#6940a5")
    runs = figures["runs"]
    exact = np.array(runs["exact"]["curve"])
    steps = np.arange(len(exact)) * EVERY
    figure, (top, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    top.plot(steps, exact, color="black", linewidth=2.5, label="exact")
    other = np.array(runs[OTHER_SEED]["curve"])
    top.plot(steps, other, color="#b0b7be", linewidth=1.2, label=OTHER_SEED, zorder=1)
    below.plot(steps, running(np.abs(other - exact)), color="#b0b7be", linewidth=1.2)
    for name, colour in zip(LOSSY, colours, strict=True):
        curve = np.array(runs[name]["curve"])
        style = {"color": colour, "linewidth": 1.2, "linestyle": (0, (4, 1.5))}
        top.plot(steps, curve, label=name, **style)
        below.plot(steps, np.maximum(running(np.abs(curve - exact)), 1e-9), **style)
    top.set(yscale="log", ylabel="training loss")
    below.set(yscale="log", ylabel="distance from exact (mean of 5 points)", xlabel="step")
    below.set_ylim(bottom=1e-4)  # every run begins with the same loss
    top.set_title("ResNet-20 on scikit-learn's digits, what it saves encoded by one codec")
    top.legend(ncols=2, fontsize=9, frameon=False)
    for axes in (top, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def running(values: np.ndarray, width: int = 5) -> np.ndarray:
    """The mean of each value and those before it, ``width`` in all."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


if __name__ == "__main__":
    main()
