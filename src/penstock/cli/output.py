"""What commands write: one JSON document, one table, or one line that says what went wrong."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import IO, Any

from rich.console import Console, RenderableType

from penstock.core.errors import ConfigError, PenstockError
from penstock.observe.summary_text import to_text


def report(error: PenstockError) -> int:
    """Say in one line on standard error what went wrong.

    Returns:
        The exit code: 2 for arguments and configuration, 1 for everything else.
    """
    say(f"error: {error}")
    return 2 if isinstance(error, ConfigError) else 1


def say(message: str) -> None:
    """One line on standard error; nothing if that is closed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"penstock: {' '.join(message.splitlines())}\n")
            sys.stderr.flush()


def show(renderable: RenderableType, file: IO[str] | None) -> None:
    """Print with colours on a terminal, as plain text elsewhere; what that has no letter for is ``?``."""
    if file is None:  # closed
        return
    if file.isatty():
        Console(file=file).print(renderable)
    else:
        name = getattr(file, "encoding", None) or "utf-8"
        file.write((to_text(renderable) + "\n").encode(name, "replace").decode(name))
    file.flush()


def write_json(document: dict[str, Any], file: IO[str] | None) -> None:
    """Write one document, and a newline."""
    if file is None:  # closed
        return
    file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    file.flush()
