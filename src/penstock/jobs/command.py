"""Command line of a job's process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from penstock.jobs.description import JobsMachine, JobSpec
from penstock.swap import RECORD_FILE

Command = Callable[[JobSpec, JobsMachine, str, str], Sequence[str]]
"""Function that returns a job's command, given the paths of its channel and its durable state."""


def run_command(spec: JobSpec, machine: JobsMachine, channel: str, kept: str) -> list[str]:
    """Return the ``penstock run`` of the script, with ``--resume`` if there is a record."""
    flash = [word for each in machine.directories for word in ("--flash", each)]
    command = [sys.executable, "-m", "penstock", "run", "--channel", channel, *flash]
    if spec.durable:
        command += ["--state", kept]
        if os.path.exists(os.path.join(kept, RECORD_FILE)):
            command.append("--resume")
    return [*command, *spec.options, *spec.words]
