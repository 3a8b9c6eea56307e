"""Errors of reads and writes that name the weight, the file, the offset, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from penstock.core.errors import TransferError, file_label, retold

AGAIN: Final = "Its next use reads it again; if that fails too, the device is faulty: stop using it"
"""Advice for a weight that rests, before the remedy of its tier."""
SOURCE_ADVICE: Final = "Try again; if that fails too, take a copy of the file on another device"
"""Advice for a file that is loaded, or converted."""
WRITTEN_AGAIN: Final = (
    "The next step writes it again; if that fails too, free some space, or save the model and use"
    " another directory"
)
"""Advice for a weight that stays in memory because it could not be written home."""
LEFT: Final = (
    "It is an ordinary parameter in memory now, with all of its values: save the model, and use another"
    " directory"
)
"""The same when the session is closed."""
_FAILED: Final = {"read": "read from", "write": "written to"}
_OPS: Final = {"read": ("read",), "write": ("write", "allocate", "open")}
"""Operations of which a read and a write consist."""


def named_failure(
    error: BaseException, name: str, advice: str, op: Literal["read", "write"]
) -> BaseException:
    """Return the error that a weight cannot be read or written, of the type of the engine's.

    Other errors than those of ``op`` are returned as they are.

    Args:
        error: Error of the transfer.
        name: Name of the weight.
        advice: What to do.
        op: What failed.
    """
    if not isinstance(error, TransferError) or error.op not in _OPS[op]:
        return error.with_traceback(None)
    where = file_label(error.path)
    return retold(error, f"weight {name} cannot be {_FAILED[op]} {where}: {error}. {advice}")


@contextmanager
def named_reads(name: str, advice: str) -> Iterator[None]:
    """Name the weight in the error of a read that fails in the block; see ``named_failure``."""
    try:
        yield
    except TransferError as error:
        if error.op != "read":
            raise
        raise named_failure(error, name, advice, "read") from error.__cause__
