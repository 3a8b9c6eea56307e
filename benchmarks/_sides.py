"""Sides of a comparison that are processes of their own, each of which prints its figures as JSON."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any


def figures_of(
    words: Sequence[str], directory: str, environment: Mapping[str, str] | None = None
) -> Any:
    """What a command prints on its last line, given ``--dir`` with a fresh directory.

    Args:
        words: The command.
        directory: Where the fresh one is made, and removed.
        environment: Of the process; None: this one's.
    """
    folder = tempfile.mkdtemp(prefix="penstock-bench-", dir=directory)
    command = [*words, "--dir", folder]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
