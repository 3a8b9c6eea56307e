"""What a manager and a job tell each other: a small file, which both survive.

[Note: channel]
    The file has two halves of a page each, one per writer: what the manager wants, and how the job is.
    A half is one JSON object after its length and checksum, written over the one before; who reads a
    half that is being written sees that by the checksum, and looks again later. The job looks between
    two steps and while it sleeps, so it needs neither a thread nor signals, and goes on in the state
    that it is in when its manager dies. The next manager reads the same file.

    The space of the file is reserved when it is made, so that a disk that is full later takes nothing
    from those who live. What could not be written all the same is written at the next look.

    The manager holds a lock on the file in a descriptor that the job inherits: as long as any process
    of the job lives, nobody else gets that lock. A process number alone may be another's by then.
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
_MOST_BYTES: Final = _HALF_BYTES - _HEAD.size
_SAYS_WHO_S: Final = 20.0
"""For so long is waited for a process that an earlier manager has just begun."""
_REFUSED_LETTERS: Final = 600
"""Of a reason. In ASCII, with what JSON escapes, it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the manager wants."""

    number: int = 0
    """Counts orders."""
    sleep: bool = False
    fetch_bytes: int = 0
    """While it sleeps, so much may be back in memory."""


@dataclass(kw_only=True, slots=True)
class Status:
    """How a job is, by its own account."""

    pid: int = 0
    start_ticks: int = 0
    """When it began, as the kernel counts; with ``pid`` it is nobody else."""
    state: str = "starting"
    """``starting``, ``awake``, ``suspending``, ``asleep``, ``waking``, ``over``."""
    order: int = 0
    """Number of the last order that it has followed, or refused."""
    refused: str = ""
    """Why it does not sleep as it was told."""
    steps: int = 0
    flash_bytes: int = 0
    """What of it is on flash."""
    fetched_bytes: int = 0
    """What of that is back already."""
    moved_bytes: int = 0
    """To and from flash, for sleeping, in all."""
    moving_s: float = 0.0
    """How long that has taken."""
    sleeps: int = 0
    code: int | None = None
    """Its exit code, once that is known."""


class _Half:
    """One writer's part of the file."""

    def __init__(self, fd: int, place: int) -> None:
        self._fd = fd
        self._offset = place * _HALF_BYTES
        self._head = self._unwritten = b""

    def write(self, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, separators=(",", ":")).encode()
        assert len(text) <= _MOST_BYTES
        self._unwritten = _HEAD.pack(len(text), zlib.crc32(text)) + text
        self.write_again()

    def write_again(self) -> None:
        """Write what could not be written, if there is any: a failure here must end neither side."""
        if self._unwritten:
            with suppress(OSError):
                os.pwrite(self._fd, self._unwritten, self._offset)
                self._unwritten = b""

    def read(self) -> dict[str, Any] | None:
        """What was written since the last call; None: nothing, or it is not whole."""
        try:
            return self._read()
        except OSError:
            return None

    def _read(self) -> dict[str, Any] | None:
        head = os.pread(self._fd, _HEAD.size, self._offset)
        if head == self._head or len(head) < _HEAD.size:
            return None
        nbytes, checksum = _HEAD.unpack(head)
        if not 0 < nbytes <= _MOST_BYTES:
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
    """The job's end. For one thread, but that ``status`` may be read by any.

    Attributes:
        status: Change it, and call ``tell``.
        order: What the manager wanted when it was last looked.
    """

    def __init__(self, path: str) -> None:
        """Open the file that the manager has made. Raises JobError."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise JobError(
                f"channel {path!r} cannot be opened: {error.strerror}; a manager makes it"
            ) from error
        self._orders = _Half(self._fd, 0)
        self._mine = _Half(self._fd, 1)
        self.order = Order()
        self.status = Status(pid=os.getpid(), start_ticks=start_ticks(os.getpid()) or 0)
        self.tell()

    def look(self) -> Order:
        """What the manager wants now."""
        self._mine.write_again()
        found = self._orders.read()
        if found is not None:
            self.order = _made(Order, found) or self.order
        return self.order

    def tell(self, **changes: Any) -> None:
        """Change the status, and let the manager see it."""
        for name, value in changes.items():
            setattr(self.status, name, value)
        document = asdict(self.status)
        document["refused"] = _short(self.status.refused)
        self._mine.write(document)


class ManagerEnd:
    """The manager's end.

    Attributes:
        status: What the job last told.
        order: What it was last told.
        lock_fd: Holds the lock; to be inherited by the job, and closed here once it was.
    """

    def __init__(self, path: str) -> None:
        """Open the file, which is made if need be; what is in it stays. Raises JobError."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._unmade(error) from error
        try:
            os.posix_fallocate(self._fd, 0, 2 * _HALF_BYTES)
        except OSError as error:
            os.close(self._fd)
            raise self._unmade(error) from error
        self._mine = _Half(self._fd, 0)
        self._job = _Half(self._fd, 1)
        self.status = Status()
        found = self._mine.read()
        self.order = (None if found is None else _made(Order, found)) or Order()
        self.look()

    def clear(self) -> None:
        """Forget what an earlier job has told. Only when no process of it lives. Raises JobError."""
        try:
            os.pwrite(self._fd, bytes(2 * _HALF_BYTES), 0)
        except OSError as error:
            raise self._unmade(error) from error
        self.status = Status()
        self.order = Order()

    def _unmade(self, error: OSError) -> JobError:
        return JobError(f"channel {self.path!r} cannot be made: {error.strerror}")

    def look(self) -> Status:
        """How the job is."""
        self._mine.write_again()
        found = self._job.read()
        if found is not None:
            self.status = _made(Status, found) or self.status
        return self.status

    def want(self, *, sleep: bool, fetch_bytes: int = 0) -> None:
        """Tell the job what to do."""
        self.order = Order(number=self.order.number + 1, sleep=sleep, fetch_bytes=fetch_bytes)
        self._mine.write(asdict(self.order))

    def lock_for_child(self) -> int | None:
        """A descriptor that holds the lock, to be inherited; None: a process of the job lives."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if try_lock(fd):
            return fd
        os.close(fd)
        return None

    def has_process(self) -> bool:
        """Whether any process of the job lives."""
        try:
            fd = self.lock_for_child()
        except OSError:  # the file was deleted: its open copy says nothing
            return False
        if fd is None:
            return True
        os.close(fd)
        return False

    def who(self) -> Status:
        """How the job is, as soon as it has said who it is. Raises JobError if it does not."""
        end = time.monotonic() + _SAYS_WHO_S
        while not self.look().pid and self.has_process():
            if time.monotonic() > end:
                raise JobError(
                    f"a process holds {self.path!r} and does not say which it is: end it, and remove"
                    " that file"
                )
            time.sleep(_SAYS_WHO_S / 1000)
        return self.status

    def close(self) -> None:
        """Close the file; the job keeps its own."""
        os.close(self._fd)


def start_ticks(pid: int) -> int | None:
    """When a process began, in the kernel's ticks since the machine did; None: there is no such."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            after_name = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])


def _made(kind: type[Any], found: Mapping[str, Any]) -> Any:
    """A value of what the other side wrote; None if it is of another version."""
    known = {each.name: each for each in fields(kind)}
    plain = kind()
    for name, value in found.items():
        if name not in known:
            return None
        default = getattr(plain, name)
        if default is not None and not isinstance(value, type(default) | int):
            return None
    return kind(**found)


def _short(text: str) -> str:
    plain = text.encode("ascii", "replace").decode()
    return plain if len(plain) <= _REFUSED_LETTERS else plain[: _REFUSED_LETTERS - 3] + "..."
