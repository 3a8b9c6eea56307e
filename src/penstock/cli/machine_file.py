"""Machine files as the result of a command: printed, and written to a file if one is named."""

from __future__ import annotations

import sys
from dataclasses import asdict

from penstock.cli.output import write_json, write_text
from penstock.cli.paths import write_file
from penstock.plan.machine import Machine


def answer(machine: Machine, *, output: str | None, as_json: bool) -> None:
    """Write a machine to ``output``, if that is set, and print it as TOML or one JSON document.

    Raises:
        ConfigError: The file cannot be written.
    """
    if output is not None:
        write_file(output, machine.to_toml(), "--output")
    if as_json:
        write_json({"schema": 1, "machine": asdict(machine)}, sys.stdout)
    else:
        write_text(machine.to_toml(), sys.stdout)
