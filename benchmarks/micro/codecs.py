"""Codecs on one core: beside a copy of the same bytes and general compressors, and on real activations.

1. Every codec each way, on normal float32 of which half is zero, in no order, and on the same without
   zeros; those that lose something too. Beside them in the same run, taking turns: what one writes in
   NumPy (``x[x != 0]`` and ``packbits``), blosc2, zstd and lz4 as far as they are installed, and the
   limit: a copy of the same bytes. The figure that counts is the ratio to the copy. Peers allocate what
   they return, where their interface has no other way. ``narrow`` is left out, for it gives up on such
   bytes at once.
2. Bytes and speed of each codec that can be chosen by itself, on what networks of the zoo
   save for images, or text, as small as they take them, in batches that keep a step near a second on two
   cores (``BATCH``). The same share of every storage is sampled. Every network is looked at fresh, and
   once more after ``--steps`` steps on the zoo's real data, or as many as ``--seconds`` allow: the result
   says how many, and at what loss. ``positive`` is measured on every float, though it is only used where
   signs are proven to be enough.

To train takes long and need not be undisturbed; to measure is quick and must be. With ``--samples
FOLDER`` what was sampled is kept there, and taken from there when the script is run again with the same
settings. With ``--merge`` only the second part is run, of the named networks; the rest of the last result
stays as it is, so that networks that take long can be trained in parts:

    python benchmarks/micro/codecs.py --train-only --samples FOLDER --networks gpt2 bert-base
    python benchmarks/micro/codecs.py --merge --samples FOLDER --networks gpt2 bert-base

    python benchmarks/micro/codecs.py --table docs/codec_speed_table.md
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import _activations
import _memory
import _results
from _codec_sides import PEERS, SIDES, memory
from penstock.codec import registry
from penstock.codec.base import Fidelity
from penstock.core.units import parse_bytes
from penstock.lab import zoo

TARGET_GB_PER_S = 5.0
"""Of zero-value, each way."""
BATCH = {
    "vgg116": 2,
    "resnet272": 2,
    "resnet1202": 2,
    "senet154": 2,
    "densenet121": 4,
} | dict.fromkeys(("bert-base", "gpt2", "gpt-neo-125m"), 1)
"""Images or texts in a step, where the step would take long with ``--batch-size``."""
RATE = {"vgg116": 1e-4}
"""Learning rates, where the usual one makes the loss infinite."""
CHOSEN = ("zero-value", "narrow", "exponent", "zero-value+exponent", "positive")
EARLIER = {"exponent": "byteplane", "zero-value+exponent": "zero-value+byteplane"}
"""Names in results from before codes of three bits, when frames were 1 to 2 % longer."""


def normal(nbytes, share, seed=0):
    """Normal float32, of which a share is zero, in no order."""
    random = np.random.default_rng(seed)
    source = memory(nbytes)
    values = source.view(np.float32)
    values[:] = random.standard_normal(values.size, dtype=np.float32)
    values[random.random(values.size, dtype=np.float32) < share] = 0
    return source


def beside_peers(options, source, back):
    """GB/s of source bytes each way of every side, and ratios to the copy; and who is not installed."""
    sides, missing = {}, []
    for name, kind in SIDES.items():
        try:
            sides[name] = kind(source, back)
        except ImportError:
            missing.append(name)
    sizes = {}
    for name, side in sides.items():  # once unmeasured: compiled, touched, and right
        sizes[name] = side.encode()
        back[:] = 1
        side.decode()
        side.check()
    samples = {(name, way): [] for name in sides for way in ("encode", "decode")}
    for index in range(options.rounds):
        for name in list(sides)[:: 1 if index % 2 else -1]:
            for way in ("encode", "decode"):
                start = time.perf_counter()
                getattr(sides[name], way)()
                samples[name, way].append(source.size / (time.perf_counter() - start) / 1e9)
    figures = {name: _one_side(name, sizes[name] / source.size, samples) for name in sides}
    return figures, missing


def _one_side(name, share, samples):
    figures = {"share_of_source_bytes": round(share, 4)}
    for way in ("encode", "decode"):
        mine, copy = samples[name, way], samples["memcpy", way]
        ratio = statistics.median(mine) / statistics.median(copy)
        figures[f"{way}_gb_per_s"] = _results.summary(mine)
        figures[f"{way}_ratio_to_memcpy"] = round(ratio, 4)
    return figures


def on_activations(options):
    """For each network, fresh and trained: bytes and speed of every codec."""
    figures = {}
    for name in options.networks:
        figures[name] = {}
        for stage, (facts, pieces) in _sampled(name, options).items():
            codecs = {each: _one_codec(registry.get(each), pieces) for each in CHOSEN}
            figures[name][stage] = facts | {"codecs": codecs}
        _print_network(name, figures[name])
    return figures


def _sampled(name, options):
    """By stage, what is to be told of it and ``[(dtype, bytes)]``: trained now, or kept from before."""
    wanted = {
        "size": options.size,
        "steps": options.steps,
        "seconds": options.seconds,
        "batch_size": min(options.batch_size, BATCH.get(name, options.batch_size)),
        "learning_rate": RATE.get(name, _activations.LEARNING_RATE),
        "sample": options.sample,
        "least": options.least,
    }
    kept = options.samples and Path(options.samples) / name
    if kept and (found := _load(kept, wanted)):
        return found
    settings = _activations.small_inputs(name, options.size)
    rates = {each: wanted[each] for each in ("batch_size", "learning_rate")}
    trainee = _activations.Trainee(name, **rates, **settings)
    stages = {"fresh": _one_stage(name, trainee, settings, options)}
    if options.steps:
        trainee.train(options.steps, options.seconds)
        stages["trained"] = _one_stage(name, trainee, settings, options)
    if kept:
        _keep(kept, wanted, stages)
    return stages


def _one_stage(name, trainee, settings, options):
    steps = trainee.steps
    pieces, total, loss = trainee.saved(options.sample, options.least)
    if not math.isfinite(loss):
        sys.exit(f"{name}: the loss is {loss} after {steps} steps; lower its RATE")
    sizes = {each: settings[each] for each in ("image_size", "sequence_length") if each in settings}
    facts = {
        "steps": steps,
        "loss": round(loss, 4),
        "batch_size": trainee.batch_size,
        **(sizes or {"image_size": trainee.config.image_size}),
        "saved_bytes": total,
        "sampled_bytes": sum(piece.size for _, piece in pieces),
    }
    return facts, pieces


def _keep(folder, wanted, stages):
    """Write what ``_load`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {}
    for stage, (facts, pieces) in stages.items():
        np.savez(folder / f"{stage}.npz", *[piece for _, piece in pieces])
        told[stage] = {"facts": facts, "dtypes": [dtype for dtype, _ in pieces]}
    (folder / "stages.json").write_text(json.dumps({"settings": wanted, "stages": told}))


def _load(folder, wanted):
    """What was kept of a network; nothing, where that is of other settings."""
    try:
        kept = json.loads((folder / "stages.json").read_text())
    except FileNotFoundError:
        return {}
    if kept["settings"] != wanted:
        return {}
    stages = {}
    for stage, told in kept["stages"].items():
        with np.load(folder / f"{stage}.npz") as found:
            pieces = [found[f"arr_{index}"] for index in range(len(told["dtypes"]))]
        stages[stage] = told["facts"], list(zip(told["dtypes"], pieces, strict=True))
    return stages


def _one_codec(codec, pieces):
    """What it does not accept counts as it is in the bytes, and not at all in the speed."""
    source = taken = 0
    encoded_bytes, encode_s, decode_s = 0, 0.0, 0.0
    for dtype, piece in pieces:
        source += piece.size
        if not codec.accepts(dtype):
            taken += piece.size
            continue
        out = np.zeros(codec.spec(dtype, piece.size).bound_bytes, np.uint8)
        back = np.zeros_like(piece)
        length, encode = _best(lambda: codec.encode(piece, out, dtype=dtype))  # noqa: B023
        _, decode = _best(lambda: codec.decode(out[:length], back))  # noqa: B023
        exact = codec.fidelity is Fidelity.EXACT
        assert not exact or np.array_equal(piece, back), (codec.name, dtype)
        taken, encoded_bytes = taken + length, encoded_bytes + piece.size
        encode_s, decode_s = encode_s + encode, decode_s + decode
    if not encoded_bytes:
        return {"accepted_bytes": 0, "share_of_source_bytes": 1.0}
    return {
        "accepted_bytes": encoded_bytes,
        "share_of_source_bytes": round(taken / source, 4),
        "encode_gb_per_s": round(encoded_bytes / encode_s / 1e9, 3),
        "decode_gb_per_s": round(encoded_bytes / decode_s / 1e9, 3),
    }


def _best(call, rounds=3):
    """The result, and the least of some times in seconds; the first call may compile."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return result, min(times)


def _print_sides(sides, missing):
    for name, row in sides.items():
        speeds = (f"{way} {row[f'{way}_gb_per_s']['median']:5.2f}" for way in ("encode", "decode"))
        print(f"{name:12} {' GB/s, '.join(speeds)} GB/s, {row['share_of_source_bytes']:.3f} of it")
    print(f"target of zero-value: {TARGET_GB_PER_S} GB/s each way")
    print(f"not installed: {', '.join(missing) or 'nothing is missing'}", flush=True)


def _print_network(name, stages):
    for stage in stages.values():
        rows = stage["codecs"].items()
        cells = [f"{codec} {row['share_of_source_bytes']:.2f}" for codec, row in rows]
        print(f"{name:20} step {stage['steps']:4} {', '.join(cells)}", flush=True)


# -- the tables ---------------------------------------------------------------------------------------


def page(figures):
    """The tables as a file that another page of the manual includes, from the mark on."""
    return (
        _results.page_head("micro/codecs.py --table", "speeds")
        + speeds(figures)
        + "\n<!-- activations -->\n\n"
        + shares(figures["activations"])
    )


def speeds(figures):
    """Of every codec and its peers, beside the copy."""
    lines = [
        "| | Half zeros: share of the bytes | encode, GB/s | decode, GB/s"
        " | No zeros: share of the bytes | encode, GB/s | decode, GB/s |",
        "|---|" + "---|" * 6,
    ]
    now = {earlier: name for name, earlier in EARLIER.items()}
    for measured, row in figures["half_zero"].items():
        name = now.get(measured, measured)
        if name not in SIDES:  # of an earlier version
            continue
        cells = []
        for one in (row, figures["dense"][measured]):
            ways = (one[f"{way}_gb_per_s"]["median"] for way in ("encode", "decode"))
            cells += [f"{one['share_of_source_bytes']:.2f}", *(f"{speed:.1f}" for speed in ways)]
        kind = f"`{name}`" if name in registry.names() else name
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shares(networks):
    """Of every network's saved bytes, before training and after."""
    lines = [
        "| Network | Input | Saved, MiB | Step | "
        + " | ".join(f"`{one}`" for one in CHOSEN)
        + " |",
        "|---|---|---|---|" + "---|" * len(CHOSEN),
    ]
    for name, stages in networks.items():
        for facts in stages.values():
            inputs = f"{facts['batch_size']} of " + (
                f"{facts['image_size']} px"
                if "image_size" in facts
                else f"{facts['sequence_length']} tokens"
            )
            codecs = facts["codecs"]
            rows = (codecs[one if one in codecs else EARLIER[one]] for one in CHOSEN)
            cells = (f"{row['share_of_source_bytes']:.2f}" for row in rows)
            saved = f"{facts['saved_bytes'] / 2**20:.0f}"
            lines.append(
                f"| {name} | {inputs} | {saved} | {facts['steps']} | {' | '.join(cells)} |"
            )
    return "\n".join(lines) + "\n"


# -- the command line ---------------------------------------------------------------------------------


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny networks; no result file")
    parser.add_argument("--rounds", type=int, help="measurements of each side (15; quick: 3)")
    parser.add_argument("--bytes", help="source of the first part (64MiB; quick: 8MiB)")
    parser.add_argument("--zeros", type=float, default=0.5, help="share of zeros in it")
    parser.add_argument("--networks", nargs="*", help="of the zoo (one of each family; quick: 2)")
    parser.add_argument("--samples", help="folder of what was sampled, to measure it again")
    parser.add_argument("--train-only", action="store_true", help="fill --samples, measure nothing")
    parser.add_argument(
        "--merge", action="store_true", help="only --networks, into the last result"
    )
    parser.add_argument("--table", type=Path, help="write the tables of the manual to this file")
    parser.add_argument("--from-result", action="store_true", help="--table of the last result")
    parser.add_argument("--steps", type=int, help="to train for (200; quick: 5)")
    parser.add_argument("--seconds", type=float, default=600, help="at most, to train a network")
    parser.add_argument("--size", choices=("full", "tiny"), help="of networks (full; quick: tiny)")
    parser.add_argument("--batch-size", type=int, default=8, help="see BATCH")
    parser.add_argument("--sample", help="bytes sampled of a network (32MiB; quick: 4MiB)")
    parser.add_argument("--least", default="16KiB", help="smaller storages are left out")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.rounds = options.rounds or (3 if quick else 15)
    options.steps = (5 if quick else 200) if options.steps is None else options.steps
    options.size = options.size or ("tiny" if quick else "full")
    if options.networks is None:
        options.networks = ["resnet18", "gpt2"] if quick else list(zoo.families())
    options.bytes = parse_bytes(options.bytes or ("8MiB" if quick else "64MiB"))
    options.sample = parse_bytes(options.sample or ("4MiB" if quick else "32MiB"))
    options.least = parse_bytes(options.least)
    if options.from_result and not options.table:
        parser.error("--from-result writes nothing without --table")
    if options.merge and options.quick:
        parser.error("--quick writes no result to merge into")
    if options.train_only and not options.samples:
        parser.error("--train-only keeps nothing without --samples")
    return options


def both_sides(options):
    """The first part: half of the elements zero, and none."""
    back, figures = memory(options.bytes), {"target_gb_per_s": {"zero-value": TARGET_GB_PER_S}}
    for kind, share in (("half_zero", options.zeros), ("dense", 0.0)):
        source = normal(options.bytes, share)
        figures[kind], missing = beside_peers(options, source, back)
        print(f"{share:.0%} of the elements zero")
        _print_sides(figures[kind], missing)
    return figures | {"not_installed": missing}


def _config(options, figures):
    """What it was run with; of a merged result, the first part's is the earlier one's."""
    if options.merge:
        config = _last()["config"]
        merged = {"networks": options.networks, "seconds": options.seconds, "steps": options.steps}
        return config | {"merged": [*config.get("merged", []), merged]}
    told = ("samples", "train_only", "table", "from_result", "merge")
    config = {name: value for name, value in vars(options).items() if name not in told}
    config |= {"batch": BATCH, "learning_rate": RATE, "environment": _memory.KEEPS}
    config["peers"] = {
        name: version(package)
        for name, package in PEERS.items()
        if name not in figures["not_installed"]
    }
    return config


def _last():
    return json.loads((_results.RESULTS / f"{Path(__file__).stem}.json").read_text())


def main(arguments=None):
    options = parse(arguments)
    if options.from_result:
        options.table.write_text(page(_last()["figures"]), encoding="utf-8")
        return
    if options.train_only:
        for name in options.networks:
            for facts, _ in _sampled(name, options).values():
                print(name, facts, flush=True)
        return
    _results.warn_if_busy()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # everything is measured on one core
    figures = _last()["figures"] if options.merge else both_sides(options)
    if not options.samples:
        os.sched_setaffinity(0, cores)  # training may have them all
    networks = figures.get("activations", {}) | on_activations(options)
    order = dict.fromkeys((*zoo.families(), *networks))
    figures["activations"] = {name: networks[name] for name in order if name in networks}
    if options.quick:
        return
    path = _results.write(Path(__file__).stem, figures, _config(options, figures))
    print(f"wrote {path.name}")
    if options.table:
        options.table.write_text(page(figures), encoding="utf-8")


if __name__ == "__main__":
    _memory.keep_what_is_freed()
    main()
