"""Errors of reads that name the weight, the file, the offset, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import TransferError, file_label, retold
from penstock.weights.pieces import Fill

AGAIN: Final = "Its next use reads it again; if that fails too, the device is faulty: stop using it"
"""Advice for a weight that rests, before the remedy of its tier."""
SOURCE_ADVICE: Final = "Try again; if that fails too, take a copy of the file on another device"
"""Advice for a file that is loaded, or converted."""


def unread(error: BaseException, name: str, advice: str) -> BaseException:
    """Return the error that a weight cannot be read, of the type of the engine's; others as they are.

    Args:
        error: Error of the transfer.
        name: Name of the weight.
        advice: What to do.
    """
    if not isinstance(error, TransferError) or error.op != "read":
        return error.with_traceback(None)
    text = f"weight {name} cannot be read from {file_label(error.path)}: {error}. {advice}"
    return retold(error, text)


@contextmanager
def named_reads(name: str, advice: str) -> Iterator[None]:
    """Name the weight in the error of a read that fails in the block; see ``unread``."""
    try:
        yield
    except TransferError as error:
        if error.op != "read":
            raise
        raise unread(error, name, advice) from error.__cause__


def named_fill(fill: Fill, name: str, advice: str) -> Fill:
    """Return a function that fills memory as ``fill`` does, with the errors of ``named_reads``."""

    def filled(target: NDArray[np.uint8]) -> None:
        with named_reads(name, advice):
            fill(target)

    return filled
