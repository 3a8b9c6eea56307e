"""What a command is to ``main``, and what all commands have in common."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Final, Protocol

INTERRUPTED_CODE: Final = 130
"""The exit code of a command that was ended by SIGINT, as shells make it."""
formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=100)
"""Help texts as they were written, 100 columns wide."""


class Command(Protocol):
    """A module of this package: ``penstock.cli.<command>``."""

    def parser(self) -> argparse.ArgumentParser:
        """The parser of what follows the command's name; has ``--json`` and ``--debug``."""

    def execute(self, options: argparse.Namespace) -> int | Callable[[], int]:
        """Do it.

        Returns:
            The exit code, or what is left to do out of reach of our error messages: a user's script.

        Raises:
            PenstockError: ``main`` reports it in one line.
        """


def add_common(parser: argparse.ArgumentParser, *, json_help: str) -> None:
    """Add the options that every command has.

    Args:
        parser: Of the command.
        json_help: What ``--json`` prints.
    """
    parser.add_argument("--json", action="store_true", help=json_help)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def size(text: str) -> int | str:
    """An option's size: digits alone are bytes; anything else is left to ``parse_bytes``."""
    return int(text) if text.isascii() and text.isdigit() else text
