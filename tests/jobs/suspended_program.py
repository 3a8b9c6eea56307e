"""Trains, is suspended and resumed between two steps, and prints what became of its memory.

    python suspended_program.py DIRECTORY

Prints one JSON object: resident bytes before, while suspended, and after; and how much was held.
"""

import json
import sys
from pathlib import Path

import torch

import penstock

WIDTH, DEPTH = 1024, 16
"""A layer has 4 MiB of weights; with gradients and the states of Adam it is 16."""


def resident_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise KeyError("VmRSS")


def main(directory):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.nn.Linear(8, 8)(torch.randn(8, 8)).sum().backward()
    bare = resident_bytes()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters())
    features = torch.randn(4, WIDTH)
    with penstock.offload(model, optimizer, device_memory="64MiB", flash=directory) as session:
        for _ in range(2):
            model(features).square().mean().backward()
            optimizer.step()
        before = resident_bytes()
        suspended = penstock.suspend(session)
        during = resident_bytes()
        files = len(list(Path(directory).iterdir()))
        penstock.resume(session)
        after = resident_bytes()
        model(features).square().mean().backward()
        optimizer.step()
    print(
        json.dumps(
            {
                "bare": bare,
                "before": before,
                "during": during,
                "after": after,
                "nbytes": suspended.nbytes,
                "stayed": suspended.stayed,
                "files": files,
                "checksum": sum(float(each.detach().double().sum()) for each in model.parameters()),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
