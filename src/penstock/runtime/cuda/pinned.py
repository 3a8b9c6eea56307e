"""Pinned host memory, through which the device's copies and O_DIRECT both go.

[Note: deadlock-free waits for buffers]
    A request that finds no free memory waits in a queue: the highest priority first, then the oldest;
    a small request does not overtake a larger one. Memory that *moves* (a transfer touches it) comes
    free, or comes to rest, by itself, because a transfer waits for nothing but the device and the disk.
    If nothing moves and the head of the queue still does not fit, it never will unless some ticket is
    discarded, and its owner may be the one that waits. So the wait ends without a buffer.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import torch

from penstock.core.errors import ConfigError
from penstock.core.locks import condition, defer
from penstock.core.units import format_bytes
from penstock.io import numa
from penstock.io.engine import Priority
from penstock.runtime.cuda.lanes import StartThread, start_daemon
from penstock.runtime.cuda.link import CudaLink
from penstock.store.account import Account
from penstock.store.arena import Arena, lone_block
from penstock.store.host import MemoryPlace
from penstock.store.pool import Block

_priority_of: Final = attrgetter("priority")
PATIENCE_S: Final = 60.0
_never_freed: Final[list[Arena]] = []


def node_of(device: torch.device) -> int | None:
    """Return the NUMA node of a device; None: it has none, or it is not known."""
    if device.type != "cuda":
        return None
    return numa.node_of(torch.cuda.get_device_properties(device))


@dataclass(slots=True, eq=False)
class PinnedBlock:
    """A block of a slab. Guarded by the slab's lock; its memory belongs to the holder."""

    slab: Slab
    block: Block
    moving: int = 1
    """Transfers that touch it; with a new buffer one has begun."""
    wanted: bool = True
    """True if its bytes are needed when no transfer touches it; else it is freed then."""
    memory: object = None
    """Of memory that was lent its owner, so that transfers hold it."""

    @property
    def address(self) -> int:
        """Address, a multiple of 4096."""
        return self.block.address


@dataclass(slots=True, eq=False)
class Waiting:
    """A request for a buffer in the queue."""

    nbytes: int
    priority: Priority
    begin: Callable[[PinnedBlock | None], None]
    """Called once, in the slab's thread, with the buffer, or with ``None`` if there will be none."""


class Slab:
    """A capped piece of host memory, resident and registered with the driver. Thread-safe.

    Attributes:
        arena: Whose blocks it hands out.
        refusal: Why the driver did not pin it; ``""`` if it did.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        link: CudaLink,
        device: torch.device,
        budget: Account,
        name: str,
        start_thread: StartThread = start_daemon,
    ) -> None:
        """Take memory of the device's NUMA node, touch it and pin it; about a second for 4 GiB.

        Args:
            nbytes: How much.
            link: To the device.
            device: Whose driver pins it, for all devices of its kind; they may be at other nodes.
            budget: The host memory that it is charged to, at once and as a whole.
            name: As which it is charged.
            start_thread: Starts its thread, at the first wait.

        Raises:
            ConfigError: The budget has not so much left.
        """
        self._link = link
        self._device = device
        self._name = name
        self.arena = Arena(nbytes, account=budget, owner=name, node=node_of(device))
        if not self.arena.pretouch():
            self.arena.close()
            raise ConfigError(
                f"{name}: {format_bytes(nbytes)} ({nbytes} bytes) do not fit the {budget.name}"
                f" budget, which has {budget.free_bytes} bytes left"
            )
        self.refusal = self._pin()
        self._wake = condition()
        self._queue: list[Waiting] = []  # by priority, then by age
        self._buffers: set[PinnedBlock] = set()
        self._moving = 0
        self._lent_bytes = 0
        self._resting = False
        self._start_thread: StartThread | None = start_thread
        self._stopping = False
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """The longest buffer there can be."""
        return self.arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that buffers hold now."""
        return self.arena.used_bytes

    # -- taking -----------------------------------------------------------------------------------

    def take(self, nbytes: int) -> PinnedBlock | None:
        """A buffer with a transfer begun, or ``None`` if there is no room now."""
        with self._wake:
            return self._allocate(nbytes)

    def take_or_wait(self, waiting: Waiting) -> tuple[PinnedBlock | None, bool]:
        """A buffer with a transfer begun, now or later; returns at once.

        Returns:
            The buffer, if there is one now, and whether ``waiting`` has been queued. Neither: there will
            be no buffer.
        """
        with self._wake:
            if not self._queue or self._queue[0].priority > waiting.priority:
                buffer = self._allocate(waiting.nbytes)
                if buffer is not None or not self._moving:
                    return buffer, False
            if self._stopping:
                return None, False
            insort(self._queue, waiting, key=_priority_of)
            start_thread, self._start_thread = self._start_thread, None
        if start_thread is not None:
            start_thread(self._work, f"penstock-{self._name}")
        return None, True

    def beyond(self, nbytes: int) -> PinnedBlock:
        """Return a buffer outside the slab, not pinned: for a read that cannot do without."""
        block = lone_block(nbytes, owner=self._name)
        with self._wake:
            return self._add(block)

    def withdraw(self, waiting: Waiting) -> bool:
        """Leave the queue. False: too late, ``begin`` has been or is being called."""
        with self._wake:
            if waiting not in self._queue:
                return False
            self._queue.remove(waiting)
            self._wake.notify_all()
            return True

    def promote(self, waiting: Waiting, priority: Priority) -> None:
        """Raise the priority of a queued request; a lower one is ignored."""
        with self._wake:
            if priority < waiting.priority and waiting in self._queue:
                self._queue.remove(waiting)
                waiting.priority = priority
                insort(self._queue, waiting, key=_priority_of)
                self._wake.notify_all()

    def lend(self, nbytes: int) -> MemoryPlace | None:
        """Return memory in which something rests, until nobody refers to it; None if there is no room.

        Nothing moves there before ``join``. After ``close`` it stays, but is not pinned any more.
        """
        with self._wake:
            if self._stopping or self._resting:
                return None
            block = self.arena.allocate(nbytes, wait=False)
            if block is None:
                return None
            self._lent_bytes += block.nbytes
        memory = block.lend(0, nbytes)
        weakref.finalize(memory, defer, self._taken_back, block.nbytes).atexit = False
        return MemoryPlace(memory, PinnedBlock(self, block, moving=0, memory=memory))

    @property
    def lent_bytes(self) -> int:
        """Bytes of memory in which something rests that was lent."""
        return self._lent_bytes

    # -- giving back ------------------------------------------------------------------------------

    def _taken_back(self, nbytes: int) -> None:
        with self._wake:
            self._lent_bytes -= nbytes

    def join(self, buffer: PinnedBlock) -> None:
        """Note another transfer that touches the buffer."""
        with self._wake:
            self._moving += not buffer.moving
            buffer.moving += 1

    def leave(self, buffer: PinnedBlock) -> None:
        """Note the end of a transfer: the buffer moves on, comes to rest, or is freed."""
        with self._wake:
            buffer.moving -= 1
            self._moving -= not buffer.moving
            self._free_unneeded(buffer)
            self._wake.notify_all()

    def release(self, buffer: PinnedBlock) -> None:
        """Free a buffer once the transfers that touch it have ended.

        For finalizers, too, and harmless after ``close``.
        """
        with self._wake:
            buffer.wanted = False
            self._free_unneeded(buffer)
            self._wake.notify_all()

    # -- while it is unused -----------------------------------------------------------------------

    def rest(self) -> int:
        """Unpin it, and return to the system what no buffer holds, until ``wake``. Idempotent.

        Waits until nothing moves; if something still does after a minute, all stays as it is. While it
        rests there are no buffers to take. What buffers hold stays, but may not be copied from.

        Returns:
            How many bytes were given back.
        """
        with self._wake:
            if self._closed or self._resting:
                return 0
            if not self._wake.wait_for(lambda: not self._moving, PATIENCE_S):
                return 0
            self._resting = True
        self._unpin()
        return self.arena.undo_pretouch()

    def wake(self) -> None:
        """Have all of it resident and pinned again, at the same addresses. Idempotent.

        Takes as long as the constructor. ``refusal`` says if the driver does not pin it any more.
        """
        if not self._resting or self._closed:
            return
        is_resident = self.arena.pretouch()
        assert is_resident, (
            "the account of a slab has no room for the memory that the slab returned"
        )
        self.refusal = self._pin()
        with self._wake:
            self._resting = False

    # -- the end ----------------------------------------------------------------------------------

    def stop(self) -> list[Waiting]:
        """Close the queue; return the requests in it, for the caller to answer."""
        with self._wake:
            self._stopping = True
            waiting, self._queue = self._queue, []
            self._wake.notify_all()
        return waiting

    def close(self) -> None:
        """Wait until nothing moves, then unpin and unmap. What rests there is lost. Idempotent.

        If something still moves after a minute (a device that hangs, or a program that was
        interrupted between taking a buffer and using it), the memory stays, because it may be in use.
        """
        self.stop()
        with self._wake:
            still = self._wake.wait_for(lambda: not self._moving, PATIENCE_S)
            if self._closed:
                return
            self._closed = True
            buffers, self._buffers = self._buffers, set()
        if not still:
            _never_freed.append(self.arena)
            return
        if not self._resting:
            self._unpin()
        for buffer in buffers:
            buffer.block.free()
        self.arena.undo_pretouch()  # idle pages are free although somebody has memory that was lent
        self.arena.close()

    def serve(self, *, wait: bool = True) -> bool:
        """Serve the head of the queue. The slab's thread does it over and over.

        Args:
            wait: Until there is something to do.

        Returns:
            False if there is nothing to do; with ``wait``, if there will be nothing.
        """
        with self._wake:
            while (served := self._next()) is None:
                if self._stopping or not wait:
                    return False
                self._wake.wait()
        waiting, buffer = served
        waiting.begin(buffer)
        return True

    # -- inside; under the lock, but for the thread and the driver --------------------------------

    def _pin(self) -> str:
        return self._link.pin(self.arena.address, self.arena.capacity_bytes, self._device)

    def _unpin(self) -> None:
        if not self.refusal:
            self._link.unpin(self.arena.address, self._device)

    def _work(self) -> None:
        while self.serve():
            pass

    def _next(self) -> tuple[Waiting, PinnedBlock | None] | None:
        if not self._queue:
            return None
        buffer = self._allocate(self._queue[0].nbytes)
        if buffer is None and self._moving:
            return None
        return self._queue.pop(0), buffer

    def _allocate(self, nbytes: int) -> PinnedBlock | None:
        if self._stopping or self._resting:
            return None
        block = self.arena.allocate(nbytes)
        return None if block is None else self._add(block)

    def _add(self, block: Block) -> PinnedBlock:
        buffer = PinnedBlock(self, block)
        self._buffers.add(buffer)
        self._moving += 1
        return buffer

    def _free_unneeded(self, buffer: PinnedBlock) -> None:
        if not buffer.wanted and not buffer.moving and buffer in self._buffers:
            self._buffers.remove(buffer)
            buffer.block.free()
