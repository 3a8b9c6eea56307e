"""Logs of jobs: rotation, and their last lines.

A job appends to its log directly, whether its manager lives or not. When a log is too long, the manager
copies it to ``NAME.log.1``, which is overwritten, and truncates it. Output at that very moment may be
lost. So is output that a full disk does not accept (see :mod:`penstock.cli.output`).
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from typing import Final

from penstock.core.errors import free_space_bytes
from penstock.core.files import open_regular

_SUMMARY: Final = re.compile(r"Penstock  +(rank \d+: )?\d+ optimizer steps? in ")
_CONTROL_CHARACTERS: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Terminal escape sequences, and all other control characters."""
_ROTATED: Final = "{}.1"


def rotate(path: str, *, most_bytes: int) -> bool:
    """Rotate a log that is longer than ``most_bytes``; return whether that was done."""
    if length_of(path) <= most_bytes:
        return False
    before = _ROTATED.format(path)
    with suppress(OSError):
        os.unlink(before)  # its space is needed
    try:
        shutil.copyfile(path, before)
    except OSError:  # the disk is full: the log's space is needed
        with suppress(OSError):
            os.unlink(before)
    try:
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def disk_is_full(path: str) -> bool:
    """Return whether the file system of a log is full."""
    return free_space_bytes(os.path.dirname(path)) == 0


def length_of(path: str) -> int:
    """Return the length of a log in bytes; 0 if it does not exist."""
    with suppress(OSError):
        return os.stat(path).st_size
    return 0


def last_lines(path: str, *, begin: int = 0, count: int = 5, most_bytes: int = 16384) -> list[str]:
    """Return the last lines of a script's output, without the summary of ``penstock run``.

    Args:
        path: Path of the log.
        begin: Offset of this run's output, after that of earlier runs. If it is beyond the end, the log
            has been rotated since.
        count: Maximum number of lines.
        most_bytes: Maximum number of bytes that are read.

    Returns:
        Lines without control characters.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            length = os.fstat(file.fileno()).st_size
            file.seek(max(begin if begin <= length else 0, length - most_bytes))
            text = file.read(most_bytes).decode("utf-8", "replace")
    except OSError:
        return []
    found = [_CONTROL_CHARACTERS.sub("", line) for line in text.splitlines()]
    lines = [line for line in found if line.strip()]
    summaries = [place for place, line in enumerate(lines) if _SUMMARY.match(line)]
    return lines[: summaries[-1] if summaries else None][-count:]
