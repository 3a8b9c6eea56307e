"""Every program is the same to the last bit with Penstock and without, and all of it is in order."""

import emulator
import pytest
import torch
from programs import PROGRAMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*cannot be spilled"),  # where flash is to be full
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setenv("PENSTOCK_SLAB", "16MiB")
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "256KiB")
    monkeypatch.setenv("PENSTOCK_IO_THREADS", "2")
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "off")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_has_the_same_bits_and_an_order(disk_path, program):
    expected = program(None)
    offences = len(emulator.offences())
    found = program(disk_path)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert emulator.offences()[offences:] == []
