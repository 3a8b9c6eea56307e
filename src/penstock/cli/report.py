"""The command ``penstock report``, which prints the summary of a finished run from its file."""

from __future__ import annotations

import argparse
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.command import new_parser
from penstock.cli.output import print_result, say
from penstock.observe.summary_text import render
from penstock.report.run_file import FinishedRun, read_run

_EXAMPLES: Final = """\
examples:
  penstock run --device-memory 2GiB --flash /nvme/spill --event-log run.jsonl train.py
  penstock report run.jsonl
  penstock report run.jsonl --json

The exit code is 0, or 1 for an incomplete log, or 2 for a file that is not of a run."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock report``."""
    made = new_parser(
        "report",
        "Print the summary of a run: memory, traffic by tier, stalls by cause, decisions of"
        " the plan,\nand its prediction beside the measurement.",
        examples=_EXAMPLES,
        usage="penstock report RUN [--json]",
        execute=execute,
    )
    made.add_argument(
        "run", metavar="RUN", help="an event log, or what `penstock run --json` printed"
    )
    return made


def execute(options: argparse.Namespace) -> int:
    """Read and print a run; return 1 if the log is incomplete.

    Raises:
        ConfigError: The file is not of a run, or of another version.
    """
    run = read_run(options.run)
    print_result(options.json, lambda: document(run), lambda: text(run))
    if run.complete:
        return 0
    say(
        f"error: {options.run} ends before its run did: the summary covers only its"
        f" {run.summary.steps} steps"
    )
    return 1


def text(run: FinishedRun) -> RenderableType:
    """Return the text for the terminal."""
    notes = []
    if run.lost_events:
        notes.append(
            Text(
                f"warning: the log lacks {run.lost_events} events, because the disk did not keep up;"
                " totals include them",
                style="yellow",
            )
        )
    if run.missing_files:
        notes.append(Text(_beginning(run), style="yellow"))
    if run.summary.prediction is None:
        notes.append(Text("no prediction: no step ran under a replayed plan"))
    return Group(render(run.summary), *notes)


def _beginning(run: FinishedRun) -> str:
    """Return a warning about the missing part of a rotated log."""
    have = "include them" if run.complete else "do not include them"
    return (
        f"warning: the log was rotated: its first {run.missing_files} files are missing, and with them"
        f" the events of the first {run.missing_steps} steps; totals {have}. A larger --event-log-size"
        " or --event-log-files keeps more"
    )


def document(run: FinishedRun) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "schema": 1,
        "penstock": __version__,
        "source": run.kind,
        "complete": run.complete,
        "lost_events": run.lost_events,
        "missing_files": run.missing_files,
        "missing_steps": run.missing_steps,
        "summary": run.summary.to_json(),
    }
