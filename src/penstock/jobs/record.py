"""State directory of a manager, from which the next manager finds its jobs.

A directory of mode 0700 with ``record.json``, replaced atomically by a rename once the new content is on
the device; ``channels/`` ([Note: channel]); ``logs/``; the socket ``control``; and ``lock``, held by the
living manager.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from penstock.core.errors import ConfigError, JobError
from penstock.core.files import absolute_path, open_regular, parse_json
from penstock.core.fs import FileLock, write_durably

SCHEMA: Final = 1
_RECORD: Final = "record.json"
_RECORD_S: Final = 5.0
_MAX_BYTES: Final = 16 * 1024**2


def last_known(directory: str) -> str:
    """Describe the last recorded states of jobs; empty if nothing is known."""
    try:
        with open(os.path.join(directory, _RECORD), "rb", opener=open_regular) as file:
            jobs = parse_json(file.read(_MAX_BYTES))["jobs"]
        return ", ".join(
            f"{each['name']} {each['outcome'] if each['phase'] == 'over' else each['phase']}"
            for each in jobs
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class StateDirectory:
    """State directory of a manager.

    Attributes:
        path: Absolute path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create the directory if needed, and lock it. Raises ConfigError if another manager has it."""
        self.path = absolute_path(path, "the state directory")
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            for name in ("channels", "logs", "kept"):
                os.makedirs(os.path.join(self.path, name), mode=0o700, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"state directory {self.path!r} cannot be created: {error.strerror}"
            ) from error
        self._lock: FileLock | None = None
        try:
            self._check_ours()
            self._lock_directory()
        except BaseException:
            self.close()
            raise

    def _check_ours(self) -> None:
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"state directory {self.path!r} belongs to user {found.st_uid}: name one that you own"
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(self._fd, 0o700)

    def _lock_directory(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = FileLock(
            os.open("lock", flags, 0o600, dir_fd=self._fd),
            f"state directory {self.path!r}",
            "see `penstock jobs status`, or name another directory with --state",
        )

    def channel(self, name: str) -> str:
        """Return the path of a job's channel."""
        return os.path.join(self.path, "channels", name)

    def log(self, name: str) -> str:
        """Return the path of a job's log."""
        return os.path.join(self.path, "logs", f"{name}.log")

    def kept(self, name: str) -> str:
        """Return the path of a durable job's state."""
        return os.path.join(self.path, "kept", name)

    @property
    def fd(self) -> int:
        """Descriptor of the directory."""
        return self._fd

    def read(self) -> dict[str, Any] | None:
        """Return the last record, or None. Raises JobError if it cannot be read."""
        try:
            with open(open_regular(_RECORD, dir_fd=self._fd), "rb") as file:
                text = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(str(error)) from error
        try:
            found = parse_json(text)
        except ValueError as error:
            raise self._unreadable(str(error)) from error
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise self._unreadable("it is of another version")
        return found

    def _unreadable(self, why: str) -> JobError:
        return JobError(
            f"{os.path.join(self.path, _RECORD)!r} cannot be read: {why}; make sure that none of its jobs"
            " is running, and remove the directory"
        )

    def write(self, document: Mapping[str, Any], *, durable: bool) -> None:
        """Replace the record. Raises JobError if it cannot be written; the old one stays."""
        text = json.dumps({"schema": SCHEMA, **document}).encode()
        try:
            write_durably(_RECORD, text, permissions=0o600, dir_fd=self._fd, sync_name=durable)
        except OSError as error:
            advice = (
                "the directory was deleted: jobs continue, but a later manager will not find them"
                if error.errno == errno.ENOENT
                else "jobs continue; a later manager finds them as in the previous record"
            )
            raise JobError(
                f"record in {self.path!r} cannot be written: {error.strerror}; {advice}"
            ) from error

    def close(self) -> None:
        """Unlock and close the directory. Idempotent."""
        if self._lock is not None:
            self._lock.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


class RecordWriter:
    """Writer of the record, which reports a failure once. For one thread."""

    def __init__(self, state: StateDirectory, tell: Callable[[str], None]) -> None:
        """Remember the directory, and the function that prints a warning."""
        self._state = state
        self._tell = tell
        self._shape: object = None
        self._then = -1e9
        self._has_failed = False

    def write(self, document: Mapping[str, Any], now: float, *, durable: bool = True) -> None:
        """Write the record now.

        Args:
            document: The record.
            now: Time in seconds.
            durable: Make sure that it, and not the previous one, is found after a loss of power.
        """
        self._then = now
        try:
            self._state.write(document, durable=durable)
            self._has_failed = False
        except JobError as error:
            if not self._has_failed:
                self._tell(f"warning: {error}")
            self._has_failed = True

    def write_if_changed(self, document: Mapping[str, Any], now: float, *, shape: object) -> None:
        """Write the record if its shape, the essential part, has changed, or after some seconds."""
        if shape != self._shape:
            self._shape = shape
            self.write(document, now)
        elif now - self._then > _RECORD_S:
            self.write(document, now, durable=False)
