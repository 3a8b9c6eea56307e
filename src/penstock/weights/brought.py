"""Memory that weights are brought to from their homes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from penstock.core.errors import PenstockError
from penstock.io.engine import Priority, Transfer
from penstock.observe.clients import WEIGHTS
from penstock.runtime.movers import memory_for
from penstock.store.account import Account
from penstock.store.arena import lone_block
from penstock.store.pool import Block
from penstock.weights.homes import Home, untransformed


class BroughtMemory(ABC):
    """Memory of one account that weights are brought to. Under the streamer's lock, but for some."""

    @abstractmethod
    def begin(self, home: Home, priority: Priority, *, force: bool) -> tuple[Any, Transfer] | None:
        """Take memory for a weight and begin to read it.

        Args:
            home: The weight's home.
            priority: Of the read.
            force: Exceed the limit if there is no room.

        Returns:
            The memory, for ``finish`` or ``drop``, and the read; None if there is no room.
        """

    @abstractmethod
    def finish(self, memory: Any, home: Home) -> torch.UntypedStorage:
        """Return the memory as a storage, when its read has succeeded; it is free when that dies."""

    @abstractmethod
    def drop(self, memory: Any) -> None:
        """Free memory that was not finished; its read is over."""

    @abstractmethod
    def write(self, home: Home, storage: torch.UntypedStorage) -> Transfer:
        """Begin to write a weight home from a storage that was finished.

        Nobody changes the values before the transfer has settled. Raises PenstockError.
        """

    @abstractmethod
    def use(self, storage: torch.UntypedStorage) -> None:
        """Let the work of this thread, from now on, come after the read. Without the lock."""

    @abstractmethod
    def settle(self, storage: torch.UntypedStorage) -> None:
        """Wait until the values are in a storage, for work of any thread. Without the lock."""

    def trim(self, nbytes: int) -> int:
        """Free idle memory; return how many bytes that was. Without the lock."""
        return 0

    @property
    def excess_bytes(self) -> int:
        """Bytes of weights that should leave because the limit was exceeded."""
        return 0

    def wait_for_room(self, nbytes: int) -> bool:
        """Wait until others have freed memory; False if they have not. Without locks."""
        return False

    def wait(self) -> None:
        """Wait until nothing that was begun works with weights. Without the lock."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free what no storage uses."""


class HostMemory(BroughtMemory):
    """Host memory."""

    def __init__(self, account: Account) -> None:
        """Take nothing yet."""
        self._account = account
        self._pool = memory_for(account, WEIGHTS)

    def begin(self, home: Home, priority: Priority, *, force: bool) -> tuple[Any, Transfer] | None:
        """Read to a block of the pool, or with ``force`` to one of its own."""
        nbytes = home.ticket.window.nbytes
        pool = self._pool
        block = pool.allocate(nbytes, wait=False)
        if block is None and priority is Priority.DEMAND and pool.trim(nbytes):
            # what was idle was in pieces that are too short
            block = pool.allocate(nbytes, wait=False)
        if block is None and force:
            block = pool.allocate(nbytes, force=True, wait=False)
        if block is None and force:  # beyond what the pool has of addresses, too
            block = lone_block(nbytes, owner=WEIGHTS)
        if block is None:
            return None
        try:
            coming = home.tier.read(home.ticket, block.address, keep_alive=block, priority=priority)
        except PenstockError:  # not of a signal's handler: the read may have begun
            block.free()
            raise
        return block, coming

    def finish(self, memory: Block, home: Home) -> torch.UntypedStorage:
        """Return the block as a storage."""
        with untransformed():
            return torch.from_numpy(memory.lend(0, home.nbytes)).untyped_storage()

    def write(self, home: Home, storage: torch.UntypedStorage) -> Transfer:
        """Write from the storage."""
        return home.written_from(storage.data_ptr(), storage)

    def drop(self, memory: Block) -> None:
        """Free the block."""
        memory.free()

    def trim(self, nbytes: int) -> int:
        """Free idle memory of the pool."""
        return self._pool.trim(nbytes)

    def wait_for_room(self, nbytes: int) -> bool:
        """Have others that yield free memory of the process."""
        charged, account = self._pool.charge_bytes(nbytes), self._account
        return account.missing_elsewhere(charged) > 0 and account.make_room(charged)

    def use(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: the read is over."""

    def settle(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: the read is over."""

    def close(self) -> None:
        """Close the pool."""
        self._pool.close()
