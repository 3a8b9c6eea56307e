"""What commands write: one JSON document, one table, or one line that says what went wrong."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

from rich.console import Console, RenderableType

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.ranks import rank
from penstock.observe.summary_text import to_text


class UnreadError(BrokenPipeError):
    """Nobody reads what a command writes any more, as with ``| head``."""


def report(error: PenstockError) -> int:
    """Say in one line on standard error what went wrong.

    Returns:
        The exit code: 2 for arguments and configuration, 1 for everything else.
    """
    say(f"error: {error}")
    return 2 if isinstance(error, ConfigError) else 1


def say(message: str) -> None:
    """Write one line on standard error, naming the rank if there are several; nothing if it is closed."""
    number = rank()
    who = "penstock" if number is None else f"penstock: rank {number}"
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{who}: {' '.join(message.splitlines())}\n")
            sys.stderr.flush()


def show(renderable: RenderableType, file: IO[str] | None) -> None:
    """Print with colours on a terminal, as plain text elsewhere; what that has no letter for is ``?``."""
    if file is None:  # closed
        return
    if file.isatty():
        with _taken(file):
            Console(file=file).print(renderable)
    else:
        name = getattr(file, "encoding", None) or "utf-8"
        write_text((to_text(renderable) + "\n").encode(name, "replace").decode(name), file)


def write_json(document: dict[str, Any], file: IO[str] | None) -> None:
    """Write one document, and a newline."""
    if file is not None:  # else it is closed
        write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", file)


def write_json_line(document: dict[str, Any], file: IO[str]) -> None:
    """Write one document as a line, whole also where other ranks write to the same output."""
    with contextlib.suppress(OSError):  # not every kind of file can be locked
        fcntl.lockf(file, fcntl.LOCK_EX)
    write_text(json.dumps(document, allow_nan=False) + "\n", file)
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_UN)


def write_text(text: str, file: IO[str]) -> None:
    """Write it at once.

    Raises:
        UnreadError: Who reads it has seen enough.
        PenstockError: The disk is full, say.
    """
    with _taken(file):
        file.write(text)
        file.flush()


@contextlib.contextmanager
def _taken(file: IO[str]) -> Iterator[None]:
    """Within, what is written and not taken is told once: the interpreter would, when it ends."""
    try:
        yield
    except OSError as error:
        _lead_nowhere(file)
        if isinstance(error, BrokenPipeError):
            raise UnreadError(*error.args) from error
        raise PenstockError(f"{file.name!r} cannot be written: {error.strerror}") from error


def _lead_nowhere(file: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
