"""Trains under a budget and prints what it took of memory: see ``test_rss.py``.

    python rss_program.py DIRECTORY BUDGET_BYTES

A budget of 0 trains without Penstock. Prints one JSON object.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import penstock

ROWS, WIDTH, DEPTH = 4096, 256, 18
STORAGE_BYTES = ROWS * WIDTH * 4
"""Of what each layer saves, 4 MiB; a block saves two of these."""


def status_bytes(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def main(directory, budget_bytes):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(each for _ in range(DEPTH) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    features = torch.randn(ROWS, WIDTH)
    model(features[:64]).sum().backward()  # gradients, libraries and thread pools are there now
    session = nullcontext()
    if budget_bytes:
        session = penstock.offload(model, codec="none", device_memory=budget_bytes, flash=directory)
    with session:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = status_bytes("VmRSS")
        for _ in range(3):
            loss = model(features).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        peak = status_bytes("VmHWM")
        report = {"loss": loss.item(), "growth_bytes": peak - before}
        if budget_bytes:
            report["charged_bytes"] = session.budget.peak_bytes
            report["saved_bytes"] = session.profile.saved_bytes
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
