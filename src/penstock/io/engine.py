"""The seam through which every byte of Penstock's own I/O goes.

A tier, the benchmarks, later the checkpoints and data sets say what to move; an engine moves it:

1. The owner opens files with :func:`penstock.io.files.open_unlinked` (or ``open_path``) and asks
   each for its ``granule_bytes``.
2. It calls :meth:`Engine.submit` with a :class:`Request`, from any thread; that waits for no I/O.
3. A worker of the engine splits the request, continues short transfers, and settles the
   :class:`Transfer`: with the bytes moved, or with a typed error. It never settles with fewer bytes
   than were asked for.
4. Whoever needs the bytes calls :meth:`Transfer.wait`; a waiter may :meth:`Transfer.promote` first.
5. The owner closes its files after the engine, or after their last transfer.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from penstock.core.locks import Lock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Op = Literal["read", "write"]


class Priority(enum.IntEnum):
    """Who goes first. A waiting computation outranks a guess, and a guess outranks tidying up."""

    DEMAND = 0
    """Somebody waits for these bytes now."""
    PREFETCH = 1
    """Somebody will need them soon."""
    WRITE_BEHIND = 2
    """Memory is freed when they are gone."""
    READ_AHEAD = 3
    """Batches of data for steps to come: a training that has to wait for one makes it a demand."""


class File(Protocol):
    """An open file as an engine sees it (see :mod:`penstock.io.files`)."""

    @property
    def fd(self) -> int:
        """The descriptor."""

    @property
    def path(self) -> str:
        """What to call the file in an error: its path, or the directory of an unlinked one."""

    @property
    def direct(self) -> bool:
        """Whether the file is open with O_DIRECT."""

    @property
    def granule_bytes(self) -> int:
        """Addresses, offsets and lengths of transfers must be multiples of this (1 if buffered)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One contiguous transfer between memory and a file."""

    op: Op
    file: File
    offset_bytes: int
    """Where in the file; a multiple of the file's granule."""
    address: int
    """Where in memory; a multiple of the file's granule."""
    nbytes: int
    """How much; a multiple of the file's granule."""
    keep_alive: object
    """Owner of the memory. The engine lets go of it when nothing touches the memory any more, just
    before the callbacks run and waiters wake: a callback that reads the memory holds it itself."""
    priority: Priority = Priority.WRITE_BEHIND
    least_bytes: int | None = None
    """A read that moved so many is whole: the file may end inside its last granule. All if None."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Many short reads, handed over together: row ``i`` of each array is one of them, an *entry*."""

    files: Sequence[File]
    which: NDArray[np.int64]
    """Number of the entry's file in ``files``."""
    offset_bytes: NDArray[np.int64]
    """As of :class:`Request`, all of these; multiples of the granule of every file."""
    address: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    least_bytes: NDArray[np.int64]
    keep_alive: object
    """Owner of the memory; not let go of before the transfer is settled."""
    priority: Priority = Priority.PREFETCH
    errors: dict[int, BaseException] = field(default_factory=dict)
    """Why entries failed, by row. Complete when the transfer is settled: it succeeds all the same."""

    def __len__(self) -> int:
        """How many entries."""
        return len(self.nbytes)

    def request(self, entry: int) -> Request:
        """One entry by itself."""
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
    """What becomes of a request. Settled once, by the engine. Thread-safe."""

    __slots__ = (
        "_callbacks",
        "_cancel",
        "_error",
        "_event",
        "_lock",
        "_over",
        "_promote",
        "_settled",
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
            nbytes: Bytes that it moves when all goes well.
            cancel: Asked by ``cancel``: withdraw the request if nothing of it has started.
            promote: Told by ``promote``.
        """
        self.nbytes = nbytes
        self._cancel = cancel
        self._promote = promote
        self._lock = Lock()
        self._event: threading.Event | None = None  # for waiters; few transfers have one
        self._settled = False
        self._over = False  # settled, and every callback has run: waiters may go on
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []

    @property
    def done(self) -> bool:
        """Whether it is settled, in whichever way; true before the callbacks run."""
        return self._settled

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once settled; ``None`` if it succeeded (or is not settled yet)."""
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
            raise self._error.with_traceback(None)  # else it would keep every waiter's frame alive
        return self.nbytes

    def _wait(self, timeout_s: float | None) -> bool:
        with self._lock:
            if self._over:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout_s)

    def cancel(self) -> bool:
        """Withdraw the request if no part of it has started. True: settled as cancelled."""
        withdraw = self._cancel  # read once: a thread that settles it now resets it
        if withdraw is None or self.done or not withdraw(self):
            return False
        if not self.done:  # a transfer that follows another is settled by that one's callback
            self.settle(CancelledError())
        return True

    def promote(self, priority: Priority) -> None:
        """Raise the priority of what has not started yet; a lower one is ignored."""
        promote = self._promote  # read once, as in cancel
        if promote is not None and not self.done:
            promote(self, priority)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(self)`` when settled, in the settling thread; at once if settled.

        It must not raise: in a settling thread that is reported to ``threading.excepthook``, and
        the other callbacks and the waiters go on.
        """
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self)

    def settle(self, error: BaseException | None = None) -> None:
        """For engines and tiers: the transfer is over. Waiters wake after the callbacks ran."""
        with self._lock:
            assert not self._settled, "a transfer was settled twice"
            self._error = error
            self._settled = True
            self._cancel = self._promote = None
        while True:
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
                if not callbacks:
                    self._over = True
                    event = self._event
                    break
            for callback in callbacks:
                self._call(callback)
        if event is not None:
            event.set()

    def _call(self, callback: Callable[[Transfer], None]) -> None:
        try:
            callback(self)
        except BaseException as error:  # noqa: BLE001  (else waiters would wait for ever)
            details = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(details))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What an engine is, asked up front."""

    name: str
    workers: int
    """Transfers in flight at once."""
    piece_bytes: int
    """The longest single transfer; a demand waits for at most ``workers`` of these."""
    gpu_direct: bool = False
    """Whether addresses may be those of device memory."""


class Engine(ABC):
    """Moves bytes between memory and files. One per process: not usable in a forked child."""

    @property
    @abstractmethod
    def spec(self) -> EngineSpec:
        """What this engine is."""

    def start(self) -> None:
        """Have a thread ready for what will be submitted, if threads move it. Idempotent.

        For whoever submits when the program ends: from Python 3.12 on none can be started then.

        Raises:
            RuntimeError: The system starts none.
        """
        return

    @abstractmethod
    def submit(self, request: Request) -> Transfer:
        """Begin a transfer; returns at once.

        Raises:
            ConfigError: Address, offset or length is not a multiple of the file's granule.
            ClosedError: The engine is closed, or this process was forked from its maker.
        """

    def submit_batch(self, batch: Batch) -> Transfer:
        """Begin many reads; returns at once. The transfer cannot be cancelled, but by ``close``.

        Here each is a request of its own. An engine that has a quicker way overrides this.

        Raises:
            ConfigError: As ``submit``.
            ClosedError: As ``submit``.
        """
        return _Entries(self, batch).transfer

    @abstractmethod
    def close(self) -> None:
        """Cancel what has not started, wait for what has, stop the workers. Idempotent."""


class _Entries:
    """A batch as requests, each by itself."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self._batch = batch
        self._lock = Lock()
        self._left = len(batch) + 1  # one for this loop
        self._parts: list[Transfer] = []
        self.transfer = Transfer(int(batch.nbytes.sum()), promote=self._promote)
        for entry in range(len(batch)):
            try:
                part = engine.submit(batch.request(entry))
            except Exception as error:
                if not self._parts:
                    raise
                self._over(entry, error)
                continue
            self._parts.append(part)
            part.add_done_callback(partial(self._part_done, entry))
        self._over(-1, None)

    def _part_done(self, entry: int, part: Transfer) -> None:
        self._over(entry, part.error)

    def _over(self, entry: int, error: BaseException | None) -> None:
        with self._lock:
            if error is not None:
                self._batch.errors[entry] = error
            self._left -= 1
            last = self._left == 0
        if last:
            self.transfer.settle()

    def _promote(self, transfer: Transfer, priority: Priority) -> None:
        for part in list(self._parts):
            part.promote(priority)
