"""The event log: one JSON object per line, written while training runs.

What the lines say is the business of :mod:`penstock.observe.records`.

[Note: the log never stops training]
    ``append`` puts a tuple on a queue and is done; one daemon thread turns tuples into text and
    writes them, in pieces small enough that it never holds the GIL for long. So hot paths wait for
    no disk. If the queue is full, events are left out and counted. If a write fails, no more is
    written, and one warning says so at the next ``end_step``, ``flush`` or ``close``. A child that
    was forked neither writes to the log nor owns it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from collections import deque
from types import TracebackType
from typing import Any, Final

from penstock.core.errors import PenstockWarning, TransferError, transfer_error
from penstock.core.files import open_regular
from penstock.observe.clock import Clock, RealClock
from penstock.observe.events import RawEvent
from penstock.observe.records import LastWords, header_record, line_of, record_of
from penstock.observe.totals import StepTotals

MAX_PENDING: Final = 100_000
"""Events that may wait for the disk; about 20 MB."""
_BATCH: Final = 64
"""Events per write: 10 KB, and about 0.2 ms of the GIL."""
_POLL_S: Final = 0.2
_PATIENCE_S: Final = 10.0
"""How long ``flush`` and ``close`` wait for the disk."""

_Entry = RawEvent | StepTotals | LastWords | threading.Event


class EventLog:
    """A JSONL file that grows as events arrive. See [Note: the log never stops training].

    Close it, or leave a ``with`` block; one still open when the interpreter exits is closed then.
    Every method may be called from any thread.

    Attributes:
        path: The file.
        lost: How many events were left out because the disk did not keep up.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        """Create the file, or empty it, and start the writer.

        Args:
            path: The file.
            clock: The recorder's clock, for the header; defaults to the real one.

        Raises:
            TransferError: The file cannot be opened.
        """
        self.path = os.fspath(path)
        self.lost = 0
        self._pending: deque[_Entry] = deque()
        self._wake = threading.Event()
        self._writing = True
        self._closed = False
        self._error: OSError | None = None
        self._warned = False
        self._told_lost = 0
        self._fd = _open(self.path)
        _live.add(self)
        atexit.register(self.close)
        header = header_record(RealClock() if clock is None else clock)
        self._thread = threading.Thread(
            target=self._run, args=(header,), name="penstock-log", daemon=True
        )
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a write failed, after which nothing more is written."""
        return self._error is not None

    def append(self, event: RawEvent) -> None:
        """Log an event soon; returns at once. After ``close``, or a failure, it is dropped."""
        if not self._writing:
            return
        if len(self._pending) < MAX_PENDING:
            self._pending.append(event)
        else:
            self.lost += 1

    def end_step(self, step: StepTotals) -> None:
        """Log the totals of a step, and write out now what waits; does not wait for it."""
        if self._writing:
            self._pending.append(step)
            self._wake.set()
        self._warn_of_failure()

    def conclude(self, last: LastWords) -> None:
        """Log what a session says of itself at its end. Returns at once."""
        if self._writing:
            self._pending.append(last)

    def flush(self) -> bool:
        """Wait, ten seconds at most, until all that was appended is with the operating system.

        Returns:
            Whether it is. ``False`` after a failure, or if the disk takes longer.
        """
        if self._writing:
            reached = threading.Event()
            self._pending.append(reached)
            self._wake.set()
            reached.wait(_PATIENCE_S)
            written = reached.is_set() and not self.failed
        else:
            written = not self.failed
        self._warn_of_failure()
        return written

    def close(self) -> None:
        """Write what waits, and close the file. Idempotent; waits ten seconds at most."""
        if self._closed:
            return
        self._closed = True
        self._writing = False
        atexit.unregister(self.close)
        _live.discard(self)
        self._wake.set()
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive() and self._error is None:
            self._error = TimeoutError(f"the disk did not answer for {_PATIENCE_S:.0f} s")
        self._warn_of_failure()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # -- the writer's thread ----------------------------------------------------------------------

    def _run(self, header: dict[str, Any]) -> None:
        try:
            self._write([header])
            while not self._closed:
                self._wake.wait(_POLL_S)
                self._wake.clear()
                self._drain()
            self._drain()
            self._write([{"kind": "end"}])
        finally:
            with contextlib.suppress(OSError):
                os.close(self._fd)

    def _drain(self) -> None:
        while self._pending:
            records: list[dict[str, Any]] = []
            reached: list[threading.Event] = []
            while self._pending and len(records) < _BATCH:
                entry = self._pending.popleft()
                if isinstance(entry, threading.Event):
                    reached.append(entry)
                else:
                    records.append(record_of(entry))
            if self.lost > self._told_lost:
                records.append({"kind": "lost", "count": self.lost - self._told_lost})
                self._told_lost = self.lost
            self._write(records)
            for event in reached:
                event.set()

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self._error is not None or not records:
            return
        data = memoryview("".join(line_of(record) for record in records).encode())
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._error = error
            self._writing = False

    # -- inside -----------------------------------------------------------------------------------

    def _warn_of_failure(self) -> None:
        if self._error is None or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the event log {self.path!r} cannot be written ({self._error}); it ends here and"
            " training goes on. Free some space, or name another file, before the next run",
            PenstockWarning,
            stacklevel=3,
        )

    def _abandon(self) -> None:
        """In a forked child: the parent's log is none of our business."""
        self._writing = False
        self._closed = True
        self._pending.clear()
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            os.close(self._fd)


_live: weakref.WeakSet[EventLog] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for log in list(_live):
        log._abandon()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _open(path: str) -> int:
    try:
        return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    except TransferError:
        raise
    except OSError as error:
        raise transfer_error(
            errno=error.errno or 0, op="open", path=path, offset_bytes=0, nbytes=0
        ) from error
