"""The main job: a deep ResNet learns from real photographs, without Penstock and with it.

Each run is a process of its own, so that its memory is its own. The first trains as PyTorch does and
holds everything that autograd saves; the second may hold a tenth of that and offloads the rest to files
in ``--flash``. Losses and final weights must agree to the last bit.

    python examples/demo.py [--steps N] [--batch N] [--flash DIR] [--out DIR]

It writes ``memory.png``, ``trace.json.gz`` (open it at https://ui.perfetto.dev) and ``demo.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for PyTorch's tensors, in both runs

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import penstock
from penstock.core.units import format_bytes
from penstock.lab import zoo
from penstock.observe import Recorder, Stage
from penstock.observe.log import EventLog
from penstock.observe.records import read_events
from penstock.observe.rss import RssSampler
from penstock.report.memory_plot import MemorySeries, plot_memory
from penstock.report.table import Row, side_by_side
from penstock.report.trace import write_trace

SHARE = 10
"""Divisor of what the plain run's autograd saves: Penstock's run may hold that much."""


def main() -> int:
    args = parse(sys.argv[1:])
    if args.run:
        return train(args)
    console = Console()
    source = zoo.photograph_crops(image_size=args.image_size).source
    console.print(
        f"[bold]{args.network}[/bold], batches of {args.batch} crops of {args.image_size} x"
        f" {args.image_size} pixels, {args.steps} steps of SGD on {torch.get_num_threads()} threads\n"
        f"data: {source.name} ({source.content}; {format_bytes(source.nbytes)}; {source.licence})\n"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    plain = watch(args, "without", budget=None)
    budget = plain["saved_bytes"] // SHARE
    spilled = watch(args, "with", budget=budget)
    same = report(console, args, plain, spilled)
    return 0 if same else 1


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet164")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--flash", type=Path, default=None, help="where to offload to (default: --out)"
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where results go")
    parser.add_argument("--run", choices=("without", "with"), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# -- one run, in a process of its own -----------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    torch.manual_seed(0)
    network = zoo.build(args.network, image_size=args.image_size, num_classes=8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    log = args.out / f"{args.run}.jsonl"
    if args.run == "with":
        flash = args.flash or args.out
        config = penstock.OffloadConfig(
            device_memory=args.budget, flash=flash, event_log=log, sample_rss=True
        )
        with penstock.offload(network, optimizer, config=config) as session:
            result = loop(args, network, optimizer)
            summary = session.summary()
            result |= {"summary": summary.to_json(), "text": str(summary)}
            write_trace(session.recorder, args.out / "trace.json.gz")
    else:
        recorder = Recorder(log=EventLog(log))
        sampler = RssSampler(recorder)
        result = loop(args, network, optimizer, recorder)
        sampler.stop()
        recorder.log.close()  # type: ignore[union-attr]
        result["saved_bytes"] = count_saved(args, network, optimizer)
    digest = hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    emit("result", **result, weights=digest.hexdigest())
    return 0


def loop(
    args: argparse.Namespace,
    network: zoo.Network,
    optimizer: torch.optim.Optimizer,
    recorder: Recorder | None = None,
) -> dict[str, Any]:
    losses, seconds = [], []
    for step, batch in enumerate(batches(args, network)):
        start = time.perf_counter()
        start_ns = 0 if recorder is None else recorder.clock.now_ns()
        loss = network(batch.inputs, batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.span(Stage.STEP, start_ns, recorder.clock.now_ns(), slot=f"step {step}")
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        emit("step", step=step, loss=losses[-1])
    return {"losses": losses, "seconds": seconds}


def batches(args: argparse.Namespace, network: zoo.Network) -> Iterator[zoo.Batch]:
    images = zoo.photograph_crops(image_size=args.image_size)
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        yield images.batch(network.config, args.batch, generator=generator)


def count_saved(
    args: argparse.Namespace, network: zoo.Network, optimizer: torch.optim.Optimizer
) -> int:
    """Return the bytes that autograd holds after a forward, by one more forward that keeps all."""
    with penstock.offload(network, optimizer, policy="keep") as session:
        network(*next(batches(args, network)))
        return session.budget.peak_bytes


def emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


# -- both runs, from outside --------------------------------------------------------------------------


def watch(args: argparse.Namespace, run: str, budget: int | None) -> dict[str, Any]:
    """Start a run and show how far it is; what it found at the end."""
    command = [
        sys.executable, __file__, "--run", run, "--network", args.network,
        "--batch", str(args.batch), "--image-size", str(args.image_size),
        "--steps", str(args.steps), "--out", str(args.out),
    ]  # fmt: skip
    if budget is not None:
        command += ["--budget", str(budget), "--flash", str(args.flash or args.out)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    title = "without Penstock" if budget is None else f"with it, in {format_bytes(budget)}"
    with tempfile.TemporaryFile("w+") as errors, Progress(*columns) as progress:
        task = progress.add_task(f"{title:<26}", total=args.steps, loss="-")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
            assert child.stdout is not None
            result: dict[str, Any] = {}
            for line in child.stdout:
                fields = json.loads(line)
                if fields["event"] == "step":
                    progress.update(task, advance=1, loss=f"{fields['loss']:.6f}")
                else:
                    result = fields
        if child.returncode or not result:
            errors.seek(0)
            sys.exit(
                f"the run {run} Penstock failed with status {child.returncode}:\n{errors.read()}"
            )
    return result


def report(
    console: Console, args: argparse.Namespace, plain: dict[str, Any], spilled: dict[str, Any]
) -> bool:
    series = {
        run: MemorySeries.of(read_events(args.out / f"{run}.jsonl"), "rss", run=title)
        for run, title in (("without", "without Penstock"), ("with", "with Penstock"))
    }
    held = MemorySeries.of(read_events(args.out / "with.jsonl"), "device", run="with Penstock")
    budget = spilled["summary"]["memory"][0]["budget_bytes"]
    device = spilled["summary"]["memory"][0]
    base = {run: one.nbytes[0] for run, one in series.items()}
    rows = [
        *(
            Row.of_bits(f"loss of step {i}", a, b)
            for i, (a, b) in enumerate(zip(plain["losses"], spilled["losses"], strict=True))
        ),
        Row("weights (SHA-256)", tuple(r["weights"][:12] for r in (plain, spilled)),
            "same bits" if plain["weights"] == spilled["weights"] else "DIFFERENT",
            plain["weights"] == spilled["weights"]),
        Row.of_bytes("saved for backward", plain["saved_bytes"], device["peak_bytes"]),
        Row("  on average", ("", format_bytes(device["average_bytes"]))),
        Row.of_bytes("peak RSS", *(one.peak_bytes for one in series.values())),
        Row.of_bytes("  grown by", *(one.peak_bytes - base[run] for run, one in series.items())),
        Row.of_seconds("median step", median(plain["seconds"]), median(spilled["seconds"])),
    ]  # fmt: skip
    console.print()
    console.print(side_by_side(f"{args.steps} steps", ("without Penstock", "with"), rows))
    console.print()
    console.print(spilled["text"], highlight=False, markup=False, soft_wrap=True)
    figure = args.out / "memory.png"
    plot_memory(
        [series["without"], series["with"], held],
        figure,
        budget_bytes=budget,
        title=f"{args.network}, batch {args.batch}: memory of the process",
    )
    for run in series:
        (args.out / f"{run}.jsonl").unlink()
    document = {
        "arguments": {k: str(v) for k, v in vars(args).items()},
        "without": plain,
        "with": spilled,
    }
    (args.out / "demo.json").write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"\nwrote {figure}, {args.out / 'trace.json.gz'} and {args.out / 'demo.json'}")
    return plain["losses"] == spilled["losses"] and plain["weights"] == spilled["weights"]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    sys.exit(main())
