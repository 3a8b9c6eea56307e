"""Every error that Penstock raises, in one tree.

::

    PenstockError
    ├── ConfigError (ValueError)            a setting that makes no sense
    │   └── SizeError                       a malformed or ambiguous size
    ├── BudgetError (MemoryError)           a memory budget that cannot be kept
    ├── TransferError (OSError)             an I/O operation that failed, with where and how much
    │   ├── NoSpaceError                    the file system, or a tier's capacity, is full
    │   └── ShortTransferError              the file ended before the request did
    ├── ChecksumError                       bytes that came back are not the bytes that left
    ├── SourceChangedError (RuntimeError)   memory that changed while it was written
    ├── DatasetError (ValueError)           a data set that is damaged, unknown, or not what was indexed
    ├── CodecError (ValueError)             encoded bytes that do not decode
    ├── RestoreError (RuntimeError)         a saved tensor that cannot be brought back
    ├── WorkerError (RuntimeError)          a process of ours that was killed
    ├── ClosedError (RuntimeError)          use after close, or in a forked child
    ├── PlanError (ValueError)              a plan or profile that does not parse or does not match
    ├── SuspendError (RuntimeError)         memory that cannot be given up, or not be brought back
    ├── JobError (RuntimeError)             a manager of jobs that is not there, or cannot do as told
    ├── CheckpointError (ValueError)        a checkpoint that is not there, or cannot be made of this
    │   ├── DamagedError                    a checkpoint that is torn, damaged, or breaks its format
    │   └── MismatchError                   a checkpoint of another model, dtype or world size
    └── HookError (RuntimeError)            a module that cannot be hooked
        └── InPlaceError                    a saved tensor was modified before its backward

    PenstockWarning (UserWarning)           something was given up, or done in a slower way

Each message says what failed, where, the values, and what to do.
"""

from __future__ import annotations

import errno as errnos
import os
from collections.abc import Sequence


class PenstockError(Exception):
    """The root of the tree."""


class ConfigError(PenstockError, ValueError):
    """A setting that makes no sense, alone or beside another."""


class SizeError(ConfigError):
    """A malformed, negative or ambiguous size."""


class BudgetError(PenstockError, MemoryError):
    """A memory budget that cannot be kept.

    Attributes:
        slot: The slot that did not fit, as printed in plans.
        limit_bytes: The budget.
        least_bytes: The least budget that would have got past this point.
    """

    def __init__(self, message: str, *, slot: str, limit_bytes: int, least_bytes: int) -> None:
        super().__init__(message)
        self.slot = slot
        self.limit_bytes = limit_bytes
        self.least_bytes = least_bytes


class TransferError(PenstockError, OSError):
    """An I/O operation that failed.

    ``errno`` and ``strerror`` are those of the operating system, as on any OSError.

    Attributes:
        op: ``"read"``, ``"write"``, ``"allocate"``, ``"open"``, ...
        path: The file, or the directory of an unlinked one.
        offset_bytes: Where in the file the failing piece began.
        nbytes: Length of the failing piece.
        moved_bytes: How many of them had been moved before the failure.
        free_bytes: Free space of the file system at that moment; -1 where it could not be asked.
    """

    def __init__(
        self,
        *,
        errno: int,
        op: str,
        path: str,
        offset_bytes: int,
        nbytes: int,
        moved_bytes: int = 0,
        free_bytes: int = -1,
        advice: str = "",
    ) -> None:
        what = f"{op} of {path!r} failed"
        if nbytes:
            what = (
                f"{op} of {nbytes} bytes at offset {offset_bytes} of {path!r} failed after"
                f" {moved_bytes} bytes"
            )
        text = f"{what}: {os.strerror(errno)} (free space: {free_bytes} bytes)"
        super().__init__(errno, f"{text}; {advice}" if advice else text)
        self.op = op
        self.path = path
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        self.moved_bytes = moved_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        return str(self.strerror)


class NoSpaceError(TransferError):
    """ENOSPC, EDQUOT, or a tier whose stated capacity is used up."""


class ShortTransferError(TransferError):
    """The file ended before the request did."""


class ChecksumError(PenstockError):
    """Bytes that came back from a tier are not the bytes that went in."""


class SourceChangedError(PenstockError, RuntimeError):
    """Memory that changed while a tier wrote it, so that nobody knows what the tier holds."""


class DatasetError(PenstockError, ValueError):
    """A data set, or a sample of it, that is damaged, of no known format, or not what was indexed."""


class CodecError(PenstockError, ValueError):
    """Encoded bytes that are damaged, truncated, or another codec's."""


class RestoreError(PenstockError, RuntimeError):
    """A saved tensor that cannot be brought back; names the slot, and the cause with its place."""


class SuspendError(PenstockError, RuntimeError):
    """A job that cannot be suspended now, or not be brought back; names the tensor and the cause."""


class WorkerError(PenstockError, RuntimeError):
    """A process that works for this one was killed, or ended by itself; what it had is lost."""


class ClosedError(PenstockError, RuntimeError):
    """An object used after its close, or in a process forked from the one that made it."""


class PlanError(PenstockError, ValueError):
    """A plan or profile that does not parse, or does not belong to what it is used with."""


class JobError(PenstockError, RuntimeError):
    """A manager of jobs that is not there, or cannot do what it was told; names the job, and why."""


class CheckpointError(PenstockError, ValueError):
    """A checkpoint that is not there, or a state that cannot be put into one; names the key's path."""


class DamagedError(CheckpointError):
    """A checkpoint that is torn, damaged, or breaks the rules of its format.

    Attributes:
        path: The file that is damaged, or the checkpoint's directory.
        overwritten: Names of the tensors that a load had set, or begun to, when it found this.
    """

    def __init__(self, message: str, *, path: str, overwritten: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.overwritten = tuple(overwritten)


class MismatchError(CheckpointError):
    """A checkpoint of another model, dtype or world size; names the first keys that differ."""


class HookError(PenstockError, RuntimeError):
    """A module that cannot be hooked: hooked already, or of a kind that hooks do not reach."""


class InPlaceError(HookError):
    """A saved tensor was modified in place before its backward, as autograd itself would report."""


class PenstockWarning(UserWarning):
    """Results stay correct, but something is slower, or other, than was asked for."""


NO_SPACE_ERRNOS = frozenset({errnos.ENOSPC, errnos.EDQUOT})


def transfer_error(
    *,
    errno: int,
    op: str,
    path: str,
    offset_bytes: int,
    nbytes: int,
    moved_bytes: int = 0,
    advice: str = "",
) -> TransferError:
    """The error of the tree that fits ``errno``, with the free space of ``path``'s file system."""
    kind = NoSpaceError if errno in NO_SPACE_ERRNOS else TransferError
    if kind is NoSpaceError:
        advice = "free some space or name another directory"
    return kind(
        errno=errno,
        op=op,
        path=path,
        offset_bytes=offset_bytes,
        nbytes=nbytes,
        moved_bytes=moved_bytes,
        free_bytes=free_space_bytes(path),
        advice=advice,
    )


def free_space_bytes(path: str) -> int:
    """Free space for an ordinary user on ``path``'s file system, or -1 where it cannot be asked.

    One that says it has no blocks at all, as some over a network do, does not know.
    """
    try:
        stat = os.statvfs(path)
    except OSError:
        return -1
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else -1
