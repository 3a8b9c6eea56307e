"""Tiers around a tier: a slower one, one that fails on cue, one that writes down what is asked.

Each is a ``Tier`` with the spec and the recorder of the tier inside it, and that may be a wrapper,
too. Callers use the outermost one only: a wrapper calls the *primitives* of what it wraps, so that
alignment, checksums, accounts and spans are done once, outside. Closing it closes what is inside.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.core.errors import ConfigError, NoSpaceError, TransferError
from penstock.core.locks import Lock
from penstock.io.engine import Op, Priority, Transfer
from penstock.store.base import Place, Tier
from penstock.store.checksums import BLOCK_BYTES

FaultMode: TypeAlias = Literal["raise", "settle", "corrupt", "delay"]


class WrapperTier(Tier):
    """Does what the tier inside it does. Subclasses override the primitives that differ.

    Attributes:
        inner: The tier inside.
    """

    def __init__(self, inner: Tier) -> None:
        """Wrap ``inner``, which from now on belongs to this tier."""
        super().__init__(inner.spec, recorder=inner.recorder, verify=inner._verify)
        self.inner = inner

    @property
    def taken_bytes(self) -> int:
        """Bytes of the capacity in use."""
        return self.inner.taken_bytes

    def _allocate(self, nbytes: int) -> Place:
        return self.inner._allocate(nbytes)

    def _write(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        return self.inner._write(place, address, nbytes, keep_alive, priority)

    def _read(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        return self.inner._read(place, address, nbytes, keep_alive, priority)

    def _unsettled(self) -> list[Transfer]:
        return self.inner._unsettled()

    def _discard(self, place: Place) -> None:
        self.inner._discard(place)

    def _close(self) -> None:
        self.inner.close()


class FaultyTier(WrapperTier):
    """Fails on cue, for tests: one operation, a run of them, or all from some moment on.

    ``mode`` says how:

    - ``"raise"``: the call raises ``error`` at once; nothing is begun. The default error is
      NoSpaceError, as of a disk that is full.
    - ``"settle"``: the operation is carried out, then its transfer settles with ``error``. The
      default error is TransferError with EIO.
    - ``"corrupt"``: a read succeeds, with wrong bytes in the target. Only reads are counted.
    - ``"delay"``: the transfer settles ``delay_s`` later than it would.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        fail_at: int | Mapping[Op, int],
        mode: FaultMode = "settle",
        error: Exception | None = None,
        times: int | None = 1,
        delay_s: float = 0.0,
    ) -> None:
        """Wrap ``inner``.

        Args:
            inner: The tier that does the work.
            fail_at: Index, from 0, of the first operation to fail: of reads and writes together,
                or of each kind by itself; a kind that is not named never fails.
            mode: How it fails.
            error: What is raised, or what the transfer settles with.
            times: How many operations fail from there on; ``None``: all.
            delay_s: For ``"delay"``, seconds.
        """
        super().__init__(inner)
        if mode == "corrupt" and isinstance(fail_at, Mapping) and "write" in fail_at:
            raise ConfigError("mode 'corrupt' is for reads: a source is not ours to change")
        self._fail_at = fail_at
        self._mode = mode
        self._error = error or self._default_error()
        self._times = times
        self._delay_s = delay_s
        self._counts: dict[str, int] = {}
        self._count_lock = Lock()

    @property
    def operations(self) -> int:
        """Reads and writes that were asked for so far (only reads, in mode ``"corrupt"``)."""
        with self._count_lock:
            return sum(self._counts.values())

    def _write(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        fails = self._mode != "corrupt" and self._is_due("write")
        if fails and self._mode == "raise":
            raise self._error
        transfer = self.inner._write(place, address, nbytes, keep_alive, priority)
        return self._spoil(transfer, address) if fails else transfer

    def _read(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        fails = self._is_due("read")
        if fails and self._mode == "raise":
            raise self._error
        transfer = self.inner._read(place, address, nbytes, keep_alive, priority)
        return self._spoil(transfer, address) if fails else transfer

    def _is_due(self, op: Op) -> bool:
        with self._count_lock:
            by_kind = isinstance(self._fail_at, Mapping)
            index = self._counts.get(op, 0) if by_kind else sum(self._counts.values())
            self._counts[op] = self._counts.get(op, 0) + 1
        first = self._fail_at.get(op) if isinstance(self._fail_at, Mapping) else self._fail_at
        if first is None or index < first:
            return False
        return self._times is None or index < first + self._times

    def _spoil(self, inner: Transfer, address: int) -> Transfer:
        outer = Transfer(
            inner.nbytes,
            cancel=lambda _: inner.cancel(),
            promote=lambda _, priority: inner.promote(priority),
        )

        def finish(transfer: Transfer) -> None:
            if transfer.error is not None or self._mode == "settle":
                outer.settle(transfer.error or self._error)
            elif self._mode == "delay":
                timer = threading.Timer(self._delay_s, outer.settle)
                timer.daemon = True
                timer.start()
            else:
                self._flip(address, transfer.nbytes)
                outer.settle()

        inner.add_done_callback(finish)
        return outer

    def _flip(self, address: int, nbytes: int) -> None:
        """Change a block of which some are surely data, for it is by blocks that storage fails.

        The data begin in the first granule; where there are more, the second begins with data.
        """
        granule = self.spec.granule_bytes
        first = granule if nbytes > granule else 0
        where = range(first, min(first + BLOCK_BYTES, nbytes))
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        for index in where:
            memory[index] ^= 0xFF

    def _default_error(self) -> TransferError:
        raises = self._mode == "raise"
        kind = NoSpaceError if raises else TransferError
        return kind(
            errno=errno.ENOSPC if raises else errno.EIO,
            op="injected fault",
            path=self.spec.where,
            offset_bytes=0,
            nbytes=0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
    """One line of a :class:`LoggedTier`'s log."""

    what: str
    """``"write"``, ``"read"``, ``"discard"``, ``"close"`` when asked for; ``"write.done"`` and
    ``"read.done"`` when settled."""
    nbytes: int = 0
    priority: Priority | None = None
    error: BaseException | None = None
    """How a ``.done`` went."""


class LoggedTier(WrapperTier):
    """Writes down every primitive that is called and how every transfer ends, in that order."""

    def __init__(self, inner: Tier, log: list[LogEntry] | Callable[[LogEntry], None]) -> None:
        """Wrap ``inner``.

        Args:
            inner: The tier that does the work.
            log: A list to append to, or a function. It is called in the thread that calls the tier
                or settles the transfer, so it must be quick and must not raise.
        """
        super().__init__(inner)
        self._log = log.append if isinstance(log, list) else log

    def _write(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        self._log(LogEntry(what="write", nbytes=nbytes, priority=priority))
        transfer = self.inner._write(place, address, nbytes, keep_alive, priority)
        self._log_end("write.done", transfer)
        return transfer

    def _read(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        self._log(LogEntry(what="read", nbytes=nbytes, priority=priority))
        transfer = self.inner._read(place, address, nbytes, keep_alive, priority)
        self._log_end("read.done", transfer)
        return transfer

    def _discard(self, place: Place) -> None:
        self._log(LogEntry(what="discard"))
        self.inner._discard(place)

    def _close(self) -> None:
        self._log(LogEntry(what="close"))
        self.inner.close()

    def _log_end(self, what: str, transfer: Transfer) -> None:
        def log(error: BaseException | None) -> BaseException | None:
            self._log(LogEntry(what=what, nbytes=transfer.nbytes, error=error))
            return error

        transfer.finish_with(log)
