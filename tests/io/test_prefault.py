"""Memory that is asked for ahead is there, as it was, and nobody waits for what nobody asks for."""

import ctypes
import mmap
import threading

import pytest

from pages_resident import resident_bytes
from penstock.core.units import MIB
from penstock.io import pages as memory
from penstock.io import prefault
from penstock.io.mapping import Mapping
from penstock.io.prefault import Prefault

COUNTED = [100_000, 40 * MIB, 4096, 3 * MIB]


@pytest.fixture
def lying_apart():
    """Ranges of pages, closed and empty, with a page between them that holds something."""
    mapping = Mapping(64 * MIB)
    address, ranges = mapping.address, []
    for nbytes in COUNTED:
        ranges.append(memory.whole_pages(address, nbytes))
        address += ranges[-1].nbytes + mmap.PAGESIZE
    held = mapping.array(0, mapping.nbytes)
    held[:] = 7
    for each in ranges:
        memory.free_pages(each)
        memory.unprotect_for_refill(each)
    yield ranges
    mapping.unmap()


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_who_has_waited_finds_them_resident_and_unchanged(lying_apart, threads):
    first = (ctypes.c_ubyte * 10).from_address(lying_apart[1].address + 5)
    first[3] = 9
    with Prefault(lying_apart, threads=threads) as supplied:
        for number, each in enumerate(lying_apart):
            supplied.wait_for(number)
            assert resident_bytes(each) == each.nbytes
    assert list(first) == [0, 0, 0, 9, 0, 0, 0, 0, 0, 0]


def test_what_is_closed_is_a_hint_in_vain(lying_apart):
    memory.protect(lying_apart[:1])
    with Prefault(lying_apart) as supplied:
        supplied.wait_for(0)
        supplied.wait_for(3)
    assert resident_bytes(lying_apart[0]) == 0
    memory.unprotect(lying_apart[0])


def test_without_a_thread_nobody_waits(lying_apart, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Prefault(lying_apart) as supplied:
        supplied.wait_for(3)
    assert resident_bytes(lying_apart[3]) == 0


def test_closed_it_asks_for_no_more(lying_apart, monkeypatch):
    asked, begun, go_on = [], threading.Event(), threading.Event()

    def slow(piece):
        asked.append(piece)
        begun.set()
        go_on.wait()

    monkeypatch.setattr(prefault, "populate", slow)
    supplied = Prefault(lying_apart, threads=1)
    begun.wait()
    closing = threading.Thread(target=supplied.close)
    closing.start()
    supplied.wait_for(3)  # it is over, so nobody is kept
    closing.join(0.1)
    assert closing.is_alive()  # until nobody asks
    go_on.set()
    closing.join()
    supplied.close()
    assert asked == [lying_apart[0]]
