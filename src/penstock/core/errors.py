"""Every error that Penstock raises, in one tree.

::

    PenstockError
    ├── ConfigError (ValueError)            an invalid setting
    │   └── SizeError                       a malformed or ambiguous size
    ├── BudgetError (MemoryError)           a memory budget that cannot be kept
    ├── TransferError (OSError)             an I/O operation that failed, with its place and size
    │   ├── NoSpaceError                    the file system, or a tier's capacity, is full
    │   └── ShortTransferError              the file ended before the request did
    ├── ChecksumError                       bytes that were read differ from those that were written
    ├── SourceChangedError (RuntimeError)   memory that changed while it was written
    ├── DatasetError (ValueError)           a data set that is damaged, unknown, or differs from its index
    ├── CodecError (ValueError)             encoded bytes that do not decode
    ├── RestoreError (RuntimeError)         a saved tensor that cannot be restored
    ├── WorkerError (RuntimeError)          a worker process that died
    ├── ClosedError (RuntimeError)          use after close, or in a forked child
    ├── PlanError (ValueError)              a plan or profile that does not parse or does not match
    ├── SuspendError (RuntimeError)         a job that cannot be suspended or resumed
    ├── JobError (RuntimeError)             a job manager that is missing, or a request that it refuses
    ├── CheckpointError (ValueError)        a checkpoint that is missing, or a state that cannot be saved
    │   ├── DamagedError                    a checkpoint that is torn, damaged, or breaks its format
    │   └── MismatchError                   a checkpoint of another model, dtype or world size
    └── HookError (RuntimeError)            a module that cannot be hooked
        └── InPlaceError                    a saved tensor was modified before its backward

    PenstockWarning (UserWarning)           something was skipped, or done in a slower way

Each message says what failed, where, the values, and what to do.
"""

from __future__ import annotations

import errno as errnos
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, cast


class PenstockError(Exception):
    """Base class of all of Penstock's errors."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let it be pickled, as where ranks or worker processes tell each other of it."""
        return _made, (type(self), self.args, self.__dict__)


class ConfigError(PenstockError, ValueError):
    """An invalid setting, or an invalid combination of settings."""


def renewed(error: BaseException) -> BaseException:
    """Return an equal error without a traceback, for one of several places that raise it.

    An error that is raised refers to the frames that it passes. If somebody keeps it whom these frames
    refer to, they and their memory live until a garbage collection. An error that is neither Penstock's
    nor a ``CancelledError`` is returned itself.
    """
    kind = type(error)
    if not issubclass(kind, (PenstockError, CancelledError)):
        return error.with_traceback(None)
    made = _made(kind, error.args, error.__dict__)
    if hasattr(error, "__notes__"):
        made.__notes__ = [*error.__notes__]  # a list of its own, since notes are added to it
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made


def retold(error: TransferError, text: str) -> TransferError:
    """Return an error of the same type with the same facts and another message."""
    return cast(TransferError, _made(type(error), (error.errno, text), error.__dict__))


def _made(
    kind: type[BaseException], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> BaseException:
    """Return an error of some type, without its constructor, which takes other arguments."""
    made: BaseException
    if issubclass(kind, OSError):
        made = OSError.__new__(kind, *args)
        OSError.__init__(made, *args)
    else:
        made = BaseException.__new__(kind, *args)
    made.__dict__.update(attributes)
    return made


def file_label(path: str) -> str:
    """Return a file's name in messages: its path, or the directory of one without a name."""
    return f"a file without a name in {path!r}" if os.path.isdir(path) else repr(path)


class SizeError(ConfigError):
    """A malformed, negative or ambiguous size."""


class BudgetError(PenstockError, MemoryError):
    """A memory budget that cannot be kept.

    Attributes:
        slot: The slot that did not fit, as printed in plans.
        limit_bytes: The budget.
        least_bytes: Smallest budget with which this point would have been passed.
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
        offset_bytes: Offset in the file of the failing piece.
        nbytes: Length of the failing piece.
        moved_bytes: Bytes of the piece that were moved before the failure.
        free_bytes: Free space of the file system at that moment; -1 if not known.
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
        text = f"{what}: {os.strerror(errno)}"
        if free_bytes >= 0 and (nbytes or isinstance(self, NoSpaceError)):
            text += f" (free space: {free_bytes} bytes)"
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
    """Lack of space: ENOSPC, EDQUOT, or a tier whose capacity is used up."""


class ShortTransferError(TransferError):
    """A file that ends before the request does."""


class ChecksumError(PenstockError):
    """Bytes that were read from a tier differ from those that were written to it."""


class SourceChangedError(PenstockError, RuntimeError):
    """Memory that changed while a tier wrote it, so that the tier's content is unknown."""


class DatasetError(PenstockError, ValueError):
    """A data set, or a sample of it, that is damaged, of an unknown format, or differs from its index."""


class CodecError(PenstockError, ValueError):
    """Encoded bytes that are damaged, truncated, or another codec's."""


class RestoreError(PenstockError, RuntimeError):
    """A saved tensor that cannot be restored; names the slot, and the cause with its place."""


class SuspendError(PenstockError, RuntimeError):
    """A job that cannot be suspended now, or not be resumed; names the tensor and the cause."""


class WorkerError(PenstockError, RuntimeError):
    """A worker process that was killed or ended by itself; its data are lost."""


class ClosedError(PenstockError, RuntimeError):
    """An object used after its close, or in a process forked from the one that made it."""


class PlanError(PenstockError, ValueError):
    """A plan or profile that does not parse, or does not match the run it is used for."""


class JobError(PenstockError, RuntimeError):
    """A job manager that is missing, or a request that it refuses; names the job and the reason."""


class CheckpointError(PenstockError, ValueError):
    """A checkpoint that is missing, or a state that cannot be saved in one; names the key's path."""


class DamagedError(CheckpointError):
    """A checkpoint that is torn, damaged, or breaks the rules of its format.

    Attributes:
        path: The file that is damaged, or the checkpoint's directory.
        overwritten: Names of the tensors that a load had set, or begun to set, when it found the damage.
    """

    def __init__(self, message: str, *, path: str, overwritten: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.overwritten = tuple(overwritten)


class MismatchError(CheckpointError):
    """A checkpoint of another model, dtype or world size; names the first keys that differ."""


class HookError(PenstockError, RuntimeError):
    """A module that cannot be hooked: already hooked, or of an unsupported kind."""


class InPlaceError(HookError):
    """A saved tensor was modified in place before its backward, as autograd itself would report."""


class PenstockWarning(UserWarning):
    """A result that is correct, but slower to get or different from what was requested."""


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
    """Return the error that fits ``errno``, with the free space of ``path``'s file system."""
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
    """Return the free space for an ordinary user on ``path``'s file system, or -1 if not known.

    A file system that reports no blocks at all, as some network ones do, does not know.
    """
    try:
        stat = os.statvfs(path)
    except (OSError, ValueError):  # a path with a character that none can have
        return -1
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else -1
