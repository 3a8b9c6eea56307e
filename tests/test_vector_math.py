"""Whoever trains with Penstock gets the same bits from the first square root on.

PyTorch's issue 188792: in runs of ``examples/plain_loop.py`` within a limit of 8 MiB on two Intel cores,
one of seven had other weights after its first step, by the first square root of Adam. It takes many runs
to see.
"""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.optim import FlashAdamW, on_flash
from penstock.vector_math import FUNCTIONS, look_up_kernels


class Calls(TorchDispatchMode):
    """What is called, by name and dtype."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.seen |= {(name, each.dtype) for each in args if isinstance(each, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def a_session(folder):
    return penstock.offload(torch.nn.Linear(2, 2), policy="keep").open()


def an_optimizer(folder):
    return FlashAdamW(torch.nn.Linear(2, 2).parameters(), flash=folder)


def an_adopted_optimizer(folder):
    return on_flash(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()), flash=folder)


@pytest.mark.parametrize("begun", [a_session, an_optimizer, an_adopted_optimizer])
def test_each_function_was_called_before_a_step_is_made(tmp_path, begun):
    look_up_kernels.cache_clear()  # as in a new process
    with Calls() as calls:
        begun(tmp_path).close()
    expected = {(name, dtype) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)}
    assert expected <= calls.seen


def test_random_numbers_and_settings_stay_as_they_are():
    look_up_kernels.cache_clear()
    before = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype()
    with torch.inference_mode():
        look_up_kernels()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == before[1:]


def test_these_are_the_functions_that_pytorch_computes_with_mkl():
    header = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"
    if not header.exists():
        pytest.skip("this build of PyTorch has no headers")
    named = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.MULTILINE)
    assert named
    assert set(named) <= set(FUNCTIONS)  # another version may have fewer
