"""Ours, or torch's, measured as the peer is: one process, one JSON line (``optimizer_step.py``)."""

import argparse
import json
import os

import _gpt
import _meter
import torch

from penstock.optim import FlashAdamW


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, required=True)
    parser.add_argument("--dir")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--format", default="exact")
    parser.add_argument(
        "--memory", action="store_true", help="torch.optim.AdamW(fused=True) in RAM"
    )
    parser.add_argument(
        "--train", action="store_true", help="with forward and backward, overlapped"
    )
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--length", type=int, default=_gpt.LENGTH)
    args = parser.parse_args()
    print(json.dumps(train(args) if args.train else step(args)))


def step(args):
    """The update alone, of gradients that stay as they are; what is loaded for it is loaded before."""
    made(args, with_gradients(args, 1024)).step()
    count = int(args.parameters) // 8
    params = with_gradients(args, count)
    before = _meter.resident_bytes()
    _meter.forget_peak()
    optimizer = made(args, params)
    found = _meter.steps(args.steps, lambda: None, optimizer.step)
    return found | {"parameters": 8 * count, "extra_bytes": _meter.peak_bytes() - before}


def with_gradients(args, count):
    dtype = torch.float32 if args.memory else torch.bfloat16
    params = [torch.nn.Parameter(torch.empty(count, dtype=dtype).fill_(0.01)) for _ in range(8)]
    for each in params:
        each.grad = torch.full_like(each, 1e-3)
    return params


def train(args):
    """Iterations without an optimizer, and with one that updates during backward."""
    torch.manual_seed(0)
    network = _gpt.GPT(args.parameters, args.length).bfloat16()
    ids = torch.randint(0, _gpt.VOCABULARY, (args.sequences, args.length))

    def passes():
        network.zero_grad(set_to_none=True)
        network(ids).backward()

    plain = _meter.steps(args.steps, passes, lambda: None)["iteration_s"]
    optimizer = FlashAdamW(
        network.parameters(), lr=1e-4, flash=args.dir, format=args.format, overlap=True
    )
    found = _meter.steps(args.steps, passes, optimizer.step)
    optimizer.close()
    count = sum(each.numel() for each in network.parameters())
    return found | {"parameters": count, "plain_iteration_s": plain}


def made(args, params):
    if args.memory:
        return torch.optim.AdamW(params, lr=1e-4, fused=True)
    os.makedirs(args.dir, exist_ok=True)
    return FlashAdamW(params, lr=1e-4, flash=args.dir, format=args.format)


if __name__ == "__main__":
    main()
