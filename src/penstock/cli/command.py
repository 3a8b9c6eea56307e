"""Interface of a command for ``main``, and the common options of all commands."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

INTERRUPTED_CODE: Final = 130
"""Exit code of a command that was ended by SIGINT, as in shells."""
UNREAD_CODE: Final = 141
"""Exit code after SIGPIPE, such as by ``penstock ... | head``."""
formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=100)
"""Formatter that keeps the line breaks of help texts, 100 columns wide."""


class Command(Protocol):
    """A module of a command: ``penstock.cli.<command>``."""

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the command's arguments, which sets ``execute`` in the options."""


Execute = Callable[[argparse.Namespace], int | Callable[[], int]]
"""Executes a command with its options. It returns the exit code, or a function that runs a user's script,
whose errors ``main`` does not handle; ``main`` reports a PenstockError in one line."""


def new_parser(
    name: str,
    description: str,
    execute: Execute | None = None,
    *,
    examples: str | None = None,
    usage: str | None = None,
    json_help: str = "print one JSON document on standard output",
) -> argparse.ArgumentParser:
    """Return the parser of ``penstock NAME``; without ``execute``, of one that has subcommands."""
    made = argparse.ArgumentParser(
        prog=f"penstock {name}",
        usage=usage,
        description=description,
        epilog=examples,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    if execute is not None:
        _finish(made, execute, json_help)
    return made


def add_command(
    what: Any,
    name: str,
    text: str,
    execute: Execute,
    *,
    description: str = "",
    examples: str | None = None,
) -> argparse.ArgumentParser:
    """Add a subcommand to ``what``, the subparsers of a command.

    Args:
        what: Result of ``add_subparsers``.
        name: Name of the subcommand.
        text: What it does, in a line.
        execute: Executes it.
        description: What it does; ``text`` if empty.
        examples: Text below the options.
    """
    made: argparse.ArgumentParser = what.add_parser(
        name,
        help=text,
        description=description or f"{text[0].upper()}{text[1:]}.",
        epilog=examples,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    _finish(made, execute, "print one JSON document on standard output")
    return made


def _finish(made: argparse.ArgumentParser, execute: Execute, json_help: str) -> None:
    """Add what every command has."""
    made.set_defaults(execute=execute)
    common = made.add_argument_group("common options")
    common.add_argument("--json", action="store_true", help=json_help)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")


def size(text: str) -> int | str:
    """Convert a size option: digits alone are bytes; anything else is left to ``parse_bytes``."""
    return int(text) if text.isascii() and text.isdigit() else text
