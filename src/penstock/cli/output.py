"""Output of commands: one JSON document, one table, or one line with an error."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from penstock.core.errors import NO_SPACE_ERRNOS, ConfigError, PenstockError
from penstock.core.ranks import rank
from penstock.observe.summary_text import to_text

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class UnreadError(BrokenPipeError):
    """The reader of a command's output has closed it, as with ``| head``."""


def report(error: PenstockError) -> int:
    """Write an error as one line to standard error.

    Returns:
        The exit code: 2 for arguments and configuration, 1 for everything else.
    """
    say(f"error: {error}")
    return 2 if isinstance(error, ConfigError) else 1


def say(message: str) -> None:
    """Write one line to standard error, with the rank if there are several, unless it is closed."""
    number = rank()
    prefix = "penstock" if number is None else f"penstock: rank {number}"
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{prefix}: {' '.join(message.splitlines())}\n")
            sys.stderr.flush()


def show(renderable: RenderableType, file: IO[str] | None) -> None:
    """Print with colours on a terminal, otherwise as plain text; unencodable characters become ``?``."""
    if file is None:  # closed
        return
    if file.isatty():
        with _write_errors(file):
            Console(file=file).print(renderable, crop=False)
    else:
        name = getattr(file, "encoding", None) or "utf-8"
        write_text((to_text(renderable) + "\n").encode(name, "replace").decode(name), file)


def print_result(
    as_json: bool,
    document: Callable[[], dict[str, Any]],
    text: Callable[[], RenderableType],
    file: IO[str] | None = None,
) -> None:
    """Print a result: its document as JSON, or its text.

    Args:
        as_json: True for the document.
        document: Makes the document.
        text: Makes the text.
        file: Where to; None: standard output.
    """
    out = sys.stdout if file is None else file
    if as_json:
        write_json(document(), out)
    else:
        show(text(), out)


def write_json(document: dict[str, Any], file: IO[str] | None) -> None:
    """Write one document and a newline."""
    if file is not None:  # None if it is closed
        write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", file)


def write_json_line(document: dict[str, Any], file: IO[str]) -> None:
    """Write one document as a line, undivided even if other ranks write to the same output."""
    with contextlib.suppress(OSError):  # not every kind of file can be locked
        fcntl.lockf(file, fcntl.LOCK_EX)
    write_text(json.dumps(document, allow_nan=False) + "\n", file)
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_UN)


def write_text(text: str, file: IO[str]) -> None:
    """Write and flush a text.

    Raises:
        UnreadError: The reader has closed the output.
        PenstockError: The write failed, for example because the disk is full.
    """
    with _write_errors(file):
        file.write(text)
        file.flush()


@contextlib.contextmanager
def _write_errors(file: IO[str]) -> Iterator[None]:
    """Convert an error of a write, and keep the interpreter from reporting it again at exit."""
    try:
        yield
    except OSError as error:
        _redirect_to_null(file)
        if isinstance(error, BrokenPipeError):
            raise UnreadError(*error.args) from error
        raise PenstockError(f"{file.name!r} cannot be written: {error.strerror}") from error


def _redirect_to_null(file: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def take_stdout() -> IO[str]:
    """Reserve standard output for the JSON document; other output to it goes to standard error.

    The descriptors are changed and not ``sys.stdout``, so that this covers C code and child processes.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    if sys.__stdout__ is None or sys.__stderr__ is None:
        raise ConfigError("--json needs both standard output and error open")
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8")


def drop_output_if_full() -> None:
    """Keep ``print`` from failing in this process when the disk of its log is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _DroppingFile(stream.fileno(), "wb", closefd=False)
            made = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, made)


class _DroppingFile(io.FileIO):
    """File that drops output for which a full disk has no space."""

    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            return memoryview(data).nbytes
