"""Threads that update tiles: what OpenMP makes of them."""

import subprocess
import sys

import pytest

COUNTS = """
import os
import torch
from penstock.optim.pool import make_pool

def threads():
    return len(os.listdir("/proc/self/task"))

def alone():
    before = threads()
    torch.ones(1 << 20).add_(1)
    return before, threads()

torch.set_num_threads(3)
torch.ones(1 << 20).add_(1)
before = threads()
with make_pool(1, None) as pool:
    print(before, *pool.submit(alone).result(), "libgomp" in open("/proc/self/maps").read())
"""


def test_a_thread_that_updates_has_a_second_of_openmp_once_and_then_computes_alone():
    command = [sys.executable, "-c", COUNTS]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if found.pop() != "True":
        pytest.skip("torch does not use GNU's OpenMP here")
    before, ready, after = map(int, found)
    assert ready - before == 2  # itself, and the one by which OpenMP counts more threads than cores
    assert after == ready
