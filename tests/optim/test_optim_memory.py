"""Memory for states is a constant, a ring of buffers and a little, however many parameters there are."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from penstock.optim import FlashAdamW
flash, count, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(2)

def steps(count, **more):
    params = [torch.nn.Parameter(torch.zeros(count // 4, dtype=torch.bfloat16)) for _ in range(4)]
    for p in params:
        p.data.fill_(1)
        p.grad = torch.ones_like(p)
    before = int(open("/proc/self/statm").read().split()[1]) * 4096
    optimizer = FlashAdamW(params, flash=flash, format=name, **more)
    for _ in range(3):
        optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    optimizer.close()
    return peak - before

steps(65536, tile=1024)  # libraries are loaded, kernels compiled
print(steps(count))
"""
GRADIENTS = """
import resource, sys, torch
from penstock.optim import FlashSGD
torch.set_num_threads(2)

def backwards(count, **more):
    params = [torch.nn.Parameter(torch.ones(count // 24)) for _ in range(24)]
    optimizer = FlashSGD(params, lr=0.1, flash=sys.argv[1], **more)
    before = int(open("/proc/self/statm").read().split()[1]) * 4096
    for _ in range(3):
        sum(p.sum() for p in params).backward()
    optimizer.step()
    assert all(bool((p == 0.7).all()) for p in params)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    optimizer.close()
    return peak - before

backwards(65536, gradient_memory=0)
print(backwards(96 << 20, gradient_memory=sys.argv[2]))
"""
MIB = 2**20
RING = 96.5
OTHER = 48
"""Scratch of two threads, what torch makes in a first step, stacks, the heap of each thread."""


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["exact", "int8"])
def test_memory_beyond_weights_and_gradients_is_flat(format_name, disk_path):
    beyond = {}
    for millions in (32, 64):
        words = [str(disk_path), str(millions * 2**20), format_name]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        beyond[millions] = int(done.stdout)
    assert beyond[32] < (RING + OTHER) * MIB
    assert beyond[64] - beyond[32] < 16 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 64])
def test_gradients_take_their_budget_and_a_constant(budget, disk_path):
    """384 MiB of them, 16 MiB each; those on their way, and what the heap does not give back."""
    done = subprocess.run(
        [sys.executable, "-c", GRADIENTS, str(disk_path), f"{budget}MiB"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (budget + 208) * MIB
