"""Optimizer states on flash: ours in each format, DeepSpeed's, torch's in RAM, and what the disk allows.

Each figure comes from a process of its own (``benchmarks/peers``), on the same directory; the sides take
turns, round by round, and ratios are of the same round. The sides:

* ``exact``, ``split``, ``bf16``, ``int8``: ``penstock.optim.FlashAdamW`` of bfloat16 weights, with
  float32 masters, nothing kept in memory but the ring; and its limit: the bytes of the format, read and
  written at the bandwidth that ``penstock bench io`` finds for reads and writes mixed;
* ``deepspeed``, ``-pipelined``, ``-huge``: its offload to NVMe as it comes, with pipelined reads and
  writes, and with huge pages under its buffers besides; needs ``--peer-python``. The last is its best,
  and the only one in rounds after the first, and for large networks;
* ``memory``: ``torch.optim.AdamW(fused=True)`` of float32 weights in RAM.

Then what a training step *sees* of the update: an iteration with it less one without an optimizer, of
the same GPT and 1024 tokens; ours overlapped with backward, in ``exact``, against the pipelined peers'.
DeepSpeed writes gradients to flash in backward, so its ``step`` alone is less than what it costs; the
ratio to that is given besides.

All that takes longer than a shared machine can be kept quiet: with ``--parts`` it can be measured in
several sittings, each of them limited by ``--limit``, and the last one writes the result.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _memory
import _parts
import _results
import _sides
from penstock.cli import bandwidth

PEERS = Path(__file__).resolve().parents[1] / "peers"
TABLE = _results.ROOT / "docs" / "optimizer_table.md"
FORMATS = {"exact": 12, "split": 10.125, "bf16": 6, "int8": 4 + 2 / 256}
"""Bytes that a parameter's states take beside a bfloat16 weight."""
WANTED = {"exact": 1.4, "split": 1.8, "bf16": 2.8, "int8": 4.0}
"""Parameters per second, as ratios to the best of DeepSpeed in the same round."""
LARGE = 5e8
"""From so many parameters on one round is made, of fewer steps, and none in RAM: 16 GB of states."""
LARGE_STEPS = 2
SEEN_BATCH = (4, 256)
"""Sequences, and tokens of each, where a training step is measured."""
DEEPSPEED = {
    "deepspeed": ((), {}),
    "deepspeed-pipelined": (("--pipelined",), {}),
    "deepspeed-huge": (("--pipelined",), {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
}
BEST = "deepspeed-huge"


def main():
    _memory.keep_what_is_freed()
    args = parse()
    _results.warn_if_busy()
    parts = _parts.Parts(args.parts, args.limit)
    figures = {"step": {}, "seen": {}}
    try:
        for size in args.parameters:
            rounds = [step_round(args, parts, size, turn) for turn in range(args.rounds)]
            figures["step"][f"{size:.0f}"] = step_figures(rounds)
            show_step(size, figures["step"][f"{size:.0f}"])
        for size in args.seen:
            rounds = [seen_round(args, parts, size, turn) for turn in range(args.rounds)]
            figures["seen"][f"{size:.0f}"] = seen_figures(rounds)
            show_seen(size, figures["seen"][f"{size:.0f}"])
    except _parts.OutOfTimeError:
        print("the time of this sitting is up; start again with the same --parts")
        return
    record(args, figures)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, nargs="*", default=[34e6, 160e6, 1e9])
    parser.add_argument("--seen", type=float, nargs="*", default=[124e6])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where states go")
    parser.add_argument("--peer-python", help="an interpreter that has DeepSpeed; without: none")
    parser.add_argument("--parts", help="a file for what was measured, to go on from")
    parser.add_argument("--limit", type=float, help="begin nothing after so many seconds")
    parser.add_argument("--quick", action="store_true", help="one small round; no result")
    args = parser.parse_args()
    if args.quick:
        args.parameters, args.seen, args.rounds, args.steps = [10e6], [20e6], 1, 2
    return args


def record(args, figures):
    if args.quick:
        return
    config = {
        "rounds": args.rounds,
        "steps": args.steps,
        "steps_of_large": LARGE_STEPS,
        "seen_sequences": list(SEEN_BATCH),
        "environment": _memory.KEEPS,
    }
    known = _results.earlier("optimizer_step")
    measured = {what: dict.fromkeys(found, _results.commit()) for what, found in figures.items()}
    if known:  # other sizes may be of other commits
        figures = {what: known[what] | found for what, found in figures.items()}
        before = known.get("commits", {})
        measured = {what: before.get(what, {}) | found for what, found in measured.items()}
    figures["commits"] = measured
    _results.write("optimizer_step", figures, config, directory=args.dir)
    TABLE.write_text(table(figures), encoding="utf-8")


def step_round(args, parts, size, turn):
    """Every side once, and the disk's bandwidth between them; ours beside the best of the others."""

    def part(name, measure):
        return parts.get(f"step {size:.0f} {turn} {name}", measure)

    found = {}
    if args.peer_python:
        found[BEST] = part(BEST, lambda: deepspeed(args, size, BEST))
    for name in FORMATS:
        found[name] = part(name, lambda name=name: ours(args, size, "--format", name))
        if name == "split":
            found["mixed_bytes_per_s"] = part("disk", lambda: mixed_bytes_per_s(args))
    if size < LARGE:
        found["memory"] = part("memory", lambda: ours(args, size, "--memory"))
    for name in slower_peers(args) if turn == 0 and size < LARGE else ():
        found[name] = part(name, lambda name=name: deepspeed(args, size, name))
    return found


def slower_peers(args):
    return [name for name in DEEPSPEED if name != BEST] if args.peer_python else []


def mixed_bytes_per_s(args):
    return bandwidth.measure([args.dir], seconds=3).rate("mixed").plain_bytes_per_s


def seen_round(args, parts, size, turn):
    def part(name, measure):
        return parts.get(f"seen {size:.0f} {turn} {name}", measure)

    sequences, length = SEEN_BATCH
    batch = ("--sequences", str(sequences), "--length", str(length))
    found = {"exact": part("exact", lambda: ours(args, size, "--train", *batch))}
    peers = [BEST, "deepspeed-pipelined"][: 2 if turn == 0 else 1]
    for name in peers if args.peer_python else ():
        found[name] = part(name, lambda name=name: deepspeed(args, size, name, *batch))
    return found


def ours(args, size, *options):
    command = [sys.executable, str(PEERS / "flash_adam.py"), *options]
    return run(args, size, command, dict(os.environ))


def deepspeed(args, size, name, *more):
    """A peer does not get our allocator's settings: huge pages need its own."""
    options, extra = DEEPSPEED[name]
    environment = {key: value for key, value in os.environ.items() if key not in _memory.KEEPS}
    command = [args.peer_python, str(PEERS / "deepspeed_adam.py"), *options, *more]
    return run(args, size, command, environment | extra)


def run(args, size, command, environment):
    """One side's JSON line."""
    steps = LARGE_STEPS if size >= LARGE else args.steps
    command = [*command, "--parameters", str(size), "--steps", str(steps)]
    return _sides.figures_of(command, args.dir, environment)


def rate(side):
    return side["parameters"] / side["step_s"]


def step_figures(rounds):
    """Medians over rounds of rates, of ratios to the best peer, and of shares of the disk's limit."""
    figures = {}
    for name in [side for side in rounds[0] if side != "mixed_bytes_per_s"]:
        sides = [each[name] for each in rounds if name in each]
        moved = [side["read_bytes"] + side["written_bytes"] for side in sides]
        figures[name] = {
            "parameters": sides[0]["parameters"],
            "parameters_per_s": statistics.median(map(rate, sides)),
            "parameters_per_s_of_rounds": [rate(side) for side in sides],
            "bytes_per_parameter": statistics.median(moved) / sides[0]["parameters"],
            "extra_bytes": max(side.get("extra_bytes", 0) for side in sides),
            "peak_rss_bytes": max(side.get("peak_rss_bytes", 0) for side in sides),
        }
        if name in FORMATS:
            limits = [each["mixed_bytes_per_s"] for each in rounds]
            shares = [
                nbytes / side["step_s"] / limit
                for nbytes, side, limit in zip(moved, sides, limits, strict=True)
            ]
            allowed = [limit / 2 / FORMATS[name] for limit in limits]
            figures[name]["share_of_disk"] = statistics.median(shares)
            figures[name]["share_of_limit"] = statistics.median(
                rate(side) / most for side, most in zip(sides, allowed, strict=True)
            )
            figures[name]["mixed_bytes_per_s"] = statistics.median(limits)
        if name in FORMATS and BEST in rounds[0]:
            ratios = [
                rate(each[name]) / max(rate(each[peer]) for peer in DEEPSPEED if peer in each)
                for each in rounds
            ]
            figures[name]["ratio_to_best_deepspeed"] = statistics.median(ratios)
            figures[name]["ratios_of_rounds"] = ratios
            figures[name]["wanted_ratio"] = WANTED[name]
    return figures


def seen_figures(rounds):
    """Seconds of the update that an iteration sees, and how many times DeepSpeed's are as long."""
    plain = [each["exact"]["plain_iteration_s"] for each in rounds]
    figures = {"plain_iteration_s": statistics.median(plain)}
    seen = {}
    for name in rounds[0]:
        iterations = [each[name]["iteration_s"] for each in rounds if name in each]
        seen[name] = [one - base for one, base in zip(iterations, plain, strict=False)]
        figures[name] = {
            "iteration_s": statistics.median(iterations),
            "seen_s": statistics.median(seen[name]),
            "seen_s_of_rounds": seen[name],
        }
    if BEST in seen:
        least = [
            min(seen[peer][i] for peer in DEEPSPEED if peer in rounds[i])
            for i in range(len(rounds))
        ]
        ratios = [peer / ours for peer, ours in zip(least, seen["exact"], strict=True)]
        alone = [
            each[BEST]["step_s"] / ours for each, ours in zip(rounds, seen["exact"], strict=True)
        ]
        figures["times_less_than_deepspeed"] = statistics.median(ratios)
        figures["times_less_of_rounds"] = ratios
        figures["times_less_than_its_step_alone"] = statistics.median(alone)
        figures["wanted"] = 2.8
    return figures


def table(figures):
    """For the manual, from the mark on."""
    lines = [
        "| Parameters | Side | M parameters/s | Of DeepSpeed's best (wanted) | Of what the disk allows"
        " | Bytes moved a parameter | Of the disk's bandwidth |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for size, sides in figures["step"].items():
        for name, one in sides.items():
            share = f"{one['share_of_disk']:.2f}" if "share_of_disk" in one else ""
            limit = f"{one['share_of_limit']:.2f}" if "share_of_limit" in one else ""
            ratio = one.get("ratio_to_best_deepspeed")
            wanted = "" if ratio is None else f"{ratio:.2f} ({WANTED[name]})"
            lines.append(
                f"| {float(size) / 1e6:.0f} M | {name} | {one['parameters_per_s'] / 1e6:.0f}"
                f" | {wanted} | {limit} | {one['bytes_per_parameter']:.1f} | {share} |"
            )
    for size, sides in figures["seen"].items():
        seen = {name: one["seen_s"] for name, one in sides.items() if isinstance(one, dict)}
        told = ", ".join(f"{seconds:.2f} s {name}" for name, seconds in seen.items())
        lines.append(
            f"\nWhat a training step of {float(size) / 1e6:.0f} M parameters sees of the update, beside"
            f" {sides['plain_iteration_s']:.2f} s of forward and backward: {told}."
        )
        if "times_less_than_deepspeed" in sides:
            lines.append(
                f"That is {sides['times_less_than_deepspeed']:.1f} times less (wanted 2.8)."
            )
    return _results.page_head("macro/optimizer_step.py") + "\n".join(lines) + "\n"


def show_step(size, figures):
    print(f"{size / 1e6:.0f} M parameters")
    for name, one in figures.items():
        line = f"  {name:<20} {one['parameters_per_s'] / 1e6:7.1f} M/s"
        line += f" {one['bytes_per_parameter']:6.1f} B moved a parameter"
        if "share_of_disk" in one:
            line += f", {one['share_of_limit']:.2f} of what the disk allows"
            line += f", {one['share_of_disk']:.2f} of its bandwidth"
            line += f", {one['extra_bytes'] / (1 << 20):.0f} MiB of memory"
        if "ratio_to_best_deepspeed" in one:
            line += (
                f", {one['ratio_to_best_deepspeed']:.2f} x DeepSpeed's best (wanted {WANTED[name]})"
            )
        print(line, flush=True)


def show_seen(size, figures):
    print(
        f"a training step of {size / 1e6:.0f} M parameters: {figures['plain_iteration_s']:.3f} s without"
    )
    for name, one in figures.items():
        if isinstance(one, dict):
            print(f"  {name:<20} {one['seen_s']:+7.3f} s with the update")
    if "times_less_than_deepspeed" in figures:
        print(
            f"  {figures['times_less_than_deepspeed']:.2f} times less than DeepSpeed (wanted 2.8)"
        )


if __name__ == "__main__":
    main()
