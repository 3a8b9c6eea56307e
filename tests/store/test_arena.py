"""The arena: never a byte over its budget, no page faults once warm, no memory used twice."""

import ctypes
import gc
import re
import resource
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.errors import ClosedError, ConfigError, TransferError
from penstock.core.locks import Lock
from penstock.core.units import MIB
from penstock.io import mapping
from penstock.io.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping
from penstock.store.account import Account, host_account
from penstock.store.arena import Arena, lone_block
from penstock.store.pool import BlockState
from penstock.testing.engines import run_in_fork
from tries import tries

torch = pytest.importorskip("torch")

libc = ctypes.CDLL(None, use_errno=True)
PAGE = HUGE_PAGE_BYTES


def resident_bytes(arena):
    """What the kernel says, by ``mincore``."""
    pages = (ctypes.c_ubyte * (arena.capacity_bytes // PAGE_BYTES))()
    size = ctypes.c_size_t(arena.capacity_bytes)
    assert libc.mincore(ctypes.c_void_p(arena.address), size, pages) == 0
    return sum(page & 1 for page in pages) * PAGE_BYTES


def is_mapped(address):
    vector = (ctypes.c_ubyte * 1)()
    return libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE_BYTES), vector) == 0


def fill(block, value):
    ctypes.memset(block.address, value, block.nbytes)


def content(block):
    return set(ctypes.string_at(block.address, block.nbytes))


@pytest.fixture
def arena():
    arena = Arena(16 * MIB)
    yield arena
    arena.close()


# -- accounting ----------------------------------------------------------------------------------


def test_nothing_is_resident_before_it_is_needed(arena):
    assert arena.address % PAGE == 0
    assert (arena.used_bytes, arena.touched_bytes, resident_bytes(arena)) == (0, 0, 0)


def test_blocks_are_resident_and_aligned(arena):
    block = arena.allocate(3 * MIB)
    assert block.address % 4096 == 0
    assert (arena.used_bytes, arena.touched_bytes) == (3 * MIB, 4 * MIB)
    assert resident_bytes(arena) == 4 * MIB
    odd = arena.allocate(5)
    assert odd.address % 4096 == 0
    assert arena.touched_bytes == 4 * MIB  # from what is touched already
    wide = arena.allocate(4096, alignment=PAGE)
    assert wide.address % PAGE == 0


@pytest.mark.skipif(mapping._huge_page_bytes() != PAGE, reason="huge pages are not of 2 MiB")
def test_whole_pages_are_huge_and_the_tail_is_not():
    """A huge page at the tail would be resident beyond what was charged."""
    arena = Arena(5 * MIB)
    whole, tail = (vm_flags(arena.address + offset) for offset in (0, 4 * MIB))
    assert "hg" in whole
    assert "nh" in tail
    for flags in (whole, tail):
        assert "dc" in flags  # not inherited by fork
        assert "lo" not in flags  # never mlocked


def vm_flags(address):
    """The kernel's two-letter flags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_the_budget_is_charged_before_the_first_touch_and_by_pages():
    budget = Account(6 * MIB)
    arena = Arena(64 * MIB, account=budget, owner="buffers")
    first = arena.allocate(MIB)
    assert (budget.used_by("buffers"), budget.used_bytes) == (2 * MIB, 2 * MIB)
    second = arena.allocate(4 * MIB)
    assert budget.used_bytes == 6 * MIB
    assert arena.allocate(2 * MIB) is None
    third = arena.allocate(MIB)  # the rest of the pages that are there
    assert budget.used_bytes == budget.peak_bytes == 6 * MIB
    for block in (first, second, third):
        block.free()
    assert budget.used_bytes == arena.touched_bytes == 6 * MIB  # idle, but still resident
    arena.close()
    assert budget.used_bytes == 0


@pytest.mark.parametrize("limit", [4096, MIB, 5 * MIB, 5 * MIB + 4096, 7 * MIB - 1])
@pytest.mark.parametrize("capacity", [8 * MIB, 9 * MIB + 5, 64 * MIB])
def test_an_odd_budget_can_be_used_to_the_last_page(limit, capacity):
    budget = Account(limit)
    arena = Arena(capacity, account=budget)
    most = limit // 4096 * 4096
    assert arena.allocate(most + 1) is None
    assert arena.allocate(most).nbytes == most
    assert arena.touched_bytes == resident_bytes(arena) == budget.used_bytes == most


@pytest.mark.parametrize("capacity", [4096, MIB, 3 * MIB, 5 * MIB + 4097])
def test_an_odd_capacity_is_rounded_down_to_pages(capacity):
    arena = Arena(capacity)
    most = capacity // 4096 * 4096
    assert arena.capacity_bytes == most
    block = arena.allocate(most)
    fill(block, 1)
    assert arena.touched_bytes == resident_bytes(arena) == most
    assert arena.allocate(1) is None
    block.free()
    assert arena.trim() == most
    assert arena.touched_bytes == resident_bytes(arena) == 0


@pytest.mark.parametrize(("capacity", "limit"), [(0, None), (4095, None), (-1, None), (MIB, 4095)])
def test_an_arena_without_a_page(capacity, limit):
    with pytest.raises(ConfigError, match="does not hold one page"):
        Arena(capacity, account=None if limit is None else Account(limit))


def test_senseless_blocks(arena):
    for nbytes in (0, -1):
        with pytest.raises(ConfigError, match=str(nbytes)):
            arena.allocate(nbytes)
    for alignment in (0, -1, 3, 2 * PAGE):
        with pytest.raises(ConfigError, match=str(alignment)):
            arena.allocate(1, alignment=alignment)


def test_no_address_space():
    with pytest.raises(TransferError, match="Cannot allocate memory") as caught:
        Arena(1 << 50)
    assert caught.value.op == "map"


# -- placement -----------------------------------------------------------------------------------


def test_touched_memory_is_preferred_over_lower_untouched_memory(arena):
    low, high = arena.allocate(4 * MIB), arena.allocate(4 * MIB)
    low.free()
    arena.trim()
    assert arena.touched_bytes == 4 * MIB
    address = high.address
    high.free()
    again = arena.allocate(3 * MIB)
    assert address <= again.address < address + MIB + 1
    assert arena.touched_bytes == 4 * MIB


def test_growth_extends_what_is_idle():
    """As few new pages as possible: the block starts in the idle page at the end."""
    arena = Arena(16 * MIB)
    held, idle = arena.allocate(2 * MIB), arena.allocate(2 * MIB)
    idle.free()
    block = arena.allocate(6 * MIB)
    assert block.address == idle.address
    assert arena.touched_bytes == 8 * MIB
    block.free()
    held.free()
    arena.trim()
    arena.allocate(2 * MIB)
    hole = arena.allocate(4 * MIB)
    warm = arena.allocate(2 * MIB)
    end = arena.allocate(8 * MIB)
    hole.free()
    assert arena.trim() == 4 * MIB
    warm.free()
    assert arena.allocate(4 * MIB).address == hole.address + 2 * MIB  # cold page, then the warm
    assert end.state is BlockState.OUT


def test_growth_starts_or_ends_in_a_warm_page_amid_cold_ones():
    arena = Arena(10 * MIB)
    blocks = [arena.allocate(2 * MIB) for _ in range(5)]
    for index in (0, 1, 3, 4):
        blocks[index].free()
    assert arena.trim() == 8 * MIB
    blocks[2].free()
    wide = arena.allocate(3 * MIB)  # from either end of the arena it would be two pages
    assert arena.touched_bytes == 4 * MIB
    assert blocks[2].address in range(wide.address, wide.address + wide.nbytes)


def test_a_refusal_changes_nothing():
    budget = Account(6 * MIB)
    arena = Arena(16 * MIB, account=budget)
    held, idle = arena.allocate(2 * MIB), arena.allocate(2 * MIB)
    idle.free()
    assert arena.allocate(6 * MIB) is None
    assert arena.touched_bytes == resident_bytes(arena) == budget.used_bytes == 4 * MIB
    held.free()


def test_a_block_that_no_page_can_be_added_for_is_refused_without_a_search(monkeypatch):
    """What is needed next is asked for again at each use of a weight, as long as there is no room."""
    budget = Account(4 * MIB)
    arena = Arena(16 * MIB, account=budget)
    blocks = [arena.allocate(MIB) for _ in range(4)]
    blocks[0].free()
    blocks[2].free()
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "_cheapest_place", lambda *_: pytest.fail("a place was looked for"))
        assert arena.allocate(2 * MIB) is None
    blocks[3].free()  # with its neighbour a page, which can be moved
    assert arena.allocate(2 * MIB) is not None


@pytest.mark.parametrize(("first", "second"), [(1.5, 1.5), (2, 1), (1.5, 0.5)])
def test_a_short_last_page_is_added_alone_and_behind_a_warm_end(first, second):
    budget = Account(3 * MIB)
    arena = Arena(3 * MIB, account=budget)  # a page of 2 MiB and one of 1 MiB
    held = arena.allocate(int(first * MIB))
    assert (budget.free_bytes, held.address) == (MIB, arena.address)
    behind = arena.allocate(int(second * MIB))
    assert behind.address == arena.address + held.nbytes
    rest = int((3 - first - second) * MIB)
    assert arena.allocate(rest + PAGE_BYTES) is None
    assert rest == 0 or arena.allocate(rest) is not None


def test_a_last_page_behind_a_cold_one_is_not_enough_for_more_than_its_own_length():
    budget = Account(3 * MIB)
    arena = Arena(5 * MIB, account=budget)  # pages of 2, 2 and 1 MiB
    first = arena.allocate(2 * MIB)
    assert arena.allocate(MIB + PAGE_BYTES) is None
    last = arena.allocate(MIB)
    assert last.address == arena.address + 4 * MIB
    assert first.state is last.state is BlockState.OUT


@pytest.fixture
def cannot_move(monkeypatch):
    """As on kernels before 5.7."""
    monkeypatch.setattr(Mapping, "move_page", lambda *_: False)


@pytest.mark.parametrize("means", ["moving", "exchange"])
def test_idle_pages_elsewhere_pay_for_new_ones(request, means):
    """Fragmentation costs a remapping, not a refusal."""
    if means == "exchange":
        request.getfixturevalue("cannot_move")
    budget = Account(8 * MIB)
    arena = Arena(32 * MIB, account=budget)
    blocks = [arena.allocate(2 * MIB) for _ in range(4)]
    blocks[0].free()
    blocks[2].free()
    assert budget.free_bytes == 0
    wide = arena.allocate(4 * MIB)
    assert wide is not None
    assert (budget.used_bytes, budget.peak_bytes) == (8 * MIB, 8 * MIB)
    assert resident_bytes(arena) == 8 * MIB
    assert arena.allocate(1) is None


def test_pages_of_two_lengths_are_exchanged_exactly():
    budget = Account(3 * MIB)
    arena = Arena(3 * MIB, account=budget)  # a page of 2 MiB and one of 1 MiB
    whole = arena.allocate(2 * MIB)
    whole.free()
    tail = arena.allocate(MIB, alignment=PAGE)
    assert (whole.address, tail.address) == (arena.address, arena.address)
    wide = arena.allocate(2 * MIB)
    assert wide.address == arena.address + MIB
    assert budget.used_bytes == 3 * MIB
    wide.free()
    tail.free()
    assert arena.trim() == 3 * MIB
    assert budget.used_bytes == 0


def can_move():
    trial = Mapping(2 * PAGE)
    trial.populate(0, PAGE)
    return trial.move_page(0, PAGE)


@pytest.mark.skipif(not can_move(), reason="this kernel does not move pages")
def test_idle_pages_elsewhere_are_moved_and_not_zeroed(monkeypatch):
    """New pages of zeros are what a first touch costs: fragmentation must not need any."""
    budget = Account(9 * MIB)
    arena = Arena(32 * MIB, account=budget)
    blocks = [arena.allocate(2 * MIB) for _ in range(4)]
    for value, block in enumerate(blocks):
        fill(block, value + 1)
    huge_before = "hg" in vm_flags(arena.address)
    blocks[0].free()
    blocks[2].free()
    populated = []
    monkeypatch.setattr(Mapping, "populate", lambda *args: bool(populated.append(args)) or True)
    wide = arena.allocate(4 * MIB)
    assert content(wide) == {1, 3}, "the very pages that were idle"
    assert not populated
    assert (content(blocks[1]), content(blocks[3])) == ({2}, {4})
    assert arena.touched_bytes == resident_bytes(arena) == budget.used_bytes == 8 * MIB
    for address in (arena.address, wide.address):  # where they were, and where they are
        flags = vm_flags(address)
        assert "dc" in flags
        assert ("hg" in flags) == huge_before
    fill(wide, 9)
    for block in (wide, blocks[1], blocks[3]):
        block.free()
    assert arena.trim() == 8 * MIB
    assert resident_bytes(arena) == budget.used_bytes == 0
    again = arena.allocate(8 * MIB)
    monkeypatch.undo()
    fill(again, 5)
    assert content(again) == {5}


@pytest.mark.skipif(not can_move(), reason="this kernel does not move pages")
def test_moved_pages_are_for_direct_transfers_as_any_other(tmp_path):
    """A page that was moved is written to and read from by address, as the engine does."""
    arena = Arena(16 * MIB, account=Account(8 * MIB))
    blocks = [arena.allocate(2 * MIB) for _ in range(4)]
    blocks[0].free()
    blocks[2].free()
    wide = arena.allocate(4 * MIB)
    fill(wide, 7)
    path = tmp_path / "file"
    path.write_bytes(ctypes.string_at(wide.address, wide.nbytes))
    fill(wide, 0)
    view = (ctypes.c_char * wide.nbytes).from_address(wide.address)
    with path.open("rb", buffering=0) as file:
        assert file.readinto(view) == wide.nbytes
    assert content(wide) == {7}


def test_an_arena_with_many_resident_pages_moves_nothing(monkeypatch):
    """Each moved page may be a mapping of its own, and a process may have only so many."""
    monkeypatch.setattr("penstock.store.arena._MAX_PAGES_TO_MOVE", 3)
    monkeypatch.setattr(Mapping, "move_page", lambda *_: pytest.fail("moved"))
    arena = Arena(16 * MIB, account=Account(8 * MIB))
    blocks = [arena.allocate(2 * MIB) for _ in range(4)]
    blocks[0].free()
    blocks[2].free()
    assert arena.allocate(4 * MIB) is not None
    assert resident_bytes(arena) == 8 * MIB


@pytest.mark.usefixtures("cannot_move")
def test_exchange_when_another_owner_is_quicker(monkeypatch):
    budget = Account(6 * MIB)
    arena = Arena(16 * MIB, account=budget)
    blocks = [arena.allocate(2 * MIB) for _ in range(2)]
    blocks[0].free()
    real = Account.try_take
    calls = []

    def quicker(self, nbytes, owner):
        calls.append(nbytes)
        if len(calls) == 2:
            assert real(self, 2 * MIB, "other")
        return real(self, nbytes, owner)

    monkeypatch.setattr(Account, "try_take", quicker)
    # two pages more than fit: one is free, one is idle, and the free one goes to the other owner
    assert arena.allocate(6 * MIB) is None
    assert arena.allocate(4 * MIB) is None
    monkeypatch.undo()
    assert budget.used_by("arena") == arena.touched_bytes == resident_bytes(arena)
    assert budget.used_bytes <= 6 * MIB


# -- giving back ---------------------------------------------------------------------------------


def test_trim_gives_back_whole_idle_pages_only(arena):
    first, second, third = (arena.allocate(3 * MIB) for _ in range(3))
    assert arena.touched_bytes == 10 * MIB
    second.free()  # [3, 6) MiB: one whole page and a half
    assert arena.trim() == 2 * MIB
    assert arena.trim() == 0
    assert (arena.touched_bytes, resident_bytes(arena)) == (8 * MIB, 8 * MIB)
    first.free()
    third.free()
    assert arena.trim(1) == 2 * MIB
    assert arena.trim(3 * MIB) == 4 * MIB
    assert arena.trim(0) == 0
    assert arena.trim() == 2 * MIB
    assert arena.trim(MIB) == 0


def test_trim_leaves_the_content_of_blocks(arena):
    blocks = [arena.allocate(MIB) for _ in range(12)]
    for index, block in enumerate(blocks):
        fill(block, index)
    for block in blocks[2:9]:
        block.free()
    assert arena.trim() > 0
    for index in (0, 1, 9, 10, 11):
        assert content(blocks[index]) == {index}


def test_a_waiter_is_told_when_a_block_returns():
    """No byte of the budget is released, yet the waiter's block may fit now."""
    budget = Account(2 * MIB)
    arena = Arena(2 * MIB, account=budget)
    block, got = arena.allocate(2 * MIB), []
    waiting = threading.Event()

    def wait():
        with budget.changed:
            waiting.set()
            assert budget.changed.wait(20)
        got.append(arena.allocate(2 * MIB))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    block.free()
    thread.join()
    assert got[0].nbytes == 2 * MIB


def test_a_block_is_given_up_once(arena):
    block = arena.allocate(4096)
    block.free()
    for action in (block.free, lambda: block.lend(0, 1)):
        with pytest.raises(ClosedError, match="already free"):
            action()
    other = arena.allocate(4096)
    assert other.address == block.address
    with pytest.raises(ClosedError):
        block.free()
    assert other.state is BlockState.OUT
    assert arena.used_bytes == 4096
    array = other.lend(0, 4096)
    for action in (other.free, lambda: other.lend(0, 1)):
        with pytest.raises(ClosedError, match="already lent"):
            action()
    assert arena.used_bytes == array.nbytes


# -- lending -------------------------------------------------------------------------------------


def test_a_lent_array_is_the_block(arena):
    block = arena.allocate(8192)
    fill(block, 7)
    array = block.lend(512, 1000)
    assert (array.ctypes.data, array.nbytes, array.dtype) == (block.address + 512, 1000, np.uint8)
    assert array.flags.writeable
    assert set(array) == {7}
    assert arena.used_bytes == 8192
    del array
    assert arena.used_bytes == 0
    assert block.state is BlockState.FREE


@pytest.mark.parametrize(("skew", "nbytes"), [(-1, 1), (0, 0), (0, 8193), (8192, 1), (1, 8192)])
def test_lending_outside_the_block(arena, skew, nbytes):
    block = arena.allocate(8192)
    with pytest.raises(ConfigError, match=r"do not lie in Block\(8192"):
        block.lend(skew, nbytes)
    block.free()


def test_views_keep_the_block(arena):
    array = arena.allocate(8192).lend(0, 8192)
    view = array[16:].view(np.float32)[4:].reshape(-1, 2)
    buffer = memoryview(array)
    del array
    gc.collect()
    assert arena.used_bytes == 8192
    del view
    assert arena.used_bytes == 8192
    del buffer
    assert arena.used_bytes == 0


def test_a_torch_storage_returns_the_block_when_it_dies(arena):
    tensor = torch.from_numpy(arena.allocate(MIB).lend(64, 4096)).view(torch.int64)
    storage, view = tensor.untyped_storage(), tensor[3:]
    address = arena.address + 64
    assert storage.data_ptr() == address
    del tensor
    assert arena.used_bytes == MIB
    del view
    assert arena.used_bytes == MIB
    del storage
    assert arena.used_bytes == 0


def test_a_block_returns_from_another_thread(arena):
    box = [arena.allocate(MIB).lend(0, MIB)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert arena.used_bytes == 0


def test_a_block_returns_while_our_locks_are_held(arena):
    """As when the garbage collector strikes inside a critical section, the arena's own included."""
    array, lock = arena.allocate(MIB).lend(0, MIB), Lock()
    with arena._lock, lock:
        del array
        assert arena._used_bytes == MIB
    assert arena.used_bytes == 0


def test_a_block_in_a_cycle_returns_by_the_collector(arena):
    class Node:
        pass

    node = Node()
    node.self, node.array = node, arena.allocate(MIB).lend(0, MIB)
    del node
    gc.collect()
    assert arena.used_bytes == 0


# -- the end -------------------------------------------------------------------------------------


def test_a_closed_arena_keeps_only_the_pages_of_the_blocks_that_are_left():
    account = Account(8 * HUGE_PAGE_BYTES)
    arena = Arena(8 * HUGE_PAGE_BYTES, account=account, owner="test")
    blocks = [arena.allocate(HUGE_PAGE_BYTES) for _ in range(8)]
    arena.close()
    while blocks:
        assert account.used_bytes == arena.touched_bytes == len(blocks) * HUGE_PAGE_BYTES
        blocks.pop().free()
    assert account.used_bytes == 0


def test_close_waits_for_the_last_block():
    budget = Account(8 * MIB)
    arena = Arena(8 * MIB, account=budget)
    block, array = arena.allocate(MIB), arena.allocate(MIB).lend(0, MIB)
    arena.close()
    arena.close()
    array[:] = 1
    assert budget.used_bytes == 2 * MIB
    for action in (lambda: arena.allocate(1), arena.pretouch):
        with pytest.raises(ClosedError, match="closed"):
            action()
    assert arena.trim() == 0
    block.free()
    assert budget.used_bytes == 2 * MIB
    address = arena.address
    del array
    assert (budget.used_bytes, arena.used_bytes, arena.touched_bytes) == (0, 0, 0)
    assert not is_mapped(address)


def test_a_dropped_arena_lives_as_long_as_its_blocks():
    arena = Arena(4 * MIB)
    alive, address = weakref.ref(arena), arena.address
    array = arena.allocate(MIB).lend(0, MIB)
    del arena
    gc.collect()
    array[:] = 5
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None
    assert not is_mapped(address)


def test_pretouch_makes_everything_resident_for_good():
    budget = Account(6 * MIB)
    arena = Arena(5 * MIB, account=budget)
    block = arena.allocate(4096)
    fill(block, 9)
    assert arena.pretouch()
    assert arena.touched_bytes == budget.used_bytes == resident_bytes(arena) == 5 * MIB
    assert content(block) == {9}
    block.free()
    assert arena.trim() == 0
    assert arena.allocate(5 * MIB).address == arena.address


def test_pretouch_beyond_the_budget_changes_nothing():
    budget = Account(6 * MIB)
    arena = Arena(8 * MIB, account=budget)
    assert budget.try_take(2 * MIB, "other")
    assert not arena.pretouch()
    assert (arena.touched_bytes, resident_bytes(arena)) == (0, 0)
    arena.allocate(2 * MIB).free()
    assert arena.trim() == 2 * MIB


@pytest.mark.parametrize("nbytes", [1, 4096, MIB + 5, 6 * MIB])
def test_kernels_without_populate(monkeypatch, nbytes):
    """The fallback writes to the new block alone: its neighbours in the page may be in use."""
    monkeypatch.setattr(Mapping, "populate", lambda *_: False)
    arena = Arena(8 * MIB)
    neighbour = arena.allocate(4096)
    fill(neighbour, 3)
    block = arena.allocate(nbytes)
    start = block.address - arena.address
    pages = -(-(start + nbytes) // PAGE_BYTES) - start // PAGE_BYTES
    assert resident_bytes(arena) >= pages * PAGE_BYTES
    assert content(neighbour) == {3}
    fill(block, 4)
    assert arena.pretouch()
    assert resident_bytes(arena) == arena.touched_bytes == 8 * MIB
    assert (content(neighbour), content(block)) == ({3}, {4})


def test_a_forked_child_neither_has_nor_harms_it():
    """TRAPS.md 24: not inherited; finalizers in the child touch nothing and do not hang."""
    arena = Arena(4 * MIB)
    array = [arena.allocate(MIB).lend(0, MIB)]
    block = arena.allocate(MIB)

    def child():
        assert not is_mapped(arena.address)
        for action in (lambda: arena.allocate(1), arena.pretouch, arena.trim):
            with pytest.raises(ClosedError, match="was forked"):
                action()
        arena._lock._lock.acquire()  # as if a thread had held it when the process was forked
        array.clear()
        block.free()
        with pytest.raises(ClosedError):
            block.lend(0, 1)
        arena.close()
        unmapped = []
        mapping._libc = SimpleNamespace(munmap=lambda *where: unmapped.append(where))
        arena._mapping.unmap()
        assert not unmapped  # something else may lie at that address by now

    run_in_fork(child)
    assert arena.used_bytes == 2 * MIB
    array[0][:] = 1
    fill(block, 1)


def test_steady_state_has_no_page_faults(arena):
    sizes = [MIB, 3 * MIB, 4096, 100_000, 2 * MIB]

    def step():
        arrays = [arena.allocate(size).lend(0, size) for size in sizes]
        for array in arrays:
            array[:] = 1

    def faults(steps):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    step()
    touched = arena.touched_bytes
    # The rest of the process faults now and then (after a fork, on its own heap); an arena that
    # gave its pages back, or got others, would at every step.
    assert any(faults(20) <= 1 for _ in range(200))
    assert arena.touched_bytes == touched


def test_many_threads(arena):
    """Blocks of different threads never overlap, and everything comes back."""
    errors = []

    def work(which):
        rng = np.random.default_rng(which)
        held = []
        for _ in range(150):
            block = arena.allocate(int(rng.integers(1, 200_000)), alignment=64)
            if block is not None:
                fill(block, which)
                held.append(block)
            if held and (block is None or rng.random() < 0.5):
                victim = held.pop(int(rng.integers(len(held))))
                if content(victim) != {which}:
                    errors.append(which)
                victim.free()
            if rng.random() < 0.05:
                arena.trim(PAGE)
        for block in held:
            block.free()

    threads = [threading.Thread(target=work, args=(which,)) for which in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert arena.used_bytes == 0
    resident = resident_bytes(arena)
    assert resident == arena.touched_bytes
    assert arena.trim() == resident
    assert resident_bytes(arena) == arena.touched_bytes == 0


# -- a state machine -----------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 20_000),
    st.integers(PAGE - 5000, PAGE + 5000),
    st.integers(1, 6 * MIB),
)


class ArenaMachine(RuleBasedStateMachine):
    """Every block is filled with its own number, which must stay; the budget must never break."""

    def __init__(self):
        super().__init__()
        self.budget = Account(9 * MIB + 4096 * 3 + 7)
        self.arena = Arena(13 * MIB, account=self.budget)
        self.blocks = {}
        self.lent = {}
        self.next = 1

    def teardown(self):
        self.lent.clear()
        for block in self.blocks.values():
            block.free()
        self.arena.close()
        assert self.budget.used_by("arena") == 0

    @rule(nbytes=SIZES, alignment=st.sampled_from([1, 512, 4096, 65536]))
    def allocate(self, nbytes, alignment):
        warm = self.arena._warm.largest_free_bytes
        block = self.arena.allocate(nbytes, alignment=alignment)
        if block is None:
            assert warm < nbytes + alignment
            return
        assert block.address % alignment == 0
        fill(block, self.next % 256)
        self.blocks[self.next] = block
        self.next += 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data):
        number = data.draw(st.sampled_from(sorted(self.blocks)))
        assert content(self.blocks[number]) == {number % 256}
        self.blocks.pop(number).free()

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def lend(self, data):
        number = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks.pop(number)
        self.lent[number] = (block, block.lend(0, block.nbytes))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def drop(self, data):
        number = data.draw(st.sampled_from(sorted(self.lent)))
        assert set(self.lent.pop(number)[1]) == {number % 256}

    @rule(nbytes=st.one_of(st.none(), st.integers(0, 8 * MIB)))
    def trim(self, nbytes):
        before = self.arena.touched_bytes
        released = self.arena.trim(nbytes)
        assert self.arena.touched_bytes == before - released

    @rule(nbytes=st.integers(1, 4 * MIB))
    def other_takes(self, nbytes):
        self.budget.try_take(nbytes, "other")

    @precondition(lambda self: self.budget.used_by("other"))
    @rule()
    def other_gives(self):
        self.budget.free(self.budget.used_by("other"), "other")

    @invariant()
    def accounts_agree(self):
        arena, held = self.arena, [*self.blocks.values(), *(b for b, _ in self.lent.values())]
        assert arena.used_bytes == sum(block.nbytes for block in held)
        assert arena.used_bytes <= arena.touched_bytes == self.budget.used_by("arena")
        assert self.budget.peak_bytes <= self.budget.limit_bytes
        assert resident_bytes(arena) == arena.touched_bytes
        assert arena._space.free_bytes == arena.capacity_bytes - arena.used_bytes
        assert arena._warm.free_bytes == arena.touched_bytes - arena.used_bytes
        ranges = sorted((block.address, block.address + block.nbytes) for block in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=tries(25), stateful_step_count=30, deadline=None)


# -- the process's account -----------------------------------------------------------------------


def test_without_an_account_it_is_charged_to_the_process_until_it_is_closed_or_dropped():
    memory = host_account()
    before = memory.used_bytes
    arena = Arena(8 * MIB, owner="an arena")
    array = arena.allocate(3 * MIB).lend(0, 3 * MIB)
    assert memory.holdings()["an arena"].nbytes == 4 * MIB
    arena.close()
    assert memory.used_bytes == before + 4 * MIB
    del array
    assert memory.used_bytes == before
    dropped = Arena(8 * MIB, owner="an arena")
    dropped.allocate(MIB)
    assert memory.used_bytes == before + 2 * MIB
    del dropped
    gc.collect()
    assert memory.used_bytes == before


def test_a_forced_block_exceeds_the_account_but_not_the_capacity():
    account = Account(4 * MIB)
    arena = Arena(16 * MIB, account=account.child("arena"))
    held = arena.allocate(3 * MIB)
    assert arena.allocate(3 * MIB) is None
    more = arena.allocate(3 * MIB, force=True)
    assert account.used_bytes == arena.touched_bytes == 6 * MIB
    assert arena.allocate(12 * MIB, force=True) is None
    for block in (held, more):
        block.free()
    arena.close()
    assert account.used_bytes == 0


def test_a_forced_block_takes_idle_pages_before_it_exceeds_the_account():
    account = Account(4 * MIB)
    arena = Arena(16 * MIB, account=account.child("arena"))
    low, high = arena.allocate(2 * MIB), arena.allocate(2 * MIB)
    low.free()
    arena.allocate(4 * MIB, force=True)
    assert account.used_bytes == 6 * MIB
    high.free()


def test_a_lone_block_is_gone_when_it_is_freed():
    memory = host_account()
    before = memory.used_bytes
    block = lone_block(5000, owner="alone")
    assert memory.used_bytes == before + 8192
    block.free()
    assert memory.used_bytes == before
    assert not is_mapped(block.address)
