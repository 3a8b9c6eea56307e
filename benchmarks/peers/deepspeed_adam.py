"""The peer: DeepSpeed's Adam with its states on flash (ZeRO-Infinity). One JSON line on stdout.

Runs in an environment of its own: torch, numpy, ninja and ``pip install deepspeed``; gcc and libaio's
headers. Its first run compiles extensions for some minutes (``TORCH_EXTENSIONS_DIR`` keeps them). Its
buffers are locked in memory, so it needs root or ``ulimit -l unlimited``. See ``optimizer_step.py``.
"""

import argparse
import json
import os
import shutil

import _gpt
import _meter
import torch
from _deepspeed import deepspeed

TILE = 12_000_000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pipelined", action="store_true")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--length", type=int, default=_gpt.LENGTH)
    args = parser.parse_args()
    stdout = os.fdopen(os.dup(1), "w")  # all that DeepSpeed prints goes to stderr
    os.dup2(2, 1)
    try:
        stdout.write(json.dumps(measure(args)) + "\n")
        stdout.flush()
    finally:
        shutil.rmtree(args.dir, ignore_errors=True)
    os._exit(0)  # its handles may abort at exit


def measure(args):
    torch.manual_seed(0)
    network = _gpt.GPT(args.parameters, args.length)
    count = sum(each.numel() for each in network.parameters())
    engine, *_ = deepspeed.initialize(
        model=network, model_parameters=network.parameters(), config=config(args)
    )
    ids = torch.randint(0, _gpt.VOCABULARY, (args.sequences, args.length))
    found = _meter.steps(args.steps, lambda: engine.backward(engine(ids)), engine.step)
    return found | {
        "parameters": count,
        "peak_rss_bytes": _meter.peak_bytes(),
        "version": deepspeed.__version__,
    }


def config(args):
    return {
        "train_batch_size": args.sequences,
        "train_micro_batch_size_per_gpu": args.sequences,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": TILE,
            "overlap_comm": False,
            "reduce_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 10_000_000,
            "offload_optimizer": {
                "device": "nvme",
                "pin_memory": True,
                "nvme_path": args.dir,
                "buffer_count": 12 if args.pipelined else 4,
                "pipeline_read": args.pipelined,
                "pipeline_write": args.pipelined,
            },
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 16,
            "single_submit": False,
            "overlap_events": True,
            "intra_op_parallelism": 1,
        },
    }


if __name__ == "__main__":
    main()
