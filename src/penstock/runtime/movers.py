"""The seam between a device's storages and the tiers' host memory.

The executor decides what moves and when; a mover knows how, for one kind of device. All times at
which memory may be touched or let go are carried by transfers:

1. ``write(storage, ...)`` begins to spill. When ``ticket.written`` settles without an error the source
   is no longer needed; with an error the source is still the only copy.
2. ``allocate(ticket)`` takes device memory for the way back, under the budget, or says ``None``.
3. ``read(ticket, target)`` fills it. When the transfer settles, ``finish(target)`` makes it a storage;
   in whichever thread that is. Where a device runs behind the interpreter, its copy may still be under
   way then: whoever works with a storage, saved or restored, first says ``use`` in its own thread.
4. ``discard(ticket)`` when no handle is left; ``drop(target)`` if a target is given up unread.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from penstock.core.units import KIB
from penstock.io.engine import Priority, Transfer
from penstock.io.mapping import HUGE_PAGE_BYTES
from penstock.runtime.storage import Encoding
from penstock.store.account import Account
from penstock.store.arena import Arena, lone_block
from penstock.store.base import Tier
from penstock.store.heap import Heap, heap_is_better
from penstock.store.pool import Block, Pool

RESTORED = "restored"
"""Owner, in the device budget, of memory for restored storages."""
BEYOND_BUDGET: Final = "saved tensors"
"""Owner, in the process's account, of what is restored although the device budget is full."""
CACHE_LINE_BYTES: Final = 64
"""BLAS rounds otherwise where a vector begins elsewhere modulo this."""


PAGE_SLACK_SHARE: Final = 8
"""The part of a small budget that is left for pages that are not full."""
HEAP_SLACK_BYTES: Final = 512 * KIB
"""The same where they come back into the heap: the granules at the ends of some forty of them."""


def page_slack_bytes(device_bytes: int) -> int:
    """Return the part of the budget that restored storages take beside their own bytes.

    In an arena they take whole pages. They are taken and given back in order, so that but the first and
    the last page of what is there are full. From the heap they take the few granules that their ends lie
    in ([Note: heap or arena]). A plan that fills the budget to the last byte would have kept storages
    evicted for these.
    """
    most = HEAP_SLACK_BYTES if heap_is_better() else 2 * HUGE_PAGE_BYTES
    return min(most, device_bytes // PAGE_SLACK_SHARE)


def memory_for(budget: Account, owner: str) -> Pool:
    """Return a pool for host memory that comes back from tiers, in an arena or in the heap.

    An arena is charged to ``budget`` page by page, as it is first touched. Its address space is twice
    what the budget may reach, so that fragmentation costs addresses and not memory.
    """
    if heap_is_better():
        return Heap(account=budget, owner=owner)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most_bytes = max(budget.limit_bytes, budget.may_reach_bytes)
    return Arena(min(2 * most_bytes, physical), account=budget, owner=owner)


class StreamOrder:
    """Order of uses of memory on a device; by default one that does not run behind, so nothing to do."""

    runs_behind: ClassVar[bool] = False
    """True if the device runs behind the interpreter, so that ``use`` says something."""

    def use(self, storage: torch.UntypedStorage) -> None:
        """Note that the current stream works with ``storage`` from now on. Never waits.

        Call it for every saved storage, and before a restored one is handed out.
        """

    def free_early(self, storage: torch.UntypedStorage) -> None:
        """Note, as ``use``, the use of a storage that is not held until backward, though it is saved."""

    def made(self, storage: torch.UntypedStorage) -> None:
        """Note that the calling thread has just recomputed ``storage``; later uses come after that."""

    def here(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        """Return a context for work on ``device`` that is put off: its stream is the one of now."""
        return nullcontext


class Transport(ABC):
    """Writes storages to tiers, reads them back and discards them. Thread-safe.

    A mover is one; with codecs open, the encoding stage in front of it is another.
    """

    @abstractmethod
    def write(
        self,
        storage: torch.UntypedStorage,
        tier: Tier,
        label: str,
        encoding: Encoding | None = None,
    ) -> Any:
        """Begin to spill; returns a ticket with ``written``, a Transfer. Raises NoSpaceError.

        ``encoding`` is a wish: a mover moves the bytes as they are.
        """

    @abstractmethod
    def read(self, tier: Tier, ticket: Any, target: Any, priority: Priority) -> Transfer:
        """Begin to fill ``target``."""

    @abstractmethod
    def discard(self, tier: Tier, ticket: Any) -> None:
        """Free what the tier holds for the ticket. Never waits: finalizers call it, too."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until the device has only the program's own work left."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds. Memory that storages still use is freed when they die."""


class Mover(StreamOrder, Transport):
    """Moves storages of one device to tiers and back. Never waits, except where documented."""

    device: torch.device

    def frees(self, storage: torch.UntypedStorage) -> bool:
        """Return whether memory comes free for others when ``storage`` dies."""
        return True

    def begin_pass(self) -> None:
        """Note that a pass begins, in which ``frees`` will be asked. Called under the runtime's lock."""

    @abstractmethod
    def allocate(self, ticket: Any, *, force: bool = False) -> Any | None:
        """Device memory for what ``ticket`` holds, charged to the budget; ``None`` if it is full.

        With ``force`` the budget may be exceeded, and it is not ``None``.
        """

    @abstractmethod
    def finish(self, target: Any) -> torch.UntypedStorage:
        """The filled target as a storage; its budget is given back when the storage dies."""

    def account(self, budget_of: Callable[[torch.device], Account]) -> None:
        """From now on device memory is charged to the account of its device."""

    @abstractmethod
    def drop(self, target: Any) -> None:
        """Give up a target that was not finished. Its transfer has settled or was never begun."""

    @abstractmethod
    def trim(self, nbytes: int) -> int:
        """Give idle device memory back to the budget; returns how much that was."""

    def rest(self) -> int:
        """Give host memory back, because nothing is moved until ``wake``; how many bytes."""
        return 0

    def wake(self) -> None:
        """Take it again. Waits."""

    def retouch_ns(self, nbytes: int) -> float:
        """Return the time to have ``nbytes`` again after ``trim`` has freed them."""
        return 0.0

    @abstractmethod
    def target_bytes(self, ticket: Any) -> int:
        """Return the most that ``allocate`` would charge."""

    def charge_bytes(self, ticket: Any) -> int:
        """Return what ``allocate`` may have to take from the budget."""
        return self.target_bytes(ticket)

    @abstractmethod
    def used_bytes(self, budget: Account) -> int:
        """Return the memory in use for restored storages on the device of ``budget``."""


@dataclass(frozen=True, slots=True)
class BlockTarget:
    """A block of memory on its way to becoming a storage of ``nbytes`` that begins at ``skew``."""

    block: Block
    lead: int
    """Offset of the tier's window in the block."""
    skew: int
    nbytes: int


class CpuMover(Mover):
    """Host memory is the device: tiers read the live storage itself and fill blocks of memory.

    Nothing is copied on the way out (TRAPS rule 28): a storage lies within whole pages, so the
    granule-aligned window around it may be read, and the skew is remembered. On the way back the data
    begin at the same skew in a block, and the storage begins where the data begin (rule 26).
    A window of a tier without granules lies anywhere: it returns to the same place in a cache line.

    Attributes:
        memory: What comes back goes there: an arena, or the heap ([Note: heap or arena]).
    """

    def __init__(self, *, budget: Account) -> None:
        """Take nothing yet; see ``memory_for``."""
        self.device = torch.device("cpu")
        self._budget = budget
        self.memory = memory_for(budget, RESTORED)

    def write(
        self,
        storage: torch.UntypedStorage,
        tier: Tier,
        label: str,
        encoding: Encoding | None = None,
    ) -> Any:
        """Spill straight from the storage's own memory, as it is: ``encoding`` is ignored."""
        return tier.write(storage.data_ptr(), storage.nbytes(), keep_alive=storage, label=label)

    def allocate(self, ticket: Any, *, force: bool = False) -> BlockTarget | None:
        """A block for the ticket's window; with ``force`` one of an arena of its own."""
        window = ticket.window
        lead = window.address % CACHE_LINE_BYTES
        block = self.memory.allocate(lead + window.nbytes)
        if block is None and force:
            block = lone_block(lead + window.nbytes, owner=BEYOND_BUDGET)
        if block is None:
            return None
        return BlockTarget(block, lead, lead + window.skew, ticket.nbytes)

    def read(self, tier: Tier, ticket: Any, target: BlockTarget, priority: Priority) -> Transfer:
        """Fill the block with the ticket's window."""
        address = target.block.address + target.lead
        return tier.read(ticket, address, keep_alive=target, priority=priority)

    def finish(self, target: BlockTarget) -> torch.UntypedStorage:
        """The block as a storage, without a copy; the block is free again when that dies."""
        return torch.from_numpy(target.block.lend(target.skew, target.nbytes)).untyped_storage()

    def drop(self, target: BlockTarget) -> None:
        """Free the block."""
        target.block.free()

    def discard(self, tier: Tier, ticket: Any) -> None:
        """Discard the bytes on the tier."""
        tier.discard(ticket)

    def drain(self) -> None:
        """Do nothing: no device works behind the interpreter."""

    def trim(self, nbytes: int) -> int:
        """Hand idle pages of an arena back to the system."""
        return self.memory.trim(nbytes)

    def retouch_ns(self, nbytes: int) -> float:
        """By the latest first touches of an arena."""
        return self.memory.touch_ns_per_byte * nbytes

    def target_bytes(self, ticket: Any) -> int:
        """The window, and what lies before it in its cache line."""
        return int(ticket.window.nbytes + ticket.window.address % CACHE_LINE_BYTES)

    def charge_bytes(self, ticket: Any) -> int:
        """Return ``target_bytes``, rounded up to the allocator's page."""
        return self.memory.charge_bytes(self.target_bytes(ticket))

    def used_bytes(self, budget: Account) -> int:
        """Return the bytes of blocks in use, without idle pages, which the budget is charged for too."""
        return self.memory.used_bytes

    def close(self) -> None:
        """Unmap an arena once no storage uses it."""
        self.memory.close()
