"""Codecs on one core: beside a copy of the same bytes and general compressors, and on real activations.

1. Every codec each way, on float32 of which half is zero, in no order; those that lose something too.
   Beside them in the same run, taking turns: what one writes in NumPy (``x[x != 0]`` and ``packbits``),
   blosc2, zstd and lz4 as far as they are installed, and the limit: a copy of the same bytes. The figure
   that counts is the ratio to the copy. Peers allocate what they return, where their interface has no
   other way. ``narrow`` is left out, for it gives up on such bytes at once.
2. Bytes and speed of each codec that can be chosen by itself, and of ``csr``, on what networks of the zoo
   save for images, or text, as small as they take them. The same share of every storage is sampled.
   Every network is looked at fresh; those in ``TRAINED``, whose steps are quick, once more after
   ``--steps`` steps on the zoo's real data, or as many as ``--seconds`` allow: the result says how many.
   ``positive`` is measured on every float, though it is only used where signs are proven to be enough.

    python benchmarks/micro/codecs.py
"""

import argparse
import importlib
import os
import statistics
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import _activations
import _results
from penstock import zoo
from penstock.codec import registry
from penstock.codec.base import Fidelity
from penstock.core.units import parse_bytes, round_up
from penstock.io.mapping import PAGE_BYTES, Mapping
from penstock.testing.codec_samples import check_decoded

TARGET_GB_PER_S = 5.0
"""Of zero-value, each way."""
TRAINED = ("alexnet", "googlenet", "resnet18", "densenet-bc-100-12")
CHOSEN = ("zero-value", "narrow", "byteplane", "zero-value+byteplane", "positive", "csr")
CHECKED_BYTES = 1 << 20
"""Of what a codec that loses something gives back; to check all takes longer than to measure."""

_MAPPINGS = []


def memory(nbytes):
    """Huge pages, touched once, kept as long as the process: what a session's arena hands out."""
    mapping = Mapping(round_up(nbytes, PAGE_BYTES))
    _MAPPINGS.append(mapping)
    found = mapping.array(0, nbytes)
    found[:] = 0
    return found


class Side:
    """One way to encode and decode; ``encode()`` returns how many bytes that takes."""

    def __init__(self, source, back):
        self.source, self.back = source, back

    def check(self):
        """That what was decoded is right."""
        assert np.array_equal(self.back, self.source), type(self).__name__


class Copy(Side):
    def encode(self):
        np.copyto(self.back, self.source)
        return self.source.size

    decode = encode


class ByCodec(Side):
    def __init__(self, source, back, name="zero-value"):
        super().__init__(source, back)
        self.codec = registry.get(name)
        self.out = memory(self.codec.spec("float32", source.size).bound_bytes)

    def encode(self):
        self.length = self.codec.encode(self.source, self.out, dtype="float32")
        return self.length

    def decode(self):
        self.codec.decode(self.out[: self.length], self.back)

    def check(self):
        if self.codec.fidelity is Fidelity.EXACT:
            super().check()
        else:
            parts = (each[:CHECKED_BYTES] for each in (self.source, self.back))
            check_decoded(self.codec, "float32", *parts)


class ByNumpy(Side):
    """What one writes by hand."""

    def encode(self):
        words = self.source.view(np.uint32)
        mask = words != 0
        self.bits, self.packed = np.packbits(mask, bitorder="little"), words[mask]
        return self.bits.nbytes + self.packed.nbytes

    def decode(self):
        words = self.back.view(np.uint32)
        mask = np.unpackbits(self.bits, count=words.size, bitorder="little").view(bool)
        words[:] = 0
        words[mask] = self.packed


class ByBlosc2(Side):
    """LZ4 behind a byte shuffle, in one thread."""

    def __init__(self, source, back):
        super().__init__(source, back)
        self.blosc2 = importlib.import_module("blosc2")
        self.blosc2.set_nthreads(1)

    def encode(self):
        self.frame = self.blosc2.compress2(
            self.source,
            typesize=4,
            clevel=5,
            codec=self.blosc2.Codec.LZ4,
            filters=[self.blosc2.Filter.SHUFFLE],
            nthreads=1,
        )
        return len(self.frame)

    def decode(self):
        self.blosc2.decompress2(self.frame, dst=self.back, nthreads=1)


class ByZstd(Side):
    """Level 1."""

    def __init__(self, source, back):
        super().__init__(source, back)
        zstandard = importlib.import_module("zstandard")
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()

    def encode(self):
        self.frame = self.compressor.compress(self.source)
        return len(self.frame)

    def decode(self):
        self.back[:] = np.frombuffer(self.decompressor.decompress(self.frame), np.uint8)


class ByLz4(Side):
    """The default mode."""

    def __init__(self, source, back):
        super().__init__(source, back)
        self.block = importlib.import_module("lz4.block")

    def encode(self):
        self.frame = self.block.compress(self.source)
        return len(self.frame)

    def decode(self):
        self.back[:] = np.frombuffer(self.block.decompress(self.frame), np.uint8)


SIDES = {
    "memcpy": Copy,
    "zero-value": ByCodec,
    "numpy": ByNumpy,
    "blosc2": ByBlosc2,
    "zstd": ByZstd,
    "lz4": ByLz4,
    **{
        name: partial(ByCodec, name=name)
        for name in ("byteplane", "csr", "positive", "float16", "bfloat16", "float8", "int8")
    },
}
PEERS = {"blosc2": "blosc2", "zstd": "zstandard", "lz4": "lz4", "numba": "numba"}


def half_zero(nbytes, share, seed=0):
    """Normal float32, of which a share is zero, in no order."""
    random = np.random.default_rng(seed)
    source = memory(nbytes)
    values = source.view(np.float32)
    values[:] = random.standard_normal(values.size, dtype=np.float32)
    values[random.random(values.size, dtype=np.float32) < share] = 0
    return source


def beside_peers(options):
    """GB/s of source bytes each way of every side, and ratios to the copy; and who is not installed."""
    source, back = half_zero(options.bytes, options.zeros), memory(options.bytes)
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
    """For each network, fresh and maybe trained: bytes and speed of every codec."""
    figures = {}
    for name in options.networks:
        settings = _activations.small_inputs(name, options.size)
        trainee = _activations.Trainee(name, batch_size=options.batch_size, **settings)
        figures[name] = {"fresh": _one_stage(trainee, options)}
        if name in TRAINED and options.steps:
            trainee.train(options.steps, options.seconds)
            figures[name]["trained"] = _one_stage(trainee, options)
        _print_network(name, figures[name])
    return figures


def _one_stage(trainee, options):
    steps = trainee.steps
    pieces, total, loss = trainee.saved(options.sample, options.least)
    return {
        "steps": steps,
        "loss": round(loss, 4),
        "saved_bytes": total,
        "sampled_bytes": sum(piece.size for _, piece in pieces),
        "codecs": {name: _one_codec(registry.get(name), pieces) for name in CHOSEN},
    }


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


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny networks; no result file")
    parser.add_argument("--rounds", type=int, help="measurements of each side (15; quick: 3)")
    parser.add_argument("--bytes", help="source of the first part (64MiB; quick: 8MiB)")
    parser.add_argument("--zeros", type=float, default=0.5, help="share of zeros in it")
    parser.add_argument("--networks", nargs="*", help="of the zoo (one of each family; quick: 2)")
    parser.add_argument("--steps", type=int, help="to train quick ones for (200; quick: 5)")
    parser.add_argument("--seconds", type=float, default=60, help="at most, to train a network")
    parser.add_argument("--size", choices=("full", "tiny"), help="of networks (full; quick: tiny)")
    parser.add_argument("--batch-size", type=int, default=8)
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
    return options


def main(arguments=None):
    options = parse(arguments)
    _results.warn_if_busy()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # everything is measured on one core
    sides, missing = beside_peers(options)
    os.sched_setaffinity(0, cores)  # training may have them all
    _print_sides(sides, missing)
    figures = {"half_zero": sides, "target_gb_per_s": {"zero-value": TARGET_GB_PER_S}}
    figures |= {"not_installed": missing, "activations": on_activations(options)}
    if options.quick:
        return
    config = vars(options) | {"trained": TRAINED}
    config["peers"] = {
        name: version(package) for name, package in PEERS.items() if name not in missing
    }
    path = _results.write(Path(__file__).stem, figures, config)
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
