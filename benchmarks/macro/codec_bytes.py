"""Bytes that go to flash in a step, as they are and by lossless codecs, for networks of the zoo.

Every network trains on real data (crops of photographs, or text) at its published size, a few samples
at a time, in two sessions alike but for the codec: ``none``, and ``auto`` planned for a flash so slow
that every codec is chosen that saves more than a tenth. Nothing is slowed down: bytes are counted, not
seconds. The policy is ``all``: what is smaller than the floor stays, everything else goes out. No write
is cut short, for backward begins when all have ended. Both sessions must have the same losses.

    python benchmarks/macro/codec_bytes.py --steps 20 --table docs/codec_table.md

Results of networks that are not named are kept, so it can be run network by network.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _activations
import _memory
import _results
import penstock
from penstock.core.units import MIB
from penstock.lab import zoo
from penstock.plan import Machine

NAME = Path(__file__).stem
NETWORKS = {
    "alexnet": "AlexNet",
    "overfeat": "OverFeat",
    "vgg11": "VGG-11",
    "vgg16": "VGG-16",
    "googlenet": "GoogLeNet",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "densenet121": "DenseNet-121",
    "bert-base": "BERT-Base",
    "gpt2": "GPT-2",
    "gpt-neo-125m": "GPT-Neo",
}
QUICK = ("vgg16", "resnet18", "gpt2")
TARGET = {"vgg16": 2.0}
SLOW = Machine(
    name="a slow flash",
    flash_write_bytes_per_s=10e6,
    flash_read_bytes_per_s=10e6,
    flash_latency_s=1e-4,
    host_write_bytes_per_s=1e9,
    host_read_bytes_per_s=1e9,
)
FIRST = 3
"""The first encoded step: one is profiled and one is sampled before."""
IMAGES = 4
SEQUENCES = 2
LEARNING_RATE = 1e-3
"""VGG-16 diverges with 1e-2, and what it saves then is NaNs."""
FLOOR_BYTES = 64 * 1024


def main() -> None:
    args = parse()
    known = _results.earlier(NAME)
    known = {name: known[name] for name in NETWORKS if name in known and not args.quick}
    for name in args.networks:
        known[name] = measure(name, args)
        print(table({name: known[name]}).splitlines()[-1], flush=True)
    figures = {name: known[name] for name in NETWORKS if name in known}
    if not args.quick:
        config = {
            "policy": "all",
            "floor_bytes": FLOOR_BYTES,
            "planned_for_bytes_per_s": SLOW.flash_write_bytes_per_s,
            "first_encoded_step": FIRST,
            "optimizer": f"SGD, lr={LEARNING_RATE}, momentum=0.9",
            "target_ratio": TARGET,
            "environment": _memory.KEEPS,
        }
        path = _results.write(NAME, figures, config, directory=args.dir)
        print(f"wrote {path.name}")
    print(table(figures))
    if args.table:
        args.table.write_text(page(figures), encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=NETWORKS)
    parser.add_argument("--steps", type=int, default=0, help="steps of training after the first")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--table", type=Path, help="write the Markdown table to this file")
    parser.add_argument("--quick", action="store_true", help="tiny networks; no result file")
    args = parser.parse_args()
    args.networks = args.networks or list(QUICK if args.quick else NETWORKS)
    return args


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    plain = run(name, "none", (FIRST,), args)
    goals = (FIRST, FIRST + args.steps) if args.steps else (FIRST,)
    encoded = run(name, "auto", goals, args)
    if not all(map(math.isfinite, encoded["losses"])):
        raise SystemExit(
            f"{name}: training diverged, which no figure is worth: {encoded['losses']}"
        )
    if encoded["losses"][:FIRST] != plain["losses"]:
        raise SystemExit(
            f"{name}: losses with codecs {encoded['losses']}, without {plain['losses']}"
        )
    raw = plain["stages"][FIRST]
    stages = {
        f"step_{step}": stage | {"ratio": round(raw["written_bytes"] / stage["written_bytes"], 3)}
        for step, stage in encoded["stages"].items()
    }
    return {
        "input": plain["input"],
        "saved_bytes": plain["saved_bytes"],
        "written_bytes_without_codec": raw["written_bytes"],
        "steps": stages,
        "losses": encoded["losses"],
        "same_losses": True,
    }


def run(name: str, codec: str, goals: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
    """A session of so many steps; what moved in each of ``goals``, steps counted from 1."""
    trainee, described = build(name, quick=args.quick)
    config = penstock.OffloadConfig(
        flash=args.dir, policy="all", codec=codec, floor=4096 if args.quick else FLOOR_BYTES
    )
    session = penstock.Session(
        config, model=trainee.network, optimizer=trainee.optimizer, machine=SLOW
    )
    losses, stages = [], {}
    with session:
        for step in range(1, goals[-1] + 1):
            before = session.recorder.snapshot()
            loss = trainee.loss()
            wait_for_writes(session)
            trainee.learn(loss)
            losses.append(loss.item())
            if step in goals:
                stages[step] = _activations.moved(before, session.recorder.snapshot())
        assert session.profile is not None
        saved_bytes = session.profile.peak_saved_bytes
    return {"input": described, "saved_bytes": saved_bytes, "stages": stages, "losses": losses}


def build(name: str, *, quick: bool) -> tuple[_activations.Trainee, str]:
    config = zoo.config(name, size="tiny" if quick else "full")
    settings: dict[str, Any] = {"size": "tiny"} if quick else {}
    trainee_of = partial(_activations.Trainee, learning_rate=LEARNING_RATE)
    if isinstance(config, zoo.VisionConfig):
        if quick:
            settings["num_classes"] = max(config.num_classes, 8)
        described = f"{IMAGES} images, {config.image_size} px"
        return trainee_of(name, batch_size=IMAGES, **settings), described
    settings["vocab_size"] = max(config.vocab_size, _activations.BYTE_VOCABULARY)
    length = min(config.sequence_length, _activations.SEQUENCE_LENGTH)
    described = f"{SEQUENCES} texts, {length} tokens"
    return trainee_of(name, batch_size=SEQUENCES, sequence_length=length, **settings), described


def wait_for_writes(session: penstock.Session) -> None:
    while session.executor._transfers.writing:
        time.sleep(0.001)


# -- the table ----------------------------------------------------------------------------------------


def page(figures: dict[str, Any]) -> str:
    """The table as a file that another page of the manual includes, from the mark on."""
    return _results.page_head(f"macro/{NAME}.py --table") + table(figures)


def table(figures: dict[str, Any]) -> str:
    """Markdown. Bytes in MiB; what each codec made of what, in the last of the measured steps."""
    lines = [
        "| Network | Input | Saved | To flash, as it is | First encoded step | Later | Codecs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in figures.items():
        first, *later = one["steps"].items()
        step, last = later[-1] if later else first
        cells = [
            NETWORKS[name],
            one["input"],
            mib(one["saved_bytes"]),
            mib(one["written_bytes_without_codec"]),
            moved_cell(first[1]),
            f"{moved_cell(last)} (step {step.removeprefix('step_')})" if later else "–",
            codecs_cell(last, one["written_bytes_without_codec"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def moved_cell(stage: dict[str, Any]) -> str:
    return f"{mib(stage['written_bytes'])}, **{stage['ratio']:.2f} x** less"


def codecs_cell(stage: dict[str, Any], raw_bytes: int) -> str:
    rows = sorted(stage["codecs"].items(), key=lambda row: -row[1]["source_bytes"])
    cells = [
        f"`{codec}` {mib(row['source_bytes'])} to {mib(row['frame_bytes'])}" for codec, row in rows
    ]
    rest = raw_bytes - sum(row["source_bytes"] for _, row in rows)
    if rest >= MIB // 20:
        cells.append(f"as it is {mib(rest)}")
    return ", ".join(cells)


def mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


if __name__ == "__main__":
    _memory.keep_what_is_freed()
    main()
