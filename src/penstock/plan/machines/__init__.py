"""Presets of machines, as TOML files with the source of every figure; or a user's own file."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.plan.machine import Machine


def find(name_or_path: str | Path) -> Machine:
    """Return the machine of this name, or from this file.

    A name with a suffix or a directory is a file; any other is the name of a preset.

    Raises:
        ConfigError: There is no such preset or file, or the file is not a machine.
    """
    text = os.fspath(name_or_path)
    if Path(text).suffix or Path(text).parent != Path():
        return Machine.load(text)
    return Machine.preset(text)
