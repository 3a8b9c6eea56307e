"""The event log: one JSON object per line, in files that rotate, written while training runs.

What the lines say is the business of :mod:`penstock.observe.records`.

[Note: the log never stops training]
    ``append`` puts a tuple on a queue and is done; one daemon thread turns tuples into text and
    writes them, in pieces small enough that it never holds the GIL for long. So hot paths wait for
    no disk. If the queue is full, events are left out and counted. If a write fails, no more is
    written, and one warning says so at the next ``end_step``, ``flush`` or ``close``. A child that
    was forked neither writes to the log nor owns it.

[Note: rotated logs]
    A full file is renamed to ``NAME.1``, an older ``NAME.1`` to ``NAME.2``, and so on, as
    ``logging.handlers.RotatingFileHandler`` does; the oldest goes. Each file has the header of the run,
    with its own number and the marks that describe the run, so that what is left of a log still says
    what it is of. Times and process in the header tell files of one run from those of an earlier one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
from collections import deque
from types import TracebackType
from typing import Any, Final

from penstock.core.errors import PenstockWarning, TransferError, transfer_error
from penstock.core.files import open_regular
from penstock.core.process import release_in_child
from penstock.core.units import MIB
from penstock.observe.clock import Clock, RealClock
from penstock.observe.counters import SESSION
from penstock.observe.events import MARK, RawEvent
from penstock.observe.foreseen import PREDICTION
from penstock.observe.records import LastWords, header_record, line_of, record_of
from penstock.observe.totals import StepTotals

MAX_PENDING: Final = 100_000
"""Events that may wait for the disk; about 20 MB."""
FILE_BYTES: Final = 64 * MIB
"""Size at which a file is rotated, if not told otherwise."""
FILES: Final = 8
"""Files of a log, if not told otherwise."""
_STANDING: Final = (SESSION, PREDICTION)
"""Marks of which the latest is repeated in each file: they describe the run."""
_BATCH: Final = 64
"""Events per write: 10 KB, and about 0.2 ms of the GIL."""
_POLL_S: Final = 0.2
_PATIENCE_S: Final = 10.0
"""How long ``flush`` and ``close`` wait for the disk."""

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC

_Entry = RawEvent | StepTotals | LastWords | threading.Event


class EventLog:
    """A JSONL file that grows as events arrive, and rotates.

    See [Note: the log never stops training] and [Note: rotated logs].

    Close it, or leave a ``with`` block; one still open when the interpreter exits is closed then.
    Every method may be called from any thread.

    Attributes:
        path: The file.
        lost: How many events were left out because the disk did not keep up.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        file_bytes: int = FILE_BYTES,
        files: int = FILES,
    ) -> None:
        """Create the file, or empty it, and start the writer.

        Args:
            path: The file.
            clock: The recorder's clock, for the header; defaults to the real one.
            file_bytes: Size that a file does not exceed, unless a single write of 64 lines does.
            files: How many files there are at most, the one that is written to included.

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
        self._place = os.path.abspath(self.path)  # the program may change its directory
        self._file_limit_bytes = file_bytes
        self._files = files
        self._number = 0
        self._file_bytes = 0
        self._standing: dict[str, dict[str, Any]] = {}
        self._fd = _open(self.path)
        release_in_child(self, EventLog._abandon)
        atexit.register(self.close)
        self._header = header_record(RealClock() if clock is None else clock)
        self._thread = threading.Thread(target=self._run, name="penstock-log", daemon=True)
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

    def _run(self) -> None:
        try:
            self._write([self._header])
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
                    if type(entry) is tuple and entry[0] == MARK and entry[2] in _STANDING:
                        self._standing[entry[2]] = records[-1]
            if self.lost > self._told_lost:
                records.append({"kind": "lost", "count": self.lost - self._told_lost})
                self._told_lost = self.lost
            self._write(records)
            for event in reached:
                event.set()

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
        """Go on in a new file. Raises OSError, with the file of before still open."""
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
        self._put(line_of(header).encode())

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
        """Close the descriptor in a forked child, which writes nothing; harmless after ``close``."""
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
