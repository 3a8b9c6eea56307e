"""Reusable memory for direct I/O in 2 MiB pages, which stay resident between uses.

Reads into memory of 4 KiB pages reach only a third of the device's bandwidth, whatever the engine.
Memory here is mapped once, becomes resident at its first use, under a budget, and its blocks become
NumPy arrays (thus torch storages) without a copy.

[Note: arena accounting]
    The unit is a *page* of 2 MiB. A page is charged to the budget before its first touch and uncharged
    after it was freed, so the charge is never below the resident memory. The last page is shorter if the
    capacity is no multiple of 2 MiB; it is charged at its own length, and the kernel is told to use no
    huge page for it. ``touched_bytes`` are charged, ``used_bytes`` are held by callers; the difference
    is idle, and can be used without a page fault.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ClosedError, ConfigError
from penstock.core.locks import Lock, defer
from penstock.core.process import fork_guard
from penstock.core.units import format_bytes, round_down, round_up
from penstock.io import numa
from penstock.io.extents import ExtentAllocator
from penstock.io.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping
from penstock.store.account import Account

_LATEST_WEIGHT: Final = 0.25
"""Weight of the latest sample in the running mean of the time of a first touch."""
_MAX_PAGES_TO_MOVE: Final = 8192
"""Largest arena, in pages, in which pages are moved, because each may then become a separate mapping."""


class BlockState(enum.Enum):
    """Ownership of a block's memory."""

    OUT = "out"
    """Owned by its holder, until ``free`` or ``lend``."""
    LENT = "lent"
    """Owned by an array; it is freed when the array dies."""
    FREE = "free"
    """Not owned: the memory may already belong to another block."""


class Block:
    """Contiguous part of an arena. Its holder must ``free`` it, or ``lend`` it, once.

    A block that is dropped without either stays allocated: a transfer may still use its address.

    Attributes:
        address: Its first address.
        nbytes: Its length.
        state: Ownership of its memory.
    """

    __slots__ = ("_arena", "_offset", "address", "nbytes", "state")

    def __init__(self, arena: Arena, offset: int, address: int, nbytes: int) -> None:
        """Create a block; only for the arena."""
        self._arena = arena
        self._offset = offset
        self.address = address
        self.nbytes = nbytes
        self.state = BlockState.OUT

    def __repr__(self) -> str:
        return f"Block({self.nbytes} bytes at {self.address:#x}, {self.state.value})"

    def free(self) -> None:
        """Free the memory. Raises ClosedError if it was freed or lent before."""
        self._arena._free_block(self, BlockState.OUT)

    def lend(self, skew: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the bytes ``[skew, skew + nbytes)`` as an array whose death frees the block. No copy.

        ``torch.from_numpy`` keeps exactly this array alive, so a storage made from it frees the block
        when the storage dies, in whichever thread that is.

        Raises:
            ConfigError: The range does not lie in the block.
            ClosedError: The block was freed or lent before.
        """
        if skew < 0 or nbytes <= 0 or skew + nbytes > self.nbytes:
            raise ConfigError(f"{nbytes} bytes at {skew} do not lie in {self!r}")
        array = self._arena._lend(self, self._offset + skew, nbytes)
        weakref.finalize(array, defer, self._free_lent).atexit = False
        return array

    def _free_lent(self) -> None:
        self._arena._free_block(self, BlockState.LENT)


class Arena:
    """Reusable memory for transfers, under a byte budget. Thread-safe; not inherited by fork.

    Attributes:
        address: Its first address, a multiple of 2 MiB.
        capacity_bytes: Its size: the requested capacity, rounded down to whole pages of the system; if
            the budget is less than that, further down to whole 2 MiB pages plus the odd rest of the
            budget, so that the budget can be used to the last page.
        owner: Name of its charges in the budget.
        touch_ns_per_byte: Running mean of the time to make a byte resident.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        budget: Account | None = None,
        owner: str = "arena",
        node: int | None = None,
    ) -> None:
        """Reserve address space; nothing is resident and nothing is charged yet.

        Args:
            capacity_bytes: Largest size.
            budget: The account that its resident pages are charged to; None: not charged.
            owner: Name of its charges in the budget.
            node: Preferred NUMA node of its memory; None: the system decides.

        Raises:
            ConfigError: The capacity, or the budget, is less than one page of the system.
        """
        self.capacity_bytes = _usable(capacity_bytes, budget)
        self.owner = owner
        self.touch_ns_per_byte = 0.0
        self._budget = budget
        self._mapping = Mapping(self.capacity_bytes)
        self.address = self._mapping.address
        if node is not None:
            numa.prefer(self.address, self.capacity_bytes, node)
        self._lock = Lock()
        self._guard = fork_guard()
        self._closed = False
        self._pretouched = False
        self._used_bytes = 0
        self._touched_bytes = 0
        self._touched = bytearray(-(-self.capacity_bytes // HUGE_PAGE_BYTES))
        self._space = ExtentAllocator(self.capacity_bytes)  # free ranges, touched or not
        self._warm = ExtentAllocator(self.capacity_bytes)  # free ranges that are touched
        self._warm.take(0, self.capacity_bytes)

    def __repr__(self) -> str:
        sizes = (self._used_bytes, self._touched_bytes, self.capacity_bytes)
        used, resident, capacity = map(format_bytes, sizes)
        return f"Arena({self.owner}: {used} used, {resident} resident, of {capacity})"

    @property
    def used_bytes(self) -> int:
        """Bytes that blocks hold now."""
        return self._used_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes that are resident, and charged to the budget, now."""
        return self._touched_bytes

    @staticmethod
    def charge_bytes(nbytes: int) -> int:
        """Return the most that a block may charge to the budget: whole pages, if none is idle."""
        return round_up(nbytes, HUGE_PAGE_BYTES)

    def allocate(self, nbytes: int, *, alignment: int = 4096) -> Block | None:
        """Allocate ``nbytes`` of resident memory, contents undefined.

        Touched memory is preferred; only if none fits in one piece, pages are added, as few as
        possible: idle ones from elsewhere, and new ones. If the budget refuses these, idle pages are
        freed in exchange.

        Returns:
            The block, or None if it does not fit the capacity, or the budget, now. To wait, wait on
            ``budget.changed``, which is notified when a block is freed; use a timeout, since one may be
            freed between the refusal and the wait, and never call this while holding
            ``budget.changed``.

        Raises:
            ConfigError: ``nbytes`` is not positive, or ``alignment`` is no power of two up to 2 MiB.
            ClosedError: The arena is closed, or this process was forked from its maker.
        """
        if nbytes <= 0:
            raise ConfigError(
                f"a block of {nbytes} bytes cannot be allocated from {self!r}; it must be positive"
            )
        if alignment <= 0 or HUGE_PAGE_BYTES % alignment:
            raise ConfigError(f"alignment {alignment} is not a power of two up to 2 MiB")
        self._check_process()
        with self._lock:
            self._check_open()
            cost = 0
            offset = self._warm.allocate(nbytes, alignment)
            if offset is None:
                offset = self._cheapest_place(nbytes, alignment)
                if offset is None:
                    return None
                grown = _pages(offset, nbytes)
                cost = self._cold_bytes(grown)
                if not self._can_add(cost, grown):
                    return None
                cost -= self._move_pages(grown)
                if not self._add_pages(grown, cost):
                    return None
                self._warm.take(offset, nbytes)
            self._space.take(offset, nbytes)
            self._used_bytes += nbytes
        if cost:  # without the lock
            start_ns = time.perf_counter_ns()
            self._touch(grown, offset, nbytes)
            taken = (time.perf_counter_ns() - start_ns) / cost
            self.touch_ns_per_byte += (taken - self.touch_ns_per_byte) * _LATEST_WEIGHT
        return Block(self, offset, self.address + offset, nbytes)

    def pretouch(self) -> bool:
        """Make all of it resident for good, so that it can be registered with a device driver.

        Returns:
            False, with nothing changed, if the budget refuses.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            everything = range(len(self._touched))
            if not self._add_pages(everything, self._cold_bytes(everything)):
                return False
            self._pretouched = True
        if not self._mapping.populate(0, self.capacity_bytes):
            self._touch_idle()
        return True

    def undo_pretouch(self) -> int:
        """Free idle pages, allow ``trim`` to do so from now on, and return the bytes freed."""
        self._check_process()
        with self._lock:
            self._pretouched = False
        return self.trim()

    def trim(self, nbytes: int | None = None) -> int:
        """Free idle whole pages, and uncharge them from the budget; the highest ones first.

        Args:
            nbytes: Bytes to free; None for all that are idle.

        Returns:
            Bytes freed: up to a page more than ``nbytes``, or less if less is idle.
        """
        self._check_process()
        with self._lock:
            if self._closed or self._pretouched:
                return 0
            released = self._free_pages(self._touched_bytes if nbytes is None else nbytes, range(0))
            if released and self._budget is not None:
                self._budget.free(released, self.owner)
        return released

    def close(self) -> None:
        """Unmap, at once or when the last block is freed. Idempotent; harmless in a forked child."""
        if self._guard.in_child:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._used_bytes:
                self._unmap()

    # -- for blocks -------------------------------------------------------------------------------

    def _lend(self, block: Block, offset: int, nbytes: int) -> NDArray[np.uint8]:
        self._check_process()
        with self._lock:
            _check_state(block, BlockState.OUT)
            block.state = BlockState.LENT
        return self._mapping.array(offset, nbytes)

    def _free_block(self, block: Block, expected: BlockState) -> None:
        if self._guard.in_child:
            return  # the memory is the parent's, and another thread may have held the lock
        with self._lock:
            _check_state(block, expected)
            block.state = BlockState.FREE
            self._used_bytes -= block.nbytes
            self._space.free(block._offset, block.nbytes)
            self._warm.free(block._offset, block.nbytes)
            if self._closed and not self._used_bytes:
                self._unmap()
        if self._budget is not None:
            with self._budget.changed:  # the budget is unchanged, but a waiter's block may fit now
                self._budget.changed.notify_all()

    # -- pages ------------------------------------------------------------------------------------

    def _cheapest_place(self, nbytes: int, alignment: int) -> int | None:
        """Return the lowest offset at which ``nbytes`` fit with the fewest new pages.

        Slide an offset along free space: its cost only falls when its start passes into touched memory,
        and only rises when its end leaves it. So only such offsets need to be tried.
        """
        best: tuple[int, int] | None = None
        for low, high in self._space.extents():
            if high - low < nbytes:
                continue
            for place in self._candidates(low, high, nbytes, alignment):
                cost = self._cold_bytes(_pages(place, nbytes))
                if best is None or (cost, place) < best:
                    best = (cost, place)
        return None if best is None else best[1]

    def _candidates(self, low: int, high: int, nbytes: int, alignment: int) -> Iterator[int]:
        warm = (edge for extent in self._warm.extents(low, high) for edge in extent)
        for edge in (low, *warm, high):
            for place in (round_up(edge, alignment), round_down(edge - nbytes, alignment)):
                if low <= place and place + nbytes <= high:
                    yield place

    def _add_pages(self, pages: range, cost: int) -> bool:
        """Charge the untouched ones of ``pages`` and mark them touched; return False if refused."""
        if not self._charge(cost, pages):
            return False
        for page in pages:
            if not self._touched[page]:
                self._touched[page] = 1
                self._warm.free(page * HUGE_PAGE_BYTES, self._page_bytes(page))
        self._touched_bytes += cost
        return True

    def _can_add(self, cost: int, wanted: range) -> bool:
        budget = self._budget
        return budget is None or cost <= budget.free_bytes + self._idle_bytes(wanted)

    def _charge(self, cost: int, wanted: range) -> bool:
        budget = self._budget
        if budget is None or not cost or budget.try_take(cost, self.owner):
            return True
        shortage = cost - budget.free_bytes
        if self._pretouched or self._idle_bytes(wanted) < shortage:
            return False
        released = self._free_pages(shortage, wanted)
        if released >= cost:  # more was freed than is needed: pages have two lengths
            budget.free(released - cost, self.owner)
            return True
        if budget.try_take(cost - released, self.owner):
            return True
        budget.free(released, self.owner)  # another owner was quicker
        return False

    def _move_pages(self, wanted: range) -> int:
        """Move idle pages to untouched ones of ``wanted``, and return the bytes moved."""
        if len(self._touched) > _MAX_PAGES_TO_MOVE:
            return 0
        idle = [p for p in self._idle_pages(wanted) if self._page_bytes(p) == HUGE_PAGE_BYTES]
        moved = 0
        for target in wanted:
            if self._touched[target] or self._page_bytes(target) < HUGE_PAGE_BYTES:
                continue
            if not idle:
                break
            source = idle.pop()
            if not self._mapping.move_page(source * HUGE_PAGE_BYTES, target * HUGE_PAGE_BYTES):
                break
            self._warm.take(source * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
            self._warm.free(target * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
            self._touched[source], self._touched[target] = 0, 1
            moved += HUGE_PAGE_BYTES
        return moved

    def _free_pages(self, wanted_bytes: int, spare: range) -> int:
        """Free idle pages outside ``spare`` until it is enough, and return the bytes freed."""
        released = 0
        for page in [*self._idle_pages(spare)][::-1]:
            if released >= wanted_bytes:
                break
            nbytes = self._page_bytes(page)
            if self._mapping.free(page * HUGE_PAGE_BYTES, nbytes):
                self._warm.take(page * HUGE_PAGE_BYTES, nbytes)
                self._touched[page] = 0
                self._touched_bytes -= nbytes
                released += nbytes
        return released

    def _idle_pages(self, spare: range) -> Iterator[int]:
        for start, end in self._warm.extents():
            last = len(self._touched) if end == self.capacity_bytes else end // HUGE_PAGE_BYTES
            for page in range(-(-start // HUGE_PAGE_BYTES), last):
                if page not in spare:
                    yield page

    def _idle_bytes(self, spare: range) -> int:
        return sum(map(self._page_bytes, self._idle_pages(spare)))

    def _page_bytes(self, page: int) -> int:
        return min(HUGE_PAGE_BYTES, self.capacity_bytes - page * HUGE_PAGE_BYTES)

    def _cold_bytes(self, pages: range) -> int:
        cold = self._touched.count(0, pages.start, pages.stop) * HUGE_PAGE_BYTES
        last = len(self._touched) - 1
        if last in pages and not self._touched[last]:
            cold -= HUGE_PAGE_BYTES - self._page_bytes(last)
        return cold

    def _touch(self, pages: range, offset: int, nbytes: int) -> None:
        """Make a new block resident. Without the lock, because it takes 0.2 ms per page.

        Neighbours in the same pages may be in use, so only the block itself is written to.
        """
        start = pages.start * HUGE_PAGE_BYTES
        end = min(pages.stop * HUGE_PAGE_BYTES, self.capacity_bytes)
        if not self._mapping.populate(start, end - start):
            memory = self._mapping.array(offset, nbytes)
            memory[::PAGE_BYTES] = 0
            memory[-1] = 0

    def _touch_idle(self) -> None:
        with self._lock:
            for start, end in self._warm.extents():
                self._mapping.array(start, end - start)[::PAGE_BYTES] = 0

    def _unmap(self) -> None:
        self._mapping.unmap()
        if self._budget is not None and self._touched_bytes:
            self._budget.free(self._touched_bytes, self.owner)
        self._touched_bytes = 0

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")

    def _check_process(self) -> None:
        if self._guard.in_child:
            raise self._guard.error(repr(self), "make one here")


def _usable(capacity_bytes: int, budget: Account | None) -> int:
    usable = capacity_bytes
    if budget is not None and budget.limit_bytes < capacity_bytes:
        usable -= (capacity_bytes - budget.limit_bytes) % HUGE_PAGE_BYTES
    usable = round_down(usable, PAGE_BYTES)
    if usable <= 0:
        limit = "none" if budget is None else format_bytes(budget.limit_bytes)
        raise ConfigError(
            f"an arena of {capacity_bytes} bytes (budget: {limit}) does not hold one page;"
            f" give it at least {PAGE_BYTES} bytes"
        )
    return usable


def _pages(offset: int, nbytes: int) -> range:
    """Return the 2 MiB pages that ``[offset, offset + nbytes)`` lies in."""
    return range(offset // HUGE_PAGE_BYTES, -(-(offset + nbytes) // HUGE_PAGE_BYTES))


def _check_state(block: Block, expected: BlockState) -> None:
    if block.state is not expected:
        raise ClosedError(
            f"{block!r} was already {block.state.value}; free or lend a block only once"
        )
