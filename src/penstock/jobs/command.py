"""What a job's process runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from penstock.jobs.description import JobSpec, Machine
from penstock.swap import RECORD_FILE

Command = Callable[[JobSpec, Machine, str, str], Sequence[str]]
"""Program and arguments of a job, given where its channel is, and where it is kept if it is durable."""


def run_command(spec: JobSpec, machine: Machine, channel: str, kept: str) -> list[str]:
    """``penstock run`` of the script; it resumes if there is what it can resume from."""
    flash = [word for each in machine.directories for word in ("--flash", each)]
    command = [sys.executable, "-m", "penstock", "run", "--channel", channel, *flash]
    if spec.durable:
        command += ["--state", kept]
        if os.path.exists(os.path.join(kept, RECORD_FILE)):
            command.append("--resume")
    return [*command, *spec.options, *spec.words]
