"""Memory for frames between a codec and a tier.

[Note: scratch]
    Encoding makes room, so it must not need any: what it works in is taken from the device budget once,
    when the mover is made. Eight tenths are *slots*, each as long as the longest frame of a piece. The
    rest, as much as two slots, is what codecs may allocate while they work; that is charged, and piece
    sizes are chosen to keep to it, but it is theirs to allocate.

    A slot is free, or in the worker's hand, or with a tier that writes or reads it, or it holds a frame
    that has arrived. There is one worker, and it never waits while there is something that it can do:

    1. A frame that has arrived can be decoded at any time; that takes no slot, and sets one free.
    2. A transfer ends by itself: its callback takes the worker's lock for a moment and nothing else, and
       sets the slot free or makes it case 1.
    3. So when the worker waits, and not all slots are free, each of the others is with a tier, and
       the end of a transfer will wake it. If all are free, whatever there is to do can begin.

    Encoding has half of the slots at most. So however slowly a tier writes, the other half serves reads,
    one piece after the other, and who waits for a read never waits for a write. Reads may take all:
    they are as many as there are targets, which the budget bounds, so encoding gets its turn.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from penstock.codec.base import Bytes, Codec
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.locks import defer
from penstock.core.process import ForkGuard, fork_guard
from penstock.core.units import round_down
from penstock.io.mapping import PAGE_BYTES
from penstock.store.account import Account
from penstock.store.arena import Arena

SCRATCH: Final = "scratch"
"""Owner, in the device budget, of the memory that encoding works in."""
SLOTS: Final = 8
ENCODING_SLOTS: Final = SLOTS // 2
_PARTS: Final = SLOTS + 2
"""Slots, and what codecs may allocate, in slots."""


class Slot:
    """Room for one frame, at a multiple of the system's page."""

    __slots__ = ("address", "encoding", "memory")

    def __init__(self, memory: Bytes) -> None:
        """Of ``memory``, which it keeps mapped."""
        self.memory = memory
        self.address = int(memory.ctypes.data)
        self.encoding = False


class ScratchSlots:
    """Some slots, and the memory that codecs work in, charged to a budget. Guarded by the worker's lock.

    Attributes:
        slot_bytes: How long a slot is.
        working_bytes: What a codec may allocate.
    """

    def __init__(self, nbytes: int, budget: Account, *, slots: int, parts: int) -> None:
        """Share ``nbytes`` out, and charge what codecs work in.

        Args:
            nbytes: For everything.
            budget: The device's.
            slots: How many there are; half of them at most are for encoding.
            parts: Slots, and what codecs may allocate, in slots.

        Raises:
            ConfigError: A slot would not hold a piece of one page, and its header.
            BudgetError: The budget has not so much left.
        """
        least = parts * 2 * PAGE_BYTES
        if nbytes < least:
            raise ConfigError(
                f"scratch memory of {nbytes} bytes is too small to encode in; give at least {least}"
                " bytes"
            )
        self.slot_bytes = round_down(nbytes // parts, PAGE_BYTES)
        self.working_bytes = (parts - slots) * self.slot_bytes
        self._free: list[Any] = []
        self._encoding = 0
        self._most_encoding = slots // 2
        charged = self._charged_bytes()
        if not budget.try_take(charged, SCRATCH):
            raise _refused(nbytes, budget)
        self._give_back = weakref.finalize(self, defer, _give, budget, charged, fork_guard())
        self._give_back.atexit = False

    def _charged_bytes(self) -> int:
        """Bytes charged from opening to close."""
        return self.working_bytes

    def piece_bytes(self, codec: Codec, dtype: str) -> int:
        """How much of a storage to encode at once: whole pages. Raises ConfigError if none would do."""
        piece = self.slot_bytes - PAGE_BYTES
        while piece:
            if self._fits(codec, dtype, piece):
                return piece
            piece = round_down(piece * 3 // 4, PAGE_BYTES)
        raise ConfigError(
            f"codec {codec.name} cannot encode a page of {dtype} in slots of {self.slot_bytes} bytes"
            f" and {self.working_bytes} bytes beside them; give more scratch memory"
        )

    def _fits(self, codec: Codec, dtype: str, piece: int) -> bool:
        spec = codec.spec(dtype, piece)
        return spec.bound_bytes <= self.slot_bytes and spec.scratch_bytes <= self.working_bytes

    def take(self, *, encoding: bool) -> Any | None:
        """A free slot; ``None`` if there is none for this use."""
        if not self._free or (encoding and self._encoding == self._most_encoding):
            return None
        slot = self._free.pop()
        slot.encoding = encoding
        self._encoding += encoding
        return slot

    def release(self, slot: Any) -> None:
        """Nothing touches the slot any more."""
        self._encoding -= slot.encoding
        self._free.append(slot)

    def close(self) -> None:
        """Give all of it back. Every slot is free. Idempotent."""
        self._free.clear()
        self._give_back()


class Scratch(ScratchSlots):
    """Slots in host memory. See [Note: scratch]."""

    def __init__(self, nbytes: int, budget: Account) -> None:
        """Take at most ``nbytes`` from ``budget``, at once.

        Raises:
            ConfigError: It is less than 80 KiB.
            BudgetError: The budget has not so much left.
        """
        super().__init__(nbytes, budget, slots=SLOTS, parts=_PARTS)
        arena = Arena(SLOTS * self.slot_bytes, account=budget, owner=SCRATCH)
        block = arena.allocate(SLOTS * self.slot_bytes)
        if block is not None:  # mapped from here on until the last slot is gone
            memory = block.lend(0, block.nbytes)
        arena.close()
        if block is None:
            self._give_back()
            raise _refused(nbytes, budget)
        size = self.slot_bytes
        self._free = [Slot(memory[i * size : (i + 1) * size]) for i in range(SLOTS)]


def _give(budget: Account, nbytes: int, guard: ForkGuard) -> None:
    if not guard.in_child:  # in a forked child the lock's holder did not come along
        budget.free(nbytes, SCRATCH)


def _refused(nbytes: int, budget: Account) -> BudgetError:
    least = budget.used_bytes + nbytes
    return BudgetError(
        f"the {budget.name} budget of {budget.limit_bytes} bytes has {budget.free_bytes} left, and"
        f" encoding needs {nbytes} to work in; give at least {least} bytes, or switch codecs off",
        slot="scratch memory of codecs",
        limit_bytes=budget.limit_bytes,
        least_bytes=least,
    )
