"""The event log: one JSON object per line, in files that rotate, written while training runs.

The contents of the lines are defined in :mod:`penstock.observe.records`.

[Note: the log never stops training]
    ``append`` only puts a tuple on a queue; one daemon thread turns tuples into text and writes
    them, in pieces small enough that it never holds the GIL for long. So hot paths never wait for
    the disk. If the queue is full, events are dropped and counted. After a failed write nothing
    more is written, and one warning says so at the next ``end_step``, ``flush`` or ``close``. A
    forked child neither writes to the log nor owns it.

[Note: rotated logs]
    A full file is renamed to ``NAME.1``, an older ``NAME.1`` to ``NAME.2``, and so on, as
    ``logging.handlers.RotatingFileHandler`` does; the oldest is removed. Each file has the header of the
    run, with its own number and the marks that describe the run, so that the remaining files still
    describe it. Times and process in the header distinguish the files of one run from older ones.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.core.errors import PenstockWarning, TransferError, transfer_error
from penstock.core.files import open_regular
from penstock.core.process import release_in_child
from penstock.core.units import MIB
from penstock.observe.clock import Clock, RealClock
from penstock.observe.counters import SESSION
from penstock.observe.events import MARK, RawEvent
from penstock.observe.forecast import PREDICTION
from penstock.observe.records import HOLDINGS, PLAN, header_record, line_of, record_of
from penstock.observe.totals import StepTotals

MAX_PENDING: Final = 100_000
"""Maximum number of events that wait for the disk; about 20 MB."""
FILE_BYTES: Final = 64 * MIB
"""Default size at which a file is rotated."""
FILES: Final = 8
"""Default number of files of a log."""
_STANDING: Final = (SESSION, PREDICTION)
"""Marks that describe the run: the latest of each is repeated in each file."""
_BATCH: Final = 64
"""Events per write: 10 KB, and about 0.2 ms of the GIL."""
_POLL_S: Final = 0.2
_MOST_OF_FILE: Final = 4
"""Divisor of a file's limit: plans that take more than this part are not repeated in each file."""
_PATIENCE_S: Final = 10.0
"""Time limit of ``flush`` and ``close`` for the disk."""

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC

_Entry = RawEvent | StepTotals | dict[str, Any] | threading.Event


class EventLog:
    """A JSONL file that grows as events arrive, and rotates.

    See [Note: the log never stops training] and [Note: rotated logs].

    Close it, or use a ``with`` block; a log still open when the interpreter exits is closed then.
    Every method may be called from any thread.

    Attributes:
        path: Path of the file.
        lost: Number of events dropped because the disk did not keep up.
        sample: Returns the fields of a line of kind ``holdings``, or ``None`` for no line; called by the
            writer's thread, at most five times a second. ``None``: there are no such lines.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        file_bytes: int = FILE_BYTES,
        files: int = FILES,
    ) -> None:
        """Create or truncate the file, and start the writer.

        Args:
            path: Path of the file.
            clock: The recorder's clock, for the header; defaults to the real one.
            file_bytes: Maximum size of a file, unless a single write of 64 lines exceeds it.
            files: Maximum number of files, including the current one.

        Raises:
            TransferError: The file cannot be opened.
        """
        self.path = os.fspath(path)
        self.lost = 0
        self.sample: Callable[[], Mapping[str, Any] | None] | None = None
        self._clock: Clock = RealClock() if clock is None else clock
        self._next_sample_ns = 0
        self._pending: deque[_Entry] = deque()
        self._wake = threading.Event()
        self._writing = True
        self._closed = False
        self._error: OSError | None = None
        self._warned = False
        self._reported_lost = 0
        self._place = os.path.abspath(self.path)  # the program may change its directory
        self._file_limit_bytes = file_bytes
        self._files = files
        self._number = 0
        self._file_bytes = 0
        self._standing: dict[str, dict[str, Any]] = {}
        self._plans: dict[str, dict[str, Any]] = {}
        self._fd = _open(self.path)
        release_in_child(self, EventLog._abandon)
        atexit.register(self.close)
        self._header = header_record(self._clock)
        self._thread = threading.Thread(target=self._run, name="penstock-log", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True after a failed write, when nothing more is written."""
        return self._error is not None

    def append(self, event: RawEvent) -> None:
        """Queue an event and return at once. After ``close``, or a failure, it is dropped."""
        if not self._writing:
            return
        if len(self._pending) < MAX_PENDING:
            self._pending.append(event)
        else:
            self.lost += 1

    def end_step(self, step: StepTotals) -> None:
        """Queue the totals of a step and start writing the queue, without waiting."""
        if self._writing:
            self._pending.append(step)
            self._wake.set()
        self._warn_of_failure()

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Queue a line that is no event, with plain values. Returns at once."""
        if self._writing:
            self._pending.append({"kind": kind, **fields})

    def conclude(self, summary: Mapping[str, Any]) -> None:
        """Queue a session's summary at its end. Returns at once."""
        self.write("summary", {"summary": dict(summary)})

    def flush(self) -> bool:
        """Wait up to ten seconds until the operating system has all that was appended.

        Returns:
            True if it has. ``False`` after a failure, or if the disk takes longer.
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
        """Write the queue and close the file. Idempotent; waits up to ten seconds."""
        if self._closed:
            return
        self._closed = True
        self._writing = False
        atexit.unregister(self.close)
        self._wake.set()
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive() and self._error is None:
            self._error = TimeoutError(f"the disk did not answer for {_PATIENCE_S:.0f} s")
        self._warn_of_failure()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the writer's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write([self._header])
            while not self._closed:
                self._wake.wait(_POLL_S)
                self._wake.clear()
                self._drain()
                self._take_sample()
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
                    self._keep_standing(entry, records[-1])
            if self.lost > self._reported_lost:
                records.append({"kind": "lost", "count": self.lost - self._reported_lost})
                self._reported_lost = self.lost
            self._write(records)
            for event in reached:
                event.set()

    def _keep_standing(self, entry: _Entry, record: dict[str, Any]) -> None:
        """Keep what is repeated in each file."""
        if type(entry) is tuple and entry[0] == MARK and entry[2] in _STANDING:
            self._standing[entry[2]] = record
        elif record["kind"] == PLAN:
            self._plans[record["device"]] = record

    def _take_sample(self) -> None:
        now_ns = self._clock.now_ns()
        if self.sample is None or now_ns < self._next_sample_ns:
            return
        self._next_sample_ns = now_ns + int(_POLL_S * 1e9)
        if (fields := self.sample()) is not None:
            self._write([{"kind": HOLDINGS, "t_ns": now_ns, **fields}])

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self._error is not None or not records:
            return
        data = "".join(line_of(record) for record in records).encode()
        try:
            if self._file_bytes and self._file_bytes + len(data) > self._file_limit_bytes:
                self._rotate()
            self._put(data)
        except OSError as error:
            self._error = error
            self._writing = False

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._file_bytes += len(data)

    def _rotate(self) -> None:
        """Continue in a new file. Raises OSError, with the old file still open."""
        names = [self._place, *(f"{self._place}.{n}" for n in range(1, self._files))]
        for older, newer in reversed([*zip(names[1:], names, strict=False)]):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)
        full, self._fd = self._fd, open_regular(self._place, _FLAGS)
        os.close(full)
        self._number += 1
        self._file_bytes = 0
        marks = list(self._standing.values())
        header = self._header | {"file": self._number, "marks": marks}
        plans = "".join(map(line_of, self._plans.values()))
        if len(plans) > self._file_limit_bytes // _MOST_OF_FILE:
            plans = ""
        self._put((line_of(header) + plans).encode())

    # -- private ----------------------------------------------------------------------------------

    def _warn_of_failure(self) -> None:
        if self._error is None or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the event log {self.path!r} cannot be written ({self._error}); it ends here and"
            " training continues. Free some space, or name another file, before the next run",
            PenstockWarning,
            stacklevel=3,
        )

    def _abandon(self) -> None:
        """Close the parent's file in a forked child, without writing to it."""
        if self._closed:
            return
        self._writing = False
        self._closed = True
        self._pending.clear()
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _open(path: str) -> int:
    try:
        return open_regular(path, _FLAGS)
    except TransferError:
        raise
    except OSError as error:
        raise transfer_error(
            errno=error.errno or 0, op="open", path=path, offset_bytes=0, nbytes=0
        ) from error
