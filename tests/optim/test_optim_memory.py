"""Memory for states is a constant, a ring of buffers and a little, however many parameters there are."""

import subprocess
import sys
import warnings

import pytest
import torch

from penstock import PenstockWarning, optim
from penstock.core.errors import BudgetError
from penstock.core.units import format_bytes
from penstock.optim import FlashAdamW
from penstock.optim.memory import plain_bytes
from penstock.store.account import host_account

pytestmark = pytest.mark.usefixtures("collected_account")

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
    for millions in (1, 32, 64):  # in the first, Numba may compile, which takes memory
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


def test_a_small_model_costs_more_memory_than_torch_and_is_warned_of_before_its_first_step(
    disk_path,
):
    """Both figures are said, once; and the least that ``host_memory`` can be."""
    weight = torch.nn.Parameter(torch.randn(1 << 18))
    optimizer = FlashAdamW(
        [weight], flash=disk_path, tile=1 << 16, threads=1, squeeze=False, host_memory="1MiB"
    )
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        first = [str(each.message) for each in caught if each.category is PenstockWarning]
        optimizer.step()
    raised, costs = first
    taken = optimizer._penstock.pipeline.memory_bytes
    plain_bytes = 2 * weight.nbytes
    assert f"raised from 1.00 MiB to {format_bytes(taken)} ({taken} bytes), the least" in raised
    assert "takes more memory than in memory" in costs
    assert f"its buffers take {format_bytes(taken)}" in costs
    assert f"torch's AdamW would take {format_bytes(plain_bytes)}" in costs
    assert len([each for each in caught if each.category is PenstockWarning]) == 2
    assert not torch.equal(weight, before)
    optimizer.close()
    # with what it was told to give, and with buffers that are fewer than the states, nothing is said
    enough = FlashAdamW(
        [weight], flash=disk_path, tile=1 << 12, threads=1, squeeze=False, host_memory=1 << 20
    )
    enough.step()  # a warning would be an error
    assert 0 < enough._penstock.pipeline.memory_bytes <= 1 << 20
    enough.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_what_torch_would_take_is_what_it_takes(name, dtype, small):
    options = {"lr": 1e-3} | ({"momentum": 0.9} if name == "SGD" else {})
    parameters = [
        torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype))
        for n in (1000, 4096)
    ]
    ours = getattr(optim, f"Flash{name}")(parameters, **options, **small)
    theirs = getattr(torch.optim, name)(parameters, **options)
    for each in parameters:
        each.grad = torch.ones_like(each)
    theirs.step()
    held = sum(
        value.nbytes
        for state in theirs.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    assert plain_bytes(ours._penstock) == held > 0
    ours.close()


def test_buffers_are_fewer_where_the_process_has_no_memory_for_all(disk_path, monkeypatch):
    memory = host_account()
    before = memory.used_bytes

    def stepped(megabytes):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(1 << 20))
        weight.grad = torch.ones_like(weight)
        optimizer = FlashAdamW([weight], flash=disk_path, tile=1 << 16, squeeze=False)
        monkeypatch.setattr(memory, "limit_bytes", memory.used_bytes + megabytes * MIB)
        try:
            for _ in range(3):
                optimizer.step()
            held = memory.used_by("optimizer")
            return weight.detach().clone(), optimizer._penstock.pipeline.count, held
        finally:
            monkeypatch.undo()
            optimizer.close()

    plain, count, held = stepped(1 << 20)
    bounded, fewer, less = stepped(4)
    assert 3 <= fewer < count
    assert less <= 4 * MIB < held
    assert torch.equal(plain, bounded)
    with pytest.raises(
        BudgetError, match=r"\d of the \d buffers that an optimizer needs: .* memory budget"
    ):
        stepped(1)
    assert memory.used_bytes == before
