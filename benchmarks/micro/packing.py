"""Exponents in fewer bits on one core: what that saves of states and activations, and how fast it is.

Networks of the zoo are trained by AdamW for ``--steps`` steps on the zoo's real data. Then weights
(which stand for float32 masters), means and variances are squeezed and expanded, a tile at a time, in
place, as a step does: as float32, and as bfloat16 numbers, which the format ``bf16`` keeps of means and
variances. Beside them, in the same run: what is normally distributed, what the step's own benchmark moves
(weights and gradients that are all alike), and bits of no order, which do not shrink. The limit is a copy
of the same bytes. The same arrays, and what networks save for backward, are encoded and decoded in the
other way of the same format, that of the codec ``exponent``, which activations and checkpoints take.

The figures that count are the share of the bytes that is left, and, for records of AdamW in the formats
of the manual, that share and the parameters a second that one core squeezes and expands.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _activations
import _results
from penstock.codec.kernels import exponent as kernels
from penstock.optim.formats import State, form_of
from penstock.optim.params import make_tiles
from penstock.optim.squeeze import Squeezer, extent, slack_bytes

NETWORKS = {
    "gpt2": {"depth": 3, "width": 512, "heads": 8, "sequence_length": 128, "vocab_size": 257},
    "resnet18": {"image_size": 64, "num_classes": 8},
}
"""With what they are built: some ten million parameters each."""
BATCH = {"gpt2": 4, "resnet18": 8}
RATE = 5e-4
SAMPLE = 16 << 20
"""Bytes of what is saved for backward that are looked at."""
KINDS = ("weights", "means", "variances")
STATES = (State("exp_avg", torch.float32), State("exp_avg_sq", torch.float32))
FORMATS = ("exact", "split", "bf16")
TARGET_GB_PER_S = 3.0
"""Each way, on one core."""
TILE = 1 << 20


def trained(name, steps, seconds):
    """Weights, means and variances, each laid flat, and how they came about."""
    size = {"size": "tiny"} if seconds is None else {"size": "full", **NETWORKS[name]}
    trainee = _activations.Trainee(name, batch_size=BATCH[name], **size)
    params = list(trainee.network.parameters())
    trainee.optimizer = torch.optim.AdamW(params, lr=RATE, fused=True)
    until = time.monotonic() + (seconds or 10)
    while trainee.steps < steps and time.monotonic() < until:
        loss = trainee.loss()
        trainee.learn(loss)
    states = [trainee.optimizer.state[param] for param in params]
    arrays = [flat(params)]
    arrays += [flat([state[each.name] for state in states]) for each in STATES]
    pieces, _, _ = trainee.saved(SAMPLE, 1 << 14)
    arrays.append(
        np.concatenate([piece.view(np.float32) for kind, piece in pieces if kind == "float32"])
    )
    facts = {"steps": trainee.steps, "loss": round(loss.item(), 4), "parameters": arrays[0].size}
    return dict(zip((*KINDS, "activations"), arrays, strict=True)), facts


def flat(tensors):
    return np.concatenate([each.detach().float().reshape(-1).numpy() for each in tensors])


def synthetic(elements):
    random = np.random.default_rng(0)
    normal = random.standard_normal(elements, dtype=np.float32)
    bits = random.integers(0, 2**32, elements, dtype=np.uint32)
    return {
        "normal": normal,
        "normal squared": np.square(normal),
        "all alike": np.full(elements, 1e-3, np.float32),
        "no order": bits.view(np.float32),
    }


def one_array(values, itemsize, rounds):
    """Shares of the bytes that are left, and GB/s of plain bytes each way; of a tile from the middle."""
    values = values[max(0, (values.size - TILE) // 2) :][:TILE]
    words = as_words(values[: values.size // kernels.BLOCK * kernels.BLOCK], itemsize)
    memory = np.zeros(words.nbytes + words.size // kernels.BLOCK * kernels.HEAD_BYTES, np.uint8)
    mine, copy = memory[: words.nbytes].view(words.dtype), np.zeros_like(words)
    out, back = np.zeros(memory.size, np.uint8), np.zeros_like(words)
    samples = {name: [] for name in ("squeeze", "expand", "copy", "encode", "decode")}
    for _ in range(rounds + 1):
        mine[:] = words
        times = [time.perf_counter()]
        place = kernels.encode_back(mine, memory, memory.size)
        times.append(time.perf_counter())
        end = kernels.decode_ahead(memory, place, mine)
        times.append(time.perf_counter())
        copy[:] = mine
        times.append(time.perf_counter())
        length = kernels.encode(words, out, False)
        times.append(time.perf_counter())
        damage = kernels.decode(out[:length], back)
        times.append(time.perf_counter())
        for name, seconds in zip(samples, np.diff(times), strict=True):
            samples[name].append(words.nbytes / seconds / 1e9)
        assert (end, damage) == (memory.size, -1)
        assert np.array_equal(mine, words)
        assert np.array_equal(back, words)
    rates = {f"{name}_gb_per_s": _results.summary(each[1:]) for name, each in samples.items()}
    shares = {"share": memory.size - place, "codec_share": length}
    return {name: round(nbytes / words.nbytes, 4) for name, nbytes in shares.items()} | rates


def as_words(values, itemsize):
    """The bits of float32 numbers, or of the bfloat16 numbers that they begin with."""
    bits = values.view(np.uint32)
    return bits if itemsize == 4 else (bits >> 16).astype(np.uint16)


def one_format(arrays, format_name, rounds):
    """A record of AdamW beside bfloat16 weights, from the middle of a network."""
    form = form_of(
        format_name, torch.bfloat16, STATES, with_master=True, whole_master=False, where="here"
    )
    count = min(arrays["weights"].size, TILE)
    (tile,) = make_tiles([(0, count)], form, group=0, first=0, elements=TILE)
    buffer = np.zeros(tile.record_bytes + slack_bytes(tile), np.uint8)
    fill(buffer, tile, arrays, count)
    record, squeezer, times = buffer[: tile.record_bytes].copy(), Squeezer(True), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        length = squeezer.squeeze(tile, buffer)
        assert length
        assert squeezer.expand(tile, buffer, length)
        times.append(time.perf_counter() - start)
        assert np.array_equal(buffer[: tile.record_bytes], record)
    return {
        "share": round(extent(tile, length)[1] / tile.record_bytes, 4),
        "parameters_per_s_both_ways": count / statistics.median(times[1:]),
    }


def fill(buffer, tile, arrays, count):
    """What a record of these values holds; the 16 bits beside a weight have no order."""
    start = (arrays["weights"].size - count) // 2
    for array, name in zip(tile.arrays, KINDS, strict=True):
        place = buffer[array.offset_bytes : array.offset_bytes + array.nbytes]
        words = arrays[name][start : start + count].view(np.uint32)
        if array.packing == "plain":
            place.view(np.uint32)[:count] = words
        elif array.packing == "bfloat16":
            place.view(np.uint16)[:count] = words >> 16
        else:
            place[: 2 * count].view(np.uint16)[:] = words & 0xFFFF


def measured(options):
    seconds = None if options.quick else options.seconds
    figures = {"target_gb_per_s": TARGET_GB_PER_S, "trained": {}, "synthetic": {}, "formats": {}}
    for name in NETWORKS:
        arrays, facts = trained(name, options.steps, seconds)
        os.sched_setaffinity(0, {max(options.cores)})
        rows = {kind: both_types(values, options) for kind, values in arrays.items()}
        figures["trained"][name] = facts | {"arrays": rows}
        show(f"{name}, step {facts['steps']}", rows)
        rows = {each: one_format(arrays, each, options.rounds) for each in FORMATS}
        figures["formats"][name] = rows
        for each, row in rows.items():
            rate = row["parameters_per_s_both_ways"] / 1e6
            print(
                f"  {each:16} {row['share']:.3f} of a record, {rate:.0f} M parameters/s both ways"
            )
        os.sched_setaffinity(0, options.cores)
    os.sched_setaffinity(0, {max(options.cores)})
    for kind, values in synthetic(TILE).items():
        figures["synthetic"][kind] = both_types(values, options)
    show("synthetic", figures["synthetic"])
    return figures


def both_types(values, options):
    sizes = {"float32": 4, "bfloat16": 2}
    return {name: one_array(values, size, options.rounds) for name, size in sizes.items()}


def show(title, rows):
    print(title)
    for kind, types in rows.items():
        for name, row in types.items():
            ways = [
                f"{way} {row[f'{way}_gb_per_s']['median']:5.2f}"
                for way in ("squeeze", "expand", "encode", "decode")
            ]
            left = f"{row['share']:.3f} left, {', '.join(ways[:2])} GB/s"
            print(f"  {kind:16} {name:8} {left}; {row['codec_share']:.3f}, {', '.join(ways[2:])}")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="to train for")
    parser.add_argument("--seconds", type=float, default=240, help="at most, to train a network")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="tiny networks; no result file")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = min(options.steps, 10), 3
    options.cores = os.sched_getaffinity(0)
    _results.warn_if_busy()
    figures = measured(options)
    if not options.quick:
        config = {name: getattr(options, name) for name in ("steps", "seconds", "rounds")}
        config |= {"networks": NETWORKS, "batch": BATCH, "learning_rate": RATE, "tile": TILE}
        print(f"wrote {_results.write(Path(__file__).stem, figures, config).name}")


if __name__ == "__main__":
    main()
