"""Notes of ``penstock run`` on misleading command lines."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Final

_BY_TORCHRUN: Final = "torchrun --no-python ... penstock run ... train.py"
_BY_ACCELERATE: Final = "accelerate launch --no_python ... penstock run ... train.py"
_LAUNCHERS: Final = {
    "torchrun": _BY_TORCHRUN,
    "torch.distributed.run": _BY_TORCHRUN,
    "torch.distributed.launch": _BY_TORCHRUN,
    "accelerate": _BY_ACCELERATE,
    "accelerate-launch": _BY_ACCELERATE,
    "accelerate.commands.accelerate_cli": _BY_ACCELERATE,
    "accelerate.commands.launch": _BY_ACCELERATE,
}
_SHARED: Final = frozenset(
    {"channel", "config", "debug", "execute", "json", "module", "resume", "script", "trace"}
)
"""Options without a note: many scripts have options of these names, or they are internal."""


def misplaced_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, words: list[str]
) -> str | None:
    """Return a note on arguments of the script that look like options for Penstock.

    Args:
        parser: Parser of ``penstock run``.
        options: Parsed command line.
        words: Script or module, and its arguments.
    """
    names = {
        "--" + name.replace("_", "-")
        for name, value in vars(options).items()
        if name not in _SHARED and value == parser.get_default(name)
    }
    found = dict.fromkeys(name for word in words[1:] if (name := word.split("=")[0]) in names)
    if not found:
        return None
    return (
        f"note: {', '.join(found)} after {words[0]}: these are passed to {words[0]}; options for Penstock"
        " come before the script"
    )


def program_on_path(target: str) -> str | None:
    """Return a note on a missing script if there is a program of that name."""
    if shutil.which(target) is None:
        return None
    note = f"{target!r} is a program, but penstock run needs a Python script or `-m module`"
    by = _LAUNCHERS.get(target)
    return note if by is None else f"{note}; have the launcher start Penstock: {by}"


def no_step(target: str) -> str:
    """Return the note on a run without steps."""
    by = _LAUNCHERS.get(target) or _LAUNCHERS.get(os.path.basename(target))
    if by is not None:
        return (
            "nothing was offloaded: the processes that a launcher starts run without Penstock; let it"
            f" start Penstock in each of them: {by}"
        )
    return (
        "no step was seen: no optimizer of torch has stepped in this process, and processes that the"
        " script starts run without Penstock"
    )
