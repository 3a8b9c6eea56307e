"""Channel between a manager and a job: a small file that outlives both.

[Note: channel]
    The file has two halves of one page each, one per writer: the manager's order, and the job's status.
    A half is one JSON object after its length and checksum, and overwrites the previous one; a reader of
    a half that is being written sees a wrong checksum and reads again later. The job polls between two
    steps and while it sleeps, so it needs neither a thread nor signals, and keeps its present state when
    its manager dies. The next manager reads the same file.

    The space of the file is reserved when it is created, so that writes succeed even if the disk is full
    later. A failed write is repeated at the next poll.

    The manager holds a lock on the file in a descriptor that the job inherits: while any process of the
    job lives, no other process gets that lock. A process number alone may have been reused.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from penstock.core.errors import JobError
from penstock.core.fs import try_lock

_HALF_BYTES: Final = 4096
_HEAD: Final = struct.Struct("<II")
_MAX_BYTES: Final = _HALF_BYTES - _HEAD.size
_REPORT_LIMIT_S: Final = 20.0
"""Time limit for a process that an earlier manager has just started to report its number."""
_MAX_REASON_LETTERS: Final = 600
"""Maximum length of a reason. In ASCII, with JSON's escapes, it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerOrder:
    """Order of the manager."""

    number: int = 0
    """Number of the order."""
    sleep: bool = False
    fetch_bytes: int = 0
    """Bytes that may be resident again while it sleeps."""


@dataclass(kw_only=True, slots=True)
class Status:
    """Status of a job, as it reports it."""

    pid: int = 0
    start_ticks: int = 0
    """Start time in the kernel's ticks; with ``pid`` it identifies the process."""
    state: str = "starting"
    """State: ``starting``, ``awake``, ``suspending``, ``asleep``, ``waking`` or ``over``."""
    order: int = 0
    """Number of the last order that it has followed or refused."""
    refused: str = ""
    """Reason why it refused the order to sleep."""
    steps: int = 0
    flash_bytes: int = 0
    """Bytes of its memory that are on flash."""
    fetched_bytes: int = 0
    """Bytes of those that are resident again."""
    moved_bytes: int = 0
    """Total bytes moved to and from flash by suspending and resuming."""
    moving_s: float = 0.0
    """Total time of those transfers."""
    sleeps: int = 0
    code: int | None = None
    """Exit code, once it is known."""


class _Half:
    """One writer's part of the file."""

    def __init__(self, fd: int, place: int) -> None:
        self._fd = fd
        self._offset = place * _HALF_BYTES
        self._head = self._unwritten = b""

    def write(self, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, separators=(",", ":")).encode()
        assert len(text) <= _MAX_BYTES
        self._unwritten = _HEAD.pack(len(text), zlib.crc32(text)) + text
        self.retry_write()

    def retry_write(self) -> None:
        """Repeat a failed write, if there is one. Errors are ignored, as they must end neither side."""
        if self._unwritten:
            with suppress(OSError):
                os.pwrite(self._fd, self._unwritten, self._offset)
                self._unwritten = b""

    def read(self) -> dict[str, Any] | None:
        """Return what was written since the last call; None if there is nothing new or complete."""
        try:
            return self._read()
        except OSError:
            return None

    def _read(self) -> dict[str, Any] | None:
        head = os.pread(self._fd, _HEAD.size, self._offset)
        if head == self._head or len(head) < _HEAD.size:
            return None
        nbytes, checksum = _HEAD.unpack(head)
        if not 0 < nbytes <= _MAX_BYTES:
            return None
        text = os.pread(self._fd, nbytes, self._offset + _HEAD.size)
        if zlib.crc32(text) != checksum:
            return None
        self._head = head
        try:
            found = json.loads(text)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


class JobEnd:
    """The job's end. For one thread, but any thread may read ``status``.

    Attributes:
        status: Status of the job; call ``tell`` after changes.
        order: Latest order that was read.
    """

    def __init__(self, path: str) -> None:
        """Open the file that the manager has created. Raises JobError."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise JobError(
                f"channel {path!r} cannot be opened: {error.strerror}; it is created by a manager"
            ) from error
        self._orders = _Half(self._fd, 0)
        self._mine = _Half(self._fd, 1)
        self.order = ManagerOrder()
        self.status = Status(pid=os.getpid(), start_ticks=start_ticks(os.getpid()) or 0)
        self.tell()

    def look(self) -> ManagerOrder:
        """Read and return the manager's present order."""
        self._mine.retry_write()
        found = self._orders.read()
        if found is not None:
            self.order = _decoded(ManagerOrder, found) or self.order
        return self.order

    def tell(self, **changes: Any) -> None:
        """Change the status and write it for the manager."""
        for name, value in changes.items():
            setattr(self.status, name, value)
        document = asdict(self.status)
        document["refused"] = _shortened(self.status.refused)
        self._mine.write(document)


class ManagerEnd:
    """The manager's end.

    Attributes:
        status: Latest status that was read.
        order: Latest order that was written.
    """

    def __init__(self, path: str) -> None:
        """Open the file, or create it; existing content stays. Raises JobError."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._not_created(error) from error
        try:
            os.posix_fallocate(self._fd, 0, 2 * _HALF_BYTES)
        except OSError as error:
            os.close(self._fd)
            raise self._not_created(error) from error
        self._mine = _Half(self._fd, 0)
        self._job = _Half(self._fd, 1)
        self.status = Status()
        found = self._mine.read()
        self.order = (None if found is None else _decoded(ManagerOrder, found)) or ManagerOrder()
        self.look()

    def clear(self) -> None:
        """Erase the file, when no process of an earlier job lives. Raises JobError."""
        try:
            os.pwrite(self._fd, bytes(2 * _HALF_BYTES), 0)
        except OSError as error:
            raise self._not_created(error) from error
        self.status = Status()
        self.order = ManagerOrder()

    def _not_created(self, error: OSError) -> JobError:
        return JobError(f"channel {self.path!r} cannot be created: {error.strerror}")

    def look(self) -> Status:
        """Read and return the job's present status."""
        self._mine.retry_write()
        found = self._job.read()
        if found is not None:
            self.status = _decoded(Status, found) or self.status
        return self.status

    def want(self, *, sleep: bool, fetch_bytes: int = 0) -> None:
        """Write an order to the job."""
        self.order = ManagerOrder(
            number=self.order.number + 1, sleep=sleep, fetch_bytes=fetch_bytes
        )
        self._mine.write(asdict(self.order))

    def lock_for_child(self) -> int | None:
        """Return a descriptor with the lock, for inheritance; None if a process of the job lives."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if try_lock(fd):
            return fd
        os.close(fd)
        return None

    def has_process(self) -> bool:
        """Return whether any process of the job lives."""
        try:
            fd = self.lock_for_child()
        except OSError:  # the file was deleted
            return False
        if fd is None:
            return True
        os.close(fd)
        return False

    def wait_for_pid(self) -> Status:
        """Wait until the job has reported its process number; return the status. Raises JobError."""
        end = time.monotonic() + _REPORT_LIMIT_S
        while not self.look().pid and self.has_process():
            if time.monotonic() > end:
                raise JobError(
                    f"a process has locked {self.path!r} but does not report its number: end the process"
                    " and remove that file"
                )
            time.sleep(_REPORT_LIMIT_S / 1000)
        return self.status

    def close(self) -> None:
        """Close the file; the job has its own descriptor."""
        os.close(self._fd)


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in the kernel's ticks since boot; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            after_name = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])


def _decoded(kind: type[Any], found: Mapping[str, Any]) -> Any:
    """Decode a value that the other side wrote; return None if it is of another version."""
    known = {each.name: each for each in fields(kind)}
    plain = kind()
    for name, value in found.items():
        if name not in known:
            return None
        default = getattr(plain, name)
        if default is not None and not isinstance(value, type(default) | int):
            return None
    return kind(**found)


def _shortened(text: str) -> str:
    plain = text.encode("ascii", "replace").decode()
    return plain if len(plain) <= _MAX_REASON_LETTERS else plain[: _MAX_REASON_LETTERS - 3] + "..."
