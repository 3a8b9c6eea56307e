"""The command ``penstock``: one file per command, loaded on demand.

Nothing here imports torch or NumPy, and ``penstock run`` does so only after the script did: both
read environment variables when they are loaded, and the script may set them first.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from penstock import __version__
from penstock.cli import output
from penstock.cli.command import INTERRUPTED_CODE, UNREAD_CODE, Command, formatter
from penstock.core.errors import PenstockError

_COMMANDS: Final = {
    "run": "run an unmodified training script under a memory budget",
    "bench": "measure the bandwidth and the speed of this machine",
    "plan": "predict memory and time of training, without running it",
    "jobs": "run several scripts in turns: one computes, the others sleep on flash",
    "checkpoint": "list checkpoints, show the contents of one, verify it",
    "weights": "show what safetensors files have, and verify them",
    "data": "describe, verify, pack and measure data sets on flash",
    "characterize": "measure what checkpoints and other jobs cost nine networks here",
    "ssd": "simulate an SSD: time, energy and wear",
    "report": "show the summary of a run, with the prediction for it",
    "doctor": "check this machine and its settings, and say what to improve",
}
_WINGS: Final = {
    "characterize": "penstock.lab.cli.characterize",
    "jobs": "penstock.jobs.cli",
    "ssd": "penstock.lab.cli.ssd",
}
"""Modules of the commands that are not in this package."""
_EXAMPLES: Final = """\
examples:
  penstock doctor --dir /nvme/spill
  penstock run --device-memory 2GiB --flash /nvme/spill train.py --its --own args
  penstock bench io --dir /nvme/spill
  penstock plan vgg16 --batch 256 --machine titan-x --policy all

See `penstock COMMAND --help` for details. Exit codes: 0 success, 1 failure, 2 invalid arguments or
configuration; `penstock run` exits with the script's own code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see ``penstock --help``.

    Args:
        argv: Arguments without the program's name; those of the process if ``None``.

    Returns:
        The exit code. ``penstock run`` passes exceptions of the script on.

    Raises:
        SystemExit: ``--help`` and ``--version`` (0), or arguments that cannot be parsed (2).
    """
    _take_standard_descriptors()
    known = _parser().parse_args(argv)
    options = module_of(known.command).parser().parse_args(known.rest)
    try:
        outcome = options.execute(options)
    except PenstockError as error:
        if options.debug:
            raise
        return output.report(error)  # a module of this package is called report
    except KeyboardInterrupt:
        if options.debug:
            raise
        return INTERRUPTED_CODE
    except output.UnreadError:
        return UNREAD_CODE
    code: int = outcome if isinstance(outcome, int) else outcome()
    return code


def module_of(name: str) -> Command:
    """Import the module of a command."""
    command: Command = importlib.import_module(_WINGS.get(name, f"penstock.cli.{name}"))
    return command


def _take_standard_descriptors() -> None:
    """Open ``/dev/null`` in place of a closed standard descriptor.

    Otherwise the next opened file, perhaps of a checkpoint, would get its number, and messages on
    standard error would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {what}" for name, what in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="penstock",
        usage="penstock [--help] [--version] COMMAND ...",
        description="Train PyTorch networks that do not fit in memory, by offloading to host DRAM and"
        " NVMe flash according to a plan.\n\n"
        f"commands:\n{commands}",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    parser.add_argument("command", choices=tuple(_COMMANDS), help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
