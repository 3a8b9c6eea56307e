"""What a budget for gradients costs: training steps with a quarter of them in memory, beside all of them.

Each side is a process of its own that trains the same float32 GPT (``benchmarks/peers``) with
``penstock.optim.FlashAdamW``, nothing kept of its states but the ring; they take turns, round by round,
and ratios are of the same round. The bytes are those of the whole process, from the kernel. Memory is
what is resident above what was before the first backward: gradients, what autograd saves, and buffers.

    python benchmarks/macro/gradient_memory.py --dir /nvme/scratch
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
import _gpt
import _meter
import torch

import _results
import _sides
from penstock.optim import FlashAdamW

SHARE = 0.25
"""Of the gradients, what may wait in memory."""


def main():
    args = parse()
    if args.side:
        print(json.dumps(measure(args)))
        return
    _results.warn_if_busy()
    figures = {}
    for backwards in args.backwards:
        rounds = [
            {side: run(args, side, backwards) for side in ("all", "budget")}
            for _ in range(args.rounds)
        ]
        figures[f"{backwards} backward"] = compared(rounds)
        show(f"{backwards} backward", figures[f"{backwards} backward"])
    if not args.quick:
        config = {
            "share": SHARE,
            "rounds": args.rounds,
            "steps": args.steps,
            "sequences": args.sequences,
            "length": args.length,
        }
        _results.write(Path(__file__).stem, figures, config, directory=args.dir, into=args.into)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=350e6)
    parser.add_argument("--backwards", type=int, nargs="*", default=[1], help="of each step")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where states go")
    parser.add_argument("--into", default=str(_results.RESULTS))
    parser.add_argument("--quick", action="store_true", help="one small round; no result")
    parser.add_argument("--side", choices=("all", "budget"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick and not args.side:
        args.parameters, args.backwards, args.rounds, args.steps = 30e6, [1], 1, 2
    return args


def run(args, side, backwards):
    """One side's figures, from a process of its own."""
    words = [sys.executable, __file__, "--side", side]
    for name in ("parameters", "sequences", "length", "steps"):
        words += [f"--{name}", str(getattr(args, name))]
    words += ["--backwards", str(backwards)]
    return _sides.figures_of(words, args.dir)


def measure(args):
    """Of this process."""
    torch.manual_seed(0)
    network = _gpt.GPT(args.parameters, args.length)
    ids = torch.randint(0, _gpt.VOCABULARY, (args.sequences, args.length))
    gradient_bytes = sum(each.nbytes for each in network.parameters())
    budget = int(SHARE * gradient_bytes) if args.side == "budget" else None
    optimizer = FlashAdamW(network.parameters(), flash=args.dir, gradient_memory=budget)

    def passes():
        network.zero_grad(set_to_none=True)
        for _ in range(args.backwards[0]):
            network(ids).backward()

    before = _meter.resident_bytes()
    _meter.forget_peak()
    found = _meter.steps(args.steps, passes, optimizer.step)
    found |= {
        "parameters": sum(each.numel() for each in network.parameters()),
        "gradient_bytes": gradient_bytes,
        "gradient_written_bytes": optimizer.wear().gradient_bytes_per_step,
        "extra_bytes": _meter.peak_bytes() - before,
        "peak_rss_bytes": _meter.peak_bytes(),
    }
    optimizer.close()
    os.sync()  # what is given up now is not the next side's to wait for
    return found


def compared(rounds):
    """Medians of both sides, and of the ratios in the same round."""
    figures = {
        side: {name: statistics.median(each[side][name] for each in rounds) for name in one}
        for side, one in rounds[0].items()
    }
    ratios = [each["budget"]["iteration_s"] / each["all"]["iteration_s"] for each in rounds]
    saved = [each["all"]["peak_rss_bytes"] - each["budget"]["peak_rss_bytes"] for each in rounds]
    return figures | {
        "time_ratio": statistics.median(ratios),
        "time_ratios_of_rounds": ratios,
        "saved_bytes": statistics.median(saved),
    }


def show(name, figures):
    for side in ("all", "budget"):
        one = figures[side]
        print(
            f"{name:<10} {side:<7} {one['iteration_s']:.2f} s a step, of which {one['step_s']:.2f} s"
            f" update; {one['gradient_written_bytes'] / 1e6:.0f} of {one['gradient_bytes'] / 1e6:.0f} MB"
            f" of gradients written; {one['peak_rss_bytes'] / 2**20:.0f} MiB resident at most"
        )
    print(
        f"  {figures['time_ratio']:.3f} times as long, {figures['saved_bytes'] / 2**20:.0f} MiB less",
        flush=True,
    )


if __name__ == "__main__":
    main()
