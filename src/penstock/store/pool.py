"""Reusable memory in blocks, charged to an account. All products take their buffers from it.

A ``Pool`` says how blocks are taken, lent and freed. Its backings are :mod:`.arena` (huge pages, which
stay resident between uses) and :mod:`.heap` (the C library's, where that keeps what is freed); pinned
memory is an arena that a device's driver knows.

[Note: charged to the process]
    A pool is charged to the account that it is given, or else to a child of ``host_account()``, which is
    freed with the pool: so whatever Penstock holds is in the process's account. If that refuses, idle
    memory of other pools is freed; if that is not enough, ``allocate`` returns None. A client that must
    have memory all the same, because it makes other memory free or because bytes would be lost, passes
    ``force``.
"""

from __future__ import annotations

import ctypes
import enum
import weakref
from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ClosedError, ConfigError
from penstock.core.locks import Lock, defer
from penstock.core.process import call_in_child, fork_guard
from penstock.core.units import format_bytes
from penstock.io.mapping import PAGE_BYTES
from penstock.store.account import Account, host_account

_PYBUF_WRITE: Final = 0x200
_memory_view: Final = ctypes.pythonapi["PyMemoryView_FromMemory"]  # not shared, as the attribute is
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

TRIES: Final = 3
"""Times that others are asked to free memory for a block, since somebody else may take it."""
MAX_ALIGNMENT_BYTES: Final = 2 << 20


class BlockState(enum.Enum):
    """Ownership of a block's memory."""

    OUT = "out"
    """Owned by its holder, until ``free`` or ``lend``."""
    LENT = "lent"
    """Owned by an array; it is freed when the array dies."""
    FREE = "free"
    """Not owned: the memory may already belong to another block."""


class Block:
    """Contiguous part of a pool's memory. Its holder must ``free`` it, or ``lend`` it, once.

    A block that is dropped without either stays allocated: a transfer may still use its address.

    Attributes:
        address: Its first address.
        nbytes: Its length.
        place: Its place, in the terms of the pool.
        state: Ownership of its memory.
    """

    __slots__ = ("_pool", "address", "nbytes", "place", "state")

    def __init__(self, pool: Pool, place: Any, address: int, nbytes: int) -> None:
        """Create a block; only for the pool."""
        self._pool = pool
        self.place = place
        self.address = address
        self.nbytes = nbytes
        self.state = BlockState.OUT

    def __repr__(self) -> str:
        return f"Block({self.nbytes} bytes at {self.address:#x}, {self.state.value})"

    def free(self) -> None:
        """Free the memory. Raises ClosedError if it was freed or lent before."""
        self._pool._free_block(self, BlockState.OUT)

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
        array = self._pool._lend(self, skew, nbytes)
        weakref.finalize(array, defer, self._free_lent).atexit = False
        return array

    def _free_lent(self) -> None:
        self._pool._free_block(self, BlockState.LENT)


class Pool(ABC):
    """Memory for transfers, in blocks, within an account. Thread-safe; not inherited by fork.

    Attributes:
        account: The account that its resident bytes are charged to.
        owner: Name of its charges in the account.
        touch_ns_per_byte: Running mean of the time to make a byte resident.
    """

    def __init__(self, account: Account | None, owner: str) -> None:
        """Hold nothing yet.

        Args:
            account: See the attribute; None: a child of the process's account.
            owner: Name of its charges there.
        """
        self.account = host_account().child(owner) if account is None else account
        self.owner = owner
        self.touch_ns_per_byte = 0.0
        self._lock = Lock()
        self._guard = fork_guard()
        self._used_bytes = 0
        self._touched_bytes = 0
        with _pools_lock:
            _pools.add(self)

    def __repr__(self) -> str:
        used, resident = format_bytes(self._used_bytes), format_bytes(self._touched_bytes)
        return f"{type(self).__name__}({self.owner}: {used} used, {resident} resident)"

    @property
    def used_bytes(self) -> int:
        """Bytes that blocks hold now."""
        return self._used_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes that are resident, and charged to the account, now."""
        return self._touched_bytes

    @abstractmethod
    def charge_bytes(self, nbytes: int) -> int:
        """Return the most that a block may charge to the account."""

    def allocate(
        self,
        nbytes: int,
        *,
        alignment: int = PAGE_BYTES,
        force: bool = False,
        wait: bool = True,
    ) -> Block | None:
        """Allocate ``nbytes`` of memory, contents undefined.

        Args:
            nbytes: Length of the block.
            alignment: Its address is a multiple of this.
            force: Charge it even over the account's limits.
            wait: If the process's account is full, have others free memory for it, and wait for that: see
                [Note: accounts that yield].

        Returns:
            The block, or None if it does not fit the capacity, or the account, now. To wait, wait on
            ``account.changed``, which is notified when a block is freed; use a timeout, since one may
            be freed between the refusal and the wait, and never call this while holding
            ``account.changed``.

        Raises:
            ConfigError: ``nbytes`` is not positive, or ``alignment`` is no power of two up to 2 MiB.
            ClosedError: The pool is closed, or this process was forked from its maker.
            MemoryError: The system has no such memory.
        """
        if nbytes <= 0:
            raise ConfigError(
                f"a block of {nbytes} bytes cannot be allocated from {self!r}; it must be positive"
            )
        if alignment <= 0 or MAX_ALIGNMENT_BYTES % alignment:
            raise ConfigError(f"alignment {alignment} is not a power of two up to 2 MiB")
        self._check_process()
        block = self._allocate(nbytes, alignment, False)
        if block is None and free_idle(self.account, self.charge_bytes(nbytes), but=self):
            block = self._allocate(nbytes, alignment, False)
        if block is None and force:
            return self._allocate(nbytes, alignment, True)
        for _ in range(TRIES if wait and not self.account.yields else 0):
            if block is not None or not self.account.make_room(self.charge_bytes(nbytes)):
                break
            block = self._allocate(nbytes, alignment, False)
        return block

    def trim(self, nbytes: int | None = None) -> int:
        """Free idle memory, and uncharge it.

        Args:
            nbytes: Bytes to free; None for all that are idle.

        Returns:
            Bytes freed: up to a page more than ``nbytes``, or less if less is idle.
        """
        return 0

    def close(self) -> None:  # noqa: B027  (not every backing holds anything beside blocks)
        """Free the memory, at once or when the last block is freed. Idempotent; harmless in a fork."""

    # -- for backings -----------------------------------------------------------------------------

    @abstractmethod
    def _allocate(self, nbytes: int, alignment: int, force: bool) -> Block | None:
        """Do what ``allocate`` says."""

    @abstractmethod
    def _release(self, block: Block) -> int:
        """Take a block's memory back, under the lock; return the bytes to be freed in the account."""

    # -- for blocks -------------------------------------------------------------------------------

    def _lend(self, block: Block, skew: int, nbytes: int) -> NDArray[np.uint8]:
        self._check_process()
        with self._lock:
            _check_state(block, BlockState.OUT)
            block.state = BlockState.LENT
        # Its base is no array, so that NumPy's views of it refer to it and not past it.
        memory = _memory_view(block.address + skew, nbytes, _PYBUF_WRITE)
        return np.frombuffer(memory, np.uint8)

    def _free_block(self, block: Block, expected: BlockState) -> None:
        if self._guard.in_child:
            return  # the memory is the parent's, and another thread may have held the lock
        with self._lock:
            _check_state(block, expected)
            block.state = BlockState.FREE
            self._used_bytes -= block.nbytes
            charged = self._release(block)
        if charged:
            self.account.free(charged, self.owner)
        else:
            with self.account.changed:  # a waiter's block may fit now
                self.account.changed.notify_all()

    def _check_process(self) -> None:
        if self._guard.in_child:
            raise self._guard.error(repr(self), "make one here")


_pools: Final = weakref.WeakSet[Pool]()
_pools_lock = Lock()


def free_idle(account: Account, nbytes: int, *, but: Pool | None = None) -> int:
    """Free idle memory of pools if it is what ``account`` lacks for ``nbytes``.

    Call it without the lock of any pool.

    Args:
        account: Account that was refused ``nbytes`` by a parent; nothing happens if it was not.
        nbytes: Bytes that it was refused.
        but: Pool to leave as it is.

    Returns:
        Bytes freed, in all pools that are charged to the same memory.
    """
    missing = account.missing_elsewhere(nbytes)
    if not missing:
        return 0
    with _pools_lock:
        pools = list(_pools)
    freed = 0
    for pool in pools:
        if pool is but or pool._guard.in_child or not pool.account.shares_memory(account):
            continue
        if freed < missing:
            freed += pool.trim(missing - freed)
    return freed


def _begin_child() -> None:
    global _pools_lock  # noqa: PLW0603
    _pools_lock = Lock()


call_in_child(_begin_child)


def _check_state(block: Block, expected: BlockState) -> None:
    if block.state is not expected:
        raise ClosedError(
            f"{block!r} was already {block.state.value}; free or lend a block only once"
        )
