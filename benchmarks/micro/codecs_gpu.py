"""Codecs on a GPU: GB/s of source bytes each way, beside copies of the same bytes.

Every codec that has a form for devices, on bfloat16 and float32 of three sizes: normal, normal of which
half is zero, and normal whose exponents need exceptions in every block. A codec with Triton kernels is
measured with them and with torch's operators; both must make the same frame, and exact codecs must give
the bytes back. A figure is the median of ``--rounds`` calls, each with a synchronisation before and after
it, so that it holds what the host needs to launch the work. ``memory_share`` is what the allocator gave
at most, as a share of what ``scratch_bytes`` promises. Copies are on the device, and to pinned memory
(``out``) and ``back``.

On a machine without CUDA nothing is measured.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _results
from penstock.codec.base import Fidelity
from penstock.codec.device import FORMS, KERNEL_SCRATCH, base, kernels
from penstock.codec.device.words import word_type

SIZES = (2 << 20, 12 << 20, 64 << 20)
DTYPES = ("bfloat16", "float32")


def main():
    options = parse()
    if not torch.cuda.is_available():
        print("codecs_gpu: there is no CUDA device, so there is nothing to measure")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    figures = {"device": torch.cuda.get_device_name(), "copies": copies(device, options.rounds)}
    config = {"rounds": options.rounds, "sizes": SIZES, "dtypes": DTYPES}
    for name in FORMS:
        for dtype in DTYPES:
            if not FORMS[name].CODEC.accepts(dtype):
                continue
            found = figures.setdefault(name, {})[dtype] = {}
            for nbytes in SIZES:
                for kind, memory in inputs(device, dtype, nbytes).items():
                    found[f"{nbytes >> 20} MiB, {kind}"] = measure(
                        name, dtype, memory, options.rounds
                    )
            show(name, dtype, found)
            _results.write("codecs_gpu", figures, config, into=options.into)


def copies(device, rounds):
    """GB/s of copies of each size: on the device, out to pinned memory and back."""
    found = {}
    for nbytes in SIZES:
        source, other = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        ways = {"device": (other, source), "out": (pinned, source), "back": (source, pinned)}
        found[f"{nbytes >> 20} MiB"] = {
            way: rate(nbytes, median_s(partial(target.copy_, origin, non_blocking=True), rounds))
            for way, (target, origin) in ways.items()
        }
    return found


def inputs(device, dtype, nbytes):
    """Bytes to encode, uint8[nbytes]."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    normal = torch.randn(nbytes // kind.itemsize) * 0.02
    mixed = normal.clone()
    mixed[::40] *= 1e-9
    found = {"normal": normal, "half zero": normal.relu(), "exceptions": mixed}
    return {name: values.to(kind).view(torch.uint8).to(device) for name, values in found.items()}


def measure(name, dtype, memory, rounds):
    """GB/s each way, by each way to compute it that there is, and the share of bytes left."""
    found, frames = {}, {}
    device, word = memory.device, word_type(dtype)
    sides = {"operators": None}
    if name in KERNEL_SCRATCH or name == "zero-value":
        sides["kernels"] = True
    for side, with_kernels in sides.items():
        tried = kernels.kernels_for if with_kernels else lambda *_: None
        before, kernels.kernels_for = kernels.kernels_for, tried
        try:
            frame = frames[side] = base.encode_tensor(name, memory, dtype)
            back = base.decode_tensor(frame, memory.numel())
            exact = FORMS[name].CODEC.fidelity is Fidelity.EXACT
            assert not exact or torch.equal(back, memory), (name, dtype, side)
            del back
            encode = median_s(lambda: base.encode_tensor(name, memory, dtype), rounds)
            decode = median_s(lambda frame=frame: base.decode_tensor(frame, memory.numel()), rounds)
            taken = max(
                taken_bytes(lambda: base.encode_tensor(name, memory, dtype)),
                taken_bytes(lambda frame=frame: base.decode_tensor(frame, memory.numel())),
            )
            said = base.scratch_bytes(name, dtype, memory.numel(), device if with_kernels else None)
        finally:
            kernels.kernels_for = before
        if taken > said:
            sys.exit(f"codecs_gpu: {name}, {dtype}, {side} took {taken} bytes and promises {said}")
        found[side] = {
            "encode_gb_per_s": rate(memory.numel(), encode),
            "decode_gb_per_s": rate(memory.numel(), decode),
            "memory_share": round(taken / said, 3),
        }
    found["left_share"] = round(frames["operators"].numel() / memory.numel(), 4)
    if "kernels" in frames:
        assert torch.equal(frames["kernels"], frames["operators"]), (name, dtype, word)
    return found


def taken_bytes(action):
    """Device memory that the allocator gave at most during a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = action()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def median_s(action, rounds):
    for _ in range(2):
        action()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rate(nbytes, seconds):
    return round(nbytes / seconds / 1e9, 2)


def show(name, dtype, found):
    largest = max(SIZES) >> 20
    for kind, each in found.items():
        if not kind.startswith(f"{largest} MiB"):
            continue
        sides = [
            f"{side} {rates['encode_gb_per_s']:.1f} out, {rates['decode_gb_per_s']:.1f} back"
            for side, rates in each.items()
            if side != "left_share"
        ]
        left = each["left_share"]
        print(f"{name}, {dtype}, {kind}: {'; '.join(sides)} GB/s, {left:.3f} left", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--into", default=os.environ.get("OUT", "."), help="folder of the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
