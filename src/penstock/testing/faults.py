"""System calls that fail, move too little or wait, as a test wants."""

from __future__ import annotations

import errno as errnos
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.core.locks import Lock
from penstock.core.units import round_down
from penstock.io.engine import File, Op
from penstock.io.threads import Syscalls


@dataclass(frozen=True, slots=True)
class Fail:
    """The call moves nothing and fails with an errno."""

    errno: int


@dataclass(frozen=True, slots=True)
class Short:
    """The call reports that it moved at most ``nbytes``; 0 as at the end of a file.

    It really moves that rounded down to the file's granule: a direct transfer must be continued from
    there, which detects engines that do not do so.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class Crash:
    """The call raises an exception that no system call raises."""

    error: BaseException


MAX_AT_GATE = 256
"""Number above that of waiting calls in any test."""

Fault = Fail | Short | Crash


@dataclass(frozen=True, slots=True)
class Call:
    """A read or write that reached the operating system, or would have without a fault."""

    op: Op
    offset_bytes: int
    nbytes: int


class FaultySyscalls(Syscalls):
    """System calls with faults at chosen calls, which also records all calls. Thread-safe.

    Attributes:
        calls: All reads and writes so far, in the order in which they began.
    """

    def __init__(
        self,
        faults: Mapping[int, Fault] | None = None,
        *,
        every: Fault | None = None,
        drop_faults: Iterable[int] = (),
        inner: Syscalls | None = None,
    ) -> None:
        """Choose the faults.

        Args:
            faults: Faults by the 0-based index of the read or write.
            every: Fault of all calls that are not in ``faults``.
            drop_faults: Indices of failing ``drop`` calls, counted separately; they fail with EIO.
            inner: Implementation of the calls; the operating system if None.
        """
        self._faults = dict(faults or {})
        self._every = every
        self._drop_faults = frozenset(drop_faults)
        self._inner = Syscalls() if inner is None else inner
        self._lock = Lock()
        self._drops = 0
        self.calls: list[Call] = []

    def prepare(self, owner: object) -> None:
        """Forward the call."""
        self._inner.prepare(owner)

    def read(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        """Read, unless a fault is due."""
        allowed = self._next(Call("read", offset_bytes, nbytes))
        if allowed == nbytes:
            return self._inner.read(file, address, nbytes, offset_bytes)
        real = round_down(allowed, file.granule_bytes)
        moved = self._inner.read(file, address, real, offset_bytes) if real else 0
        return allowed if moved == real else moved

    def write(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        """Write, unless a fault is due."""
        allowed = self._next(Call("write", offset_bytes, nbytes))
        if allowed == nbytes:
            return self._inner.write(file, address, nbytes, offset_bytes)
        real = round_down(allowed, file.granule_bytes)
        moved = self._inner.write(file, address, real, offset_bytes) if real else 0
        return allowed if moved == real else moved

    def drop(self, file: File, nbytes: int, offset_bytes: int, *, written: bool) -> None:
        """Drop, unless a fault is due."""
        with self._lock:
            index, self._drops = self._drops, self._drops + 1
        if index in self._drop_faults:
            raise OSError(errnos.EIO, os.strerror(errnos.EIO))
        self._inner.drop(file, nbytes, offset_bytes, written=written)

    def _next(self, call: Call) -> int:
        """Record a call and return the number of bytes that it may move."""
        with self._lock:
            fault = self._faults.get(len(self.calls), self._every)
            self.calls.append(call)
        match fault:
            case Fail(errno):
                raise OSError(errno, os.strerror(errno))
            case Crash(error):
                raise error
            case Short(nbytes):
                return min(nbytes, call.nbytes)
        return call.nbytes


class GatedSyscalls(FaultySyscalls):
    """System calls that wait at a gate, so that a test can inspect the state during a transfer."""

    def __init__(self, *, inner: Syscalls | None = None) -> None:
        """Create a closed gate."""
        super().__init__(inner=inner)
        self._arrived = threading.Semaphore(0)
        self._tokens = threading.Semaphore(0)
        self._open = threading.Event()

    def wait_for_call(self, timeout_s: float = 10) -> None:
        """Wait until one more call has arrived at the gate."""
        if not self._arrived.acquire(timeout=timeout_s):
            raise TimeoutError(f"no call came within {timeout_s} s")

    def let_through(self, count: int = 1) -> None:
        """Let ``count`` calls pass."""
        self._tokens.release(count)

    def open(self) -> None:
        """Let every call pass from now on."""
        self._open.set()
        self._tokens.release(MAX_AT_GATE)

    def _next(self, call: Call) -> int:
        allowed = super()._next(call)
        self._arrived.release()
        if not self._open.is_set():
            self._tokens.acquire()
        return allowed
