"""Interface of I/O engines, through which all of Penstock's own I/O goes.

Tiers, optimizers, checkpoints, data sets and benchmarks request transfers; an engine performs them:

1. The client opens files with :func:`penstock.io.files.open_unlinked` (or ``open_path``) and reads the
   ``granule_bytes`` of each.
2. It calls :meth:`Engine.submit` with a :class:`Request`, from any thread; that does not wait for I/O.
3. A worker of the engine splits the request, continues short transfers, and settles the
   :class:`Transfer`: with the bytes moved, or with a typed error. It never settles with fewer bytes
   than requested.
4. A consumer of the bytes calls :meth:`Transfer.wait`, after :meth:`Transfer.promote` if it is urgent.
5. The client closes its files after the engine, or after their last transfer.
"""

from __future__ import annotations

import enum
import threading
from _thread import LockType, allocate_lock
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from penstock.core.errors import renewed
from penstock.core.locks import Lock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Op = Literal["read", "write"]
_Finish: TypeAlias = "Callable[[BaseException | None], BaseException | None]"


class Priority(enum.IntEnum):
    """Priority of a request among all of an engine, whichever product submits it."""

    DEMAND = 0
    """A thread waits for these bytes now."""
    PREFETCH = 1
    """A thread will wait for these bytes soon."""
    WRITE_BEHIND = 2
    """Memory is freed once the bytes are written."""
    BACKGROUND = 3
    """No thread will wait for these bytes soon; one that has to wait all the same raises the priority."""


class File(Protocol):
    """Open file as an engine uses it (see :mod:`penstock.io.files`)."""

    @property
    def fd(self) -> int:
        """File descriptor."""

    @property
    def path(self) -> str:
        """Path of the file, or directory of an unlinked one, for errors."""

    @property
    def direct(self) -> bool:
        """True if the file is open with O_DIRECT."""

    @property
    def granule_bytes(self) -> int:
        """Alignment of addresses, offsets and lengths of transfers (1 if buffered)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One contiguous transfer between memory and a file."""

    op: Op
    file: File
    offset_bytes: int
    """Offset in the file; a multiple of the file's granule."""
    address: int
    """Address in memory; a multiple of the file's granule."""
    nbytes: int
    """Length; a multiple of the file's granule."""
    keep_alive: object
    """Owner of the memory. The engine drops its reference when the memory is no longer accessed, just
    before the callbacks run and waiters wake: a callback that reads the memory must hold it itself."""
    priority: Priority = Priority.WRITE_BEHIND
    least_bytes: int | None = None
    """Bytes after which a read is complete: the file may end inside its last granule. None: all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadBatch:
    """Many short reads submitted together: row ``i`` of each array is one of them, an *entry*."""

    files: Sequence[File]
    which: NDArray[np.int64]
    """Index in ``files`` of each entry's file."""
    offset_bytes: NDArray[np.int64]
    """Offsets in the files. These four are as in :class:`Request`, for the granule of every file."""
    address: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    least_bytes: NDArray[np.int64]
    keep_alive: object
    """Owner of the memory, referenced until the transfer is settled."""
    priority: Priority = Priority.PREFETCH
    errors: dict[int, BaseException] = field(default_factory=dict)
    """Errors of entries, by row. Complete when the transfer is settled, which succeeds even so."""

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.nbytes)

    def request(self, entry: int) -> Request:
        """Return a request for one entry."""
        return Request(
            op="read",
            file=self.files[int(self.which[entry])],
            offset_bytes=int(self.offset_bytes[entry]),
            address=int(self.address[entry]),
            nbytes=int(self.nbytes[entry]),
            least_bytes=int(self.least_bytes[entry]),
            keep_alive=self.keep_alive,
            priority=self.priority,
        )


class Transfer:
    """Future of a request. Settled once, by the engine. Thread-safe."""

    __slots__ = (
        "_after",
        "_callbacks",
        "_cancel",
        "_error",
        "_finish",
        "_gates",
        "_lock",
        "_over",
        "_promote",
        "_settled",
        "_settling",
        "nbytes",
    )

    def __init__(
        self,
        nbytes: int,
        *,
        cancel: Callable[[Transfer], bool] | None = None,
        promote: Callable[[Transfer, Priority], None] | None = None,
    ) -> None:
        """Make an unsettled transfer.

        Args:
            nbytes: Bytes that it moves if it succeeds.
            cancel: Called by ``cancel``; cancels the request if no part of it has started.
            promote: Called by ``promote``.
        """
        self.nbytes = nbytes
        self._cancel = cancel
        self._promote = promote
        self._lock = Lock()
        # Of each waiter a bare lock, as an Event has one in Python, which a signal's handler that raises
        # may leave taken, so that the thread that settles the transfer would wait for it for ever.
        self._gates: list[LockType] = []
        self._finish: _Finish | None = None
        self._after: Callable[[], None] | None = None
        self._settling = False
        self._settled = False
        self._over = False  # settled, and every callback has run: waiters may continue
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []

    @property
    def done(self) -> bool:
        """True once it is settled, successfully or not; already true while the callbacks run."""
        return self._settled

    @property
    def error(self) -> BaseException | None:
        """Error of a failed transfer; ``None`` if it succeeded or is not settled yet."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait, with the GIL released, until settled. Never call it while holding a lock.

        Returns:
            The bytes moved, always ``nbytes``.

        Raises:
            TransferError: The transfer failed.
            CancelledError: It was cancelled before it began.
            TimeoutError: ``timeout_s`` passed.
        """
        if not self._wait(timeout_s):
            raise TimeoutError(f"a transfer of {self.nbytes} bytes is not done after {timeout_s} s")
        if self._error is not None:
            # what is raised refers to the waiters' frames, and these to this transfer
            raise renewed(self._error)
        return self.nbytes

    def wait_for_end(self) -> None:
        """Wait until settled, whatever its error is; an exception of a signal's handler is raised then.

        For those who free its memory next.
        """
        interrupt: BaseException | None = None
        while not self._over:
            try:
                self._wait(None)
            except BaseException as error:  # noqa: BLE001  (raised below)
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _wait(self, timeout_s: float | None) -> bool:
        gate = allocate_lock()
        gate.acquire()
        with self._lock:
            if self._over:
                return True
            self._gates.append(gate)
        return gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def cancel(self) -> bool:
        """Cancel the request if no part of it has started; return True if it is settled as cancelled."""
        cancel = self._cancel  # read once: a thread that settles it now resets it
        if cancel is None or self.done or not cancel(self):
            return False
        if not self._settling:  # a transfer that follows another is settled by the other's callback
            self.settle(CancelledError())
        return True

    def promote(self, priority: Priority) -> None:
        """Raise the priority of the parts that have not started; a lower priority is ignored."""
        promote = self._promote  # read once, as in cancel
        if promote is not None and not self.done:
            promote(self, priority)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(self)`` when settled, in the settling thread; at once if already settled.

        It must not raise: an error in a settling thread is reported to ``threading.excepthook``, and
        the other callbacks and the waiters continue.
        """
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish_with(self, finish: _Finish, after: Callable[[], None] | None = None) -> None:
        """Check the result before it is settled; only for tiers, which do so before they return it.

        A second ``finish`` is called after the first one.

        Args:
            finish: Called with the error, or None; returns the error with which to settle it.
            after: Called once everyone that waited knows.
        """
        with self._lock:
            if not self._settling:
                before, self._finish = self._finish, finish
                if before is not None:
                    self._finish = lambda error: finish(before(error))
                self._after = after or self._after
                return
        self._error = finish(self._error)  # settled already, and seen by nobody
        if after is not None:
            after()

    def settle(self, error: BaseException | None = None) -> None:
        """Settle the transfer; only for engines and tiers. Waiters wake after the callbacks ran."""
        with self._lock:
            assert not self._settling, "a transfer was settled twice"
            self._settling = True
            finish, self._finish = self._finish, None
            self._cancel = self._promote = None
            self._error = error
            self._settled = finish is None
            callbacks = self._next_callbacks() if finish is None else []
        if finish is not None:
            error = _finished(finish, error)
            del finish
            with self._lock:
                self._error = error
                self._settled = True
                callbacks = self._next_callbacks()
        while callbacks:
            for callback in callbacks:
                self._call(callback)
            with self._lock:
                callbacks = self._next_callbacks()
        for gate in self._gates:  # nobody adds one any more
            gate.release()
        after, self._after = self._after, None
        if after is not None:
            after()

    def _next_callbacks(self) -> list[Callable[[Transfer], None]]:
        """Take the callbacks that have not run; if there are none, it is over. Under the lock."""
        callbacks = self._callbacks
        if callbacks:
            self._callbacks = []
        else:
            self._over = True
        return callbacks

    def _call(self, callback: Callable[[Transfer], None]) -> None:
        try:
            callback(self)
        except BaseException as error:  # noqa: BLE001  (otherwise waiters would wait for ever)
            details = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(details))


def _finished(finish: _Finish, error: BaseException | None) -> BaseException | None:
    try:
        return finish(error)
    except BaseException as failure:  # noqa: BLE001  (otherwise waiters would wait for ever)
        return failure


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Properties of an engine."""

    name: str
    workers: int
    """Largest number of transfers in flight at once."""
    piece_bytes: int
    """Longest single transfer; a demand waits for at most ``workers`` of these."""
    gpu_direct: bool = False
    """True if addresses may be those of device memory."""


class Engine(ABC):
    """Mover of bytes between memory and files. Not usable in a forked child."""

    @property
    @abstractmethod
    def spec(self) -> EngineSpec:
        """Properties of this engine."""

    def start(self) -> None:
        """Start a thread in advance, if the engine uses threads. Idempotent.

        Needed to submit while the program ends: from Python 3.12 on no thread can be started then.

        Raises:
            RuntimeError: The system cannot start a thread.
        """
        return

    @abstractmethod
    def submit(self, request: Request) -> Transfer:
        """Begin a transfer; returns at once.

        Raises:
            ConfigError: Address, offset or length is not a multiple of the file's granule.
            ClosedError: The engine is closed, or this process was forked from its maker.
        """

    def submit_batch(self, batch: ReadBatch) -> Transfer:
        """Begin many reads; returns at once. Only ``close`` can cancel the transfer.

        By default each entry is a separate request. An engine that has a quicker way overrides this.

        Raises:
            ConfigError: As ``submit``.
            ClosedError: As ``submit``.
        """
        requests = (batch.request(entry) for entry in range(len(batch)))
        return _Joint(self, requests, int(batch.nbytes.sum()), batch.errors).transfer

    def unsettled(self) -> list[Transfer]:
        """Return the transfers of requests (not of batches) that were submitted and are not settled.

        One that submits and is interrupted by a signal's handler does not know whether its transfer has
        begun: nothing accesses its memory once each of these is settled.
        """
        return []

    @abstractmethod
    def close(self) -> None:
        """Cancel transfers that have not started, wait for the others, stop the workers. Idempotent."""


def submit_all(engine: Engine, requests: Sequence[Request]) -> Transfer:
    """Begin all of ``requests``; returns at once.

    The transfer settles once, after every request has, with the first error that is not a cancellation if
    there was any. It can be cancelled until the first request has begun. If another one has begun even
    so, ``cancel`` returns False, and the transfer settles as cancelled when that one ends.

    Raises:
        PenstockError: The engine refused the first request; nothing was begun. If it refuses a later one,
            the transfer fails, since something is in flight.
    """
    return _Joint(engine, requests, sum(request.nbytes for request in requests)).transfer


class _Joint:
    """Several requests as one transfer."""

    def __init__(
        self,
        engine: Engine,
        requests: Iterable[Request],
        nbytes: int,
        errors: dict[int, BaseException] | None = None,
    ) -> None:
        """Begin them; their errors go into ``errors``, by number, or are the transfer's if it is None."""
        self._errors = errors
        self._lock = Lock()
        self._left = 1  # for this loop
        self._error: BaseException | None = None
        self._parts: list[Transfer] = []
        self.transfer = Transfer(
            nbytes, cancel=self._cancel if errors is None else None, promote=self._promote
        )
        for number, request in enumerate(requests):
            try:
                part = engine.submit(request)
            except Exception as error:
                if not self._parts:
                    raise
                self._note(number, error)
                continue
            with self._lock:
                self._left += 1
            self._parts.append(part)
            part.add_done_callback(partial(self._part_done, number))
        self._over()

    def _part_done(self, number: int, part: Transfer) -> None:
        if part.error is not None:
            self._note(number, part.error)
        self._over()

    def _note(self, number: int, error: BaseException) -> None:
        with self._lock:
            if self._errors is not None:
                self._errors[number] = error
            elif self._error is None or isinstance(self._error, CancelledError):
                self._error = error

    def _over(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.transfer.settle(self._error)

    def _cancel(self, _: Transfer) -> bool:
        if not self._parts[0].cancel():
            return False
        withdrawn = [part.cancel() for part in self._parts[1:]]
        return all(withdrawn)

    def _promote(self, _: Transfer, priority: Priority) -> None:
        for part in list(self._parts):
            part.promote(priority)
