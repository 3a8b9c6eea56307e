"""Shapes of what an operator makes are remembered, for exactly the calls that they hold for."""

import emulated_operators
import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def alike(function):
    """Compare what a function makes on the device, twice, with what it makes on the host."""
    wanted = function("cpu")
    for _ in range(2):
        found = function("cuda")
        assert (found.dtype, found.size(), found.stride()) == (
            wanted.dtype,
            wanted.size(),
            wanted.stride(),
        )
        assert torch.equal(found.cpu(), wanted)


def test_equal_numbers_of_other_types_are_other_calls():
    for number in (1, 1.0, True):
        alike(
            lambda device, number=number: torch.ones(3, dtype=torch.int32, device=device) * number
        )
        alike(lambda device, number=number: torch.full((2,), number, device=device))


def test_sizes_strides_types_and_dimensions_are_told_apart():
    for dtype in (torch.float32, torch.float64, torch.int16):
        for size in ((2, 3), (3, 2), (6,)):
            for turned in (False, True):

                def made(device, dtype=dtype, size=size, turned=turned):
                    x = torch.arange(6, dtype=dtype, device=device).reshape(size)
                    return (x.t() if turned else x) + 1

                alike(made)
    for dimension in (0, 1):
        alike(lambda device, of=dimension: torch.ones(2, 3, device=device).sum(of))
        alike(lambda device, of=dimension: torch.cat([torch.ones(2, 2, device=device)] * 2, of))


def test_the_default_type_counts():
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        alike(lambda device: torch.ones(3, dtype=torch.int64, device=device) / 2)


def test_an_empty_output_grows_each_time():
    def made(device):
        out = torch.empty(0, device=device)
        x = torch.ones(4, device=device)
        assert torch.add(x, x, out=out) is out
        return out

    alike(made)


def test_what_depends_on_the_data_is_not_remembered():
    for number in (1, 3):
        alike(lambda device, number=number: torch.arange(5, device=device).gt(number).nonzero())


def test_a_meta_kernel_is_asked_once(monkeypatch):
    asked = []
    shapes = emulated_operators.Call.shapes
    monkeypatch.setattr(
        emulated_operators.Call, "shapes", lambda call: asked.append(call) or shapes(call)
    )
    x = torch.ones(5, 7, 3, device="cuda")
    asked.clear()
    first, second = torch.tanh(x), torch.tanh(x)
    assert len(asked) == 1
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)
