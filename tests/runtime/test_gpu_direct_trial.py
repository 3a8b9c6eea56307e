"""What the trial of GPU-direct I/O finds out before a session relies on it."""

import ctypes

import pytest
import torch
from lazy_device import LazyLink

from cufile_in_python import PythonLibrary
from penstock.core.errors import TransferError
from penstock.core.units import MIB
from penstock.io import cufile
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda import gpu_direct
from penstock.store.flash import FlashTier

CPU = torch.device("cpu")
MAPPING_BYTES = 20 * MIB
"""What torch maps at a time with ``expandable_segments``."""


class Link(LazyLink):
    """Its memory begins ``begins`` bytes into a mapping, as far as libcufile can tell."""

    def __init__(self, library):
        super().__init__()
        self.library, self.begins, self.last = library, 0, None

    def empty(self, nbytes, device):
        self.last = super().empty(nbytes, device)
        self.library.mapping_origin = self.last.data_ptr() - self.begins
        return self.last


@pytest.fixture
def library(monkeypatch):
    library = PythonLibrary()
    monkeypatch.setattr(cufile, "_load", lambda: library)
    return library


@pytest.fixture
def link(library):
    link = Link(library)
    yield link
    link.end()


@pytest.fixture
def tier_of(disk_path, library):
    """``tier_of(capacity_bytes)``: a GPU-direct one."""
    engine, tiers = cufile.CuFileEngine(), []

    def tier_of(capacity_bytes=256 * MIB):
        tiers.append(
            FlashTier(disk_path, capacity_bytes=capacity_bytes, engine=engine, recorder=Recorder())
        )
        return tiers[-1]

    yield tier_of
    for tier in tiers:
        tier.close()
    engine.close()
    assert not library.files


def test_it_is_longer_than_two_mappings_in_many_pieces(library, link, tier_of):
    tier = tier_of()
    assert not gpu_direct.trial(tier, CPU, link)
    assert library.moved_bytes("write") == library.moved_bytes("read") > 4 * MAPPING_BYTES
    assert len(library.calls) > 40
    assert tier.held_bytes == 0


@pytest.mark.parametrize("piece", ["4MiB", "1MiB", "256KiB"])
@pytest.mark.parametrize("begins", [0, 4096, 13 * MIB + 512])
def test_pieces_that_must_not_cross_mappings_are_noticed(link, tier_of, monkeypatch, piece, begins):
    """Wherever in a mapping the memory begins, and even if mappings are whole numbers of pieces."""
    monkeypatch.setenv("PENSTOCK_IO_PIECE", piece)
    link.library.mapping_bytes, link.begins = MAPPING_BYTES, begins
    tier = tier_of()
    with pytest.raises(TransferError) as caught:
        gpu_direct.trial(tier, CPU, link)
    assert "5014" in str(caught.value)
    assert tier.held_bytes == 0


def test_a_tier_that_is_smaller_is_tried_as_far_as_it_goes(library, link, tier_of):
    assert not gpu_direct.trial(tier_of(2 * MIB), CPU, link)
    assert library.moved_bytes("write") == 4 * MIB - 512


@pytest.mark.parametrize("place", [0, 5 * MIB + 1, gpu_direct.TRIAL_BYTES - 1])
def test_one_wrong_byte_is_noticed(library, link, tier_of, place):
    def spoil(address, nbytes):
        at = link.last.data_ptr() + place
        if address <= at < address + nbytes:
            ctypes.c_ubyte.from_address(at).value ^= 1

    library.after_read = spoil
    found = gpu_direct.trial(tier_of(), CPU, link)
    assert found.startswith(f"1 of {gpu_direct.TRIAL_BYTES} bytes came back wrong")


def test_bytes_written_before_the_target_are_noticed(library, link, tier_of):
    """A library may widen a read to whole pages: what lies before is somebody else's."""

    def widen(address, _):
        if address == link.last.data_ptr() + 512:
            ctypes.memset(address - 3, 1, 3)

    library.after_read = widen
    assert gpu_direct.trial(tier_of(), CPU, link).startswith("3 of ")


def test_a_read_that_moves_nothing_is_noticed(library, link, tier_of, monkeypatch):
    monkeypatch.setattr(library.cuFileRead, "_call", lambda *arguments: arguments[2])
    wrong = int(gpu_direct.trial(tier_of(8 * MIB), CPU, link).split()[0])
    assert wrong > 8 * MIB * 0.99


def test_workers_are_told_the_device_of_the_memory_that_they_move(library, disk_path, monkeypatch):
    """That of its owner; the session's if the owner has none."""
    monkeypatch.setattr(cufile, "_MODULE", str(disk_path))
    link = Link(library)
    opened = gpu_direct.open_flash(
        lambda engine: FlashTier(disk_path, capacity_bytes=MIB, engine=engine, recorder=Recorder()),
        torch.device("cuda", 1),
        link,
        Recorder(),
    )
    assert opened is not None
    engine, tier = opened
    assert {device for _, device in link.adopted} == {CPU}  # where this link's storages are
    link.adopted.clear()
    memory = torch.zeros(4096, dtype=torch.uint8)
    tier.write(memory.data_ptr(), 4096, keep_alive=None, label="by address").written.wait()
    assert {device for _, device in link.adopted} == {torch.device("cuda", 1)}
    assert all(name.startswith("penstock-io-") for name, _ in link.adopted)
    tier.close()
    engine.close()
    link.end()
