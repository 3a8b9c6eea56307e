"""Pages that were given back come back empty, writable, and no larger than before."""

import mmap

import numpy as np
import pytest

from pages_resident import resident_bytes
from penstock.core.errors import TransferError
from penstock.core.units import MIB
from penstock.io import pages as memory
from penstock.io.mapping import Mapping


@pytest.mark.parametrize("again", [memory.unprotect, memory.unprotect_for_refill])
@pytest.mark.parametrize("nbytes", [100_000, 9 * MIB])
def test_pages_come_back_empty_and_no_larger(again, nbytes):
    held = np.full(nbytes + 8192, 7, np.uint8)
    pages = memory.whole_pages(held.ctypes.data + 5, nbytes)
    start = pages.address - held.ctypes.data
    memory.free_pages(pages)
    assert resident_bytes(pages) == 0
    again(pages)
    inside = held[start : start + pages.nbytes]
    inside[::4096] = 3
    assert inside[::4096].min() == 3
    assert not inside[1::4096].any()
    assert resident_bytes(pages) <= pages.nbytes
    assert held[:start].min() == 7 == held[start + pages.nbytes :].min()


def test_memory_in_several_mappings_is_held_as_one_if_all_of_it_is_open():
    mapping = Mapping(8 * MIB)
    whole = memory.PageRange(mapping.address, 8 * MIB)
    middle = memory.PageRange(mapping.address + 2 * MIB, 2 * MIB)
    memory.free_pages(middle)
    assert not memory.PrivateMemory().holds(whole)
    memory.unprotect(middle)
    memory._libc.madvise(*middle, 15)  # MADV_NOHUGEPAGE, so that the kernel keeps it apart
    assert memory.PrivateMemory().holds(whole)
    mapping.unmap()


def test_what_is_abandoned_is_dropped_and_one_that_cannot_be_closed_keeps_no_other_open(
    monkeypatch,
):
    held = np.full(64 * mmap.PAGESIZE, 7, np.uint8)
    first = memory.whole_pages(held.ctypes.data, 20 * mmap.PAGESIZE)
    second = memory.whole_pages(first.address + first.nbytes, 20 * mmap.PAGESIZE)
    real, refuse = memory._libc.mprotect, iter([-1])
    with monkeypatch.context() as patch:
        patch.setattr(memory._libc, "mprotect", lambda *words: next(refuse, 0) or real(*words))
        with pytest.raises(TransferError, match=f"{first.address:#x}"):
            memory.protect_and_free([first, second])
    assert resident_bytes(first) == 0 == resident_bytes(second)
    private = memory.PrivateMemory()
    assert private.holds(first)
    assert not private.holds(second)
    memory.unprotect(second)
