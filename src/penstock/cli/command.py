"""Interface of a command for ``main``, and the common options of all commands."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Final, Protocol

INTERRUPTED_CODE: Final = 130
"""Exit code of a command that was ended by SIGINT, as in shells."""
formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=100)
"""Formatter that keeps the line breaks of help texts, 100 columns wide."""


class Command(Protocol):
    """A module of this package: ``penstock.cli.<command>``."""

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the command's arguments, which include ``--json`` and ``--debug``."""

    def execute(self, options: argparse.Namespace) -> int | Callable[[], int]:
        """Execute the command.

        Returns:
            The exit code, or a function that runs a user's script, whose errors ``main`` does not handle.

        Raises:
            PenstockError: Reported by ``main`` in one line.
        """


def add_common(parser: argparse.ArgumentParser, *, json_help: str) -> None:
    """Add the options that every command has.

    Args:
        parser: Parser of the command.
        json_help: Help text of ``--json``.
    """
    parser.add_argument("--json", action="store_true", help=json_help)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def size(text: str) -> int | str:
    """Convert a size option: digits alone are bytes; anything else is left to ``parse_bytes``."""
    return int(text) if text.isascii() and text.isdigit() else text
