"""System calls that fail, stop short or wait when a test says so."""

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
    """The call says that it moved at most ``nbytes``; 0 as at the end of a file.

    What it really moves is that much rounded down to the file's granule: a direct transfer must be
    taken up again from there, and an engine that does not will be found out.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class Crash:
    """The call raises an exception that no system call raises."""

    error: BaseException


MAX_AT_GATE = 256
"""More calls than any test keeps waiting."""

Fault = Fail | Short | Crash


@dataclass(frozen=True, slots=True)
class Call:
    """One read or write that reached the operating system, or would have."""

    op: Op
    offset_bytes: int
    nbytes: int


class FaultySyscalls(Syscalls):
    """Passes calls on, but for chosen ones; remembers all. Thread-safe.

    Attributes:
        calls: Every read and write so far, in the order in which they began.
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
            faults: By the index of the read or write, from 0, over the life of this object.
            every: What befalls all calls that ``faults`` does not name.
            drop_faults: Indices of ``drop`` calls, counted apart, that fail with EIO.
            inner: Who does the work; the operating system if None.
        """
        self._faults = dict(faults or {})
        self._every = every
        self._drop_faults = frozenset(drop_faults)
        self._inner = Syscalls() if inner is None else inner
        self._lock = Lock()
        self._drops = 0
        self.calls: list[Call] = []

    def prepare(self, owner: object) -> None:
        """Pass it on."""
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
        """Count a call; how many bytes it may move."""
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
    """Calls wait until they are let through, so that a test can look at what is in flight."""

    def __init__(self, *, inner: Syscalls | None = None) -> None:
        """Make a closed gate."""
        super().__init__(inner=inner)
        self._arrived = threading.Semaphore(0)
        self._tokens = threading.Semaphore(0)
        self._open = threading.Event()

    def wait_for_call(self, timeout_s: float = 10) -> None:
        """Wait until one more call stands at the gate, or has passed it."""
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
