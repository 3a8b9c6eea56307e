"""Logs of jobs: how long they may become, and how they end.

A job writes to the end of its log by itself, whether a manager lives or not, so nobody stands between
them. When a log is too long its manager moves what is in it to another file, ``NAME.log.1``, in place of
what was moved there before, and the job goes on at the beginning. What it prints at that very moment may
be lost. So is what a full disk does not take: a job does not end by that.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.errors import NO_SPACE_ERRNOS, free_space_bytes
from penstock.core.files import open_regular

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_SUMMARY: Final = re.compile(r"Penstock  +(rank \d+: )?\d+ optimizer steps? in ")
_CONTROLS: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colours and what else moves a terminal; and all other characters that are none to read."""
_BEFORE: Final = "{}.1"


def turn_over(path: str, *, most_bytes: int) -> bool:
    """Empty a log that is longer than this, and keep what was in it beside; whether that was done."""
    if length_of(path) <= most_bytes:
        return False
    before = _BEFORE.format(path)
    with suppress(OSError):
        os.unlink(before)  # its space is needed
    try:
        shutil.copyfile(path, before)
    except OSError:  # the disk is full: there is no better use for what the log takes of it
        with suppress(OSError):
            os.unlink(before)
    try:
        os.truncate(path, 0)
    except OSError:
        return False
    return True


class _Lossy(io.FileIO):
    """Loses what a full disk does not take."""

    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            return memoryview(data).nbytes


def print_if_there_is_room() -> None:
    """From now on ``print`` does not fail in this process where the disk of its log is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Lossy(stream.fileno(), "wb", closefd=False)
            made = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, made)


def no_room(path: str) -> bool:
    """Whether the file system of a log is full."""
    return free_space_bytes(os.path.dirname(path)) == 0


def length_of(path: str) -> int:
    """Of a log in bytes; 0: there is none."""
    with suppress(OSError):
        return os.stat(path).st_size
    return 0


def last_lines(path: str, *, begin: int = 0, count: int = 5, most_bytes: int = 16384) -> list[str]:
    """The end of a log: what the script said last, before the summary of ``penstock run``.

    Args:
        path: Of the log.
        begin: Where in it this run's begins; an earlier one's comes before. If that is beyond its end, it
            has begun anew since.
        count: How many lines at most.
        most_bytes: What is looked at.

    Returns:
        Lines without what would do something to a terminal.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            length = os.fstat(file.fileno()).st_size
            file.seek(max(begin if begin <= length else 0, length - most_bytes))
            text = file.read(most_bytes).decode("utf-8", "replace")
    except OSError:
        return []
    found = [_CONTROLS.sub("", line) for line in text.splitlines()]
    lines = [line for line in found if line.strip()]
    summaries = [place for place, line in enumerate(lines) if _SUMMARY.match(line)]
    return lines[: summaries[-1] if summaries else None][-count:]
