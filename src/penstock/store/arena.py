"""Reusable memory for direct I/O in 2 MiB pages, which stay resident between uses.

Reads into memory of 4 KiB pages reach only a third of the device's bandwidth, whatever the engine.
Memory here is mapped once, becomes resident at its first use, within an account, and its blocks become
NumPy arrays (thus torch storages) without a copy.

[Note: arena accounting]
    The unit is a *page* of 2 MiB. A page is charged to the account before its first touch and uncharged
    after it was freed, so the charge is never below the resident memory. The last page is shorter if the
    capacity is no multiple of 2 MiB; it is charged at its own length, and the kernel is told to use no
    huge page for it. ``touched_bytes`` are charged, ``used_bytes`` are held by callers; the difference
    is idle, and can be used without a page fault.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from penstock.core.config import UNLIMITED
from penstock.core.errors import ClosedError, ConfigError
from penstock.core.units import format_bytes, round_down, round_up
from penstock.io import numa
from penstock.io.extents import ExtentAllocator
from penstock.io.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping
from penstock.store.account import Account
from penstock.store.pool import Block, Pool

_LATEST_WEIGHT: Final = 0.25
"""Weight of the latest sample in the running mean of the time of a first touch."""
_MAX_PAGES_TO_MOVE: Final = 8192
"""Most resident pages with which pages are moved, because each may then become a separate mapping."""


class Arena(Pool):
    """Pool of one piece of address space, whose pages become resident as they are first used.

    Attributes:
        address: Its first address, a multiple of 2 MiB.
        capacity_bytes: Its size: the requested capacity, rounded down to whole pages of the system; if
            the account's limit is less than that, further down to whole 2 MiB pages plus the odd rest of
            the limit, so that the limit can be used to the last page.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        account: Account | None = None,
        owner: str = "arena",
        node: int | None = None,
    ) -> None:
        """Reserve address space; nothing is resident and nothing is charged yet.

        Args:
            capacity_bytes: Largest size.
            account: Account that its resident pages are charged to; None: a child of the process's.
            owner: Name of its charges there.
            node: Preferred NUMA node of its memory; None: the system decides.

        Raises:
            ConfigError: The capacity, or the account's limit, is less than one page of the system.
        """
        super().__init__(account, owner)
        self.capacity_bytes = _usable(capacity_bytes, self.account)
        self._mapping = Mapping(self.capacity_bytes)
        self.address = self._mapping.address
        if node is not None:
            numa.prefer(self.address, self.capacity_bytes, node)
        self._closed = False
        self._pretouched = False
        self._touched = bytearray(-(-self.capacity_bytes // HUGE_PAGE_BYTES))
        self._space = ExtentAllocator(self.capacity_bytes)  # free ranges, touched or not
        self._warm = ExtentAllocator(self.capacity_bytes)  # free ranges that are touched
        self._warm.take(0, self.capacity_bytes)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, of {format_bytes(self.capacity_bytes)})"

    def charge_bytes(self, nbytes: int) -> int:
        """Return the most that a block may charge to the account: whole pages, if none is idle."""
        return round_up(nbytes, HUGE_PAGE_BYTES)

    def _allocate(self, nbytes: int, alignment: int, force: bool) -> Block | None:
        """Prefer touched memory; only if none fits in one piece, add pages, as few as possible.

        These are idle ones from elsewhere, and new ones. If the account refuses the new ones, idle pages
        are freed in exchange.
        """
        with self._lock:
            self._check_open()
            cost = 0
            offset = self._warm.allocate(nbytes, alignment)
            if offset is None:
                if not (force or self._may_grow(nbytes)):
                    return None
                offset = self._cheapest_place(nbytes, alignment)
                if offset is None:
                    return None
                grown = _pages(offset, nbytes)
                cost = self._cold_bytes(grown)
                if not (force or self._can_add(cost, grown)):
                    return None
                cost -= self._move_pages(grown)
                if not self._add_pages(grown, cost, force=force):
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
            False, with nothing changed, if the account refuses.
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
        """Free idle whole pages, and uncharge them; the highest ones first. See ``Pool.trim``."""
        self._check_process()
        with self._lock:
            if self._closed or self._pretouched:
                return 0
            released = self._free_pages(self._touched_bytes if nbytes is None else nbytes, range(0))
            if released:
                self.account.free(released, self.owner)
        return released

    def close(self) -> None:
        """Unmap, at once or when the last block is freed. Idempotent; harmless in a forked child."""
        if self._guard.in_child:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            charged = 0 if self._used_bytes else self._unmap()
        if charged:
            self.account.free(charged, self.owner)

    # -- for blocks -------------------------------------------------------------------------------

    def _release(self, block: Block) -> int:
        self._space.free(block.place, block.nbytes)
        self._warm.free(block.place, block.nbytes)
        if not self._closed:
            return 0
        if not self._used_bytes:
            return self._unmap()
        # nobody will use idle pages again
        return 0 if self._pretouched else self._free_pages(self._touched_bytes, range(0))

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

    def _add_pages(self, pages: range, cost: int, *, force: bool = False) -> bool:
        """Charge the untouched ones of ``pages`` and mark them touched; return False if refused."""
        if not self._charge(cost, pages):
            if not force:
                return False
            self.account.force(cost, self.owner)
        for page in pages:
            if not self._touched[page]:
                self._touched[page] = 1
                self._warm.free(page * HUGE_PAGE_BYTES, self._page_bytes(page))
        self._touched_bytes += cost
        return True

    def _may_grow(self, nbytes: int) -> bool:
        """Return False if no page can be added for a block, wherever that is.

        To look for a place takes long, and who brings what is needed next asks again and again.
        """
        left = self.account.free_bytes
        if left >= HUGE_PAGE_BYTES:  # often; and to count what is idle takes long, too
            return True
        left += self._idle_bytes(range(0))
        if left >= HUGE_PAGE_BYTES:
            return True
        last, rest = self._touched[-2:], self._page_bytes(len(self._touched) - 1)
        # the last page alone, which may be shorter, and the end of the one before it
        return left >= rest and not last[-1] and (nbytes <= rest or last[0] == 1)

    def _can_add(self, cost: int, wanted: range) -> bool:
        free = self.account.free_bytes
        return cost <= free or cost <= free + self._idle_bytes(wanted)

    def _charge(self, cost: int, wanted: range) -> bool:
        account = self.account
        if not cost or account.try_take(cost, self.owner):
            return True
        shortage = cost - account.free_bytes
        if self._pretouched or self._idle_bytes(wanted) < shortage:
            return False
        released = self._free_pages(shortage, wanted)
        if released >= cost:  # more was freed than is needed: pages have two lengths
            account.free(released - cost, self.owner)
            return True
        if account.try_take(cost - released, self.owner):
            return True
        account.free(released, self.owner)  # another owner was quicker
        return False

    def _move_pages(self, wanted: range) -> int:
        """Move idle pages to untouched ones of ``wanted``, and return the bytes moved."""
        if self._touched_bytes > _MAX_PAGES_TO_MOVE * HUGE_PAGE_BYTES:
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

    def _unmap(self) -> int:
        """Unmap it; return the bytes to be freed in the account."""
        self._mapping.unmap()
        touched, self._touched_bytes = self._touched_bytes, 0
        return touched

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")


def lone_block(nbytes: int, *, owner: str) -> Block:
    """Return a block with an arena of its own, for what must have memory at once: it is forced.

    Args:
        nbytes: Length of the block.
        owner: Name of its charge in the process's account.

    Raises:
        TransferError: There is no address space (op ``"map"``).
    """
    arena = Arena(round_up(nbytes, PAGE_BYTES), owner=owner)
    block = arena.allocate(nbytes, force=True)
    assert block is not None, "a new arena has no room for its only block"
    arena.close()  # as soon as the block is freed
    return block


def _usable(capacity_bytes: int, account: Account) -> int:
    usable = capacity_bytes
    if account.limit_bytes < capacity_bytes:
        usable -= (capacity_bytes - account.limit_bytes) % HUGE_PAGE_BYTES
    usable = round_down(usable, PAGE_BYTES)
    if usable <= 0:
        limited = account.limit_bytes < UNLIMITED
        limit = format_bytes(account.limit_bytes) if limited else "none"
        raise ConfigError(
            f"an arena of {capacity_bytes} bytes (budget: {limit}) does not hold one page;"
            f" give it at least {PAGE_BYTES} bytes"
        )
    return usable


def _pages(offset: int, nbytes: int) -> range:
    """Return the 2 MiB pages that ``[offset, offset + nbytes)`` lies in."""
    return range(offset // HUGE_PAGE_BYTES, -(-(offset + nbytes) // HUGE_PAGE_BYTES))
