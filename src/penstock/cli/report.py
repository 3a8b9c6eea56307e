"""``penstock report``: what a run said of itself, told again from what it wrote."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.command import add_common, formatter
from penstock.cli.output import say, show, write_json
from penstock.observe.summary_text import render
from penstock.report.run_file import Run, read_run

_EXAMPLES: Final = """\
examples:
  penstock run --device-memory 2GiB --flash /nvme/spill --event-log run.jsonl train.py
  penstock report run.jsonl
  penstock report run.jsonl --json

The exit code is 0, 1 for a log that ends before its run did, and 2 for a file that is no run."""


def parser() -> argparse.ArgumentParser:
    """Of ``penstock report``."""
    made = argparse.ArgumentParser(
        prog="penstock report",
        usage="penstock report RUN [--json]",
        description="Tell what a run did: memory, traffic by tier, stalls by cause, what went where, and"
        "\nwhat the plan had predicted of it beside what was measured.",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "run", metavar="RUN", help="an event log, or what `penstock run --json` printed"
    )
    add_common(made, json_help="print one JSON document on standard output")
    return made


def execute(options: argparse.Namespace) -> int:
    """Read and print; 1 if the log is not whole.

    Raises:
        ConfigError: The file is no run, or of another version.
    """
    run = read_run(options.run)
    if options.json:
        write_json(document(run), sys.stdout)
    else:
        show(text(run), sys.stdout)
    if run.complete:
        return 0
    say(
        f"error: {options.run} ends before its run did: what is told is of the"
        f" {run.summary.steps} steps that it has"
    )
    return 1


def text(run: Run) -> RenderableType:
    """For people."""
    notes = []
    if run.lost_events:
        notes.append(
            Text(
                f"warning: the log lacks {run.lost_events} events, for the disk did not keep up; totals"
                " have them",
                style="yellow",
            )
        )
    if run.missing_files:
        notes.append(Text(_beginning(run), style="yellow"))
    if run.summary.prediction is None:
        notes.append(Text("no prediction: no step ran under a plan that was replayed"))
    return Group(render(run.summary), *notes)


def _beginning(run: Run) -> str:
    """What is missing of a rotated log, and whether the totals have it."""
    have = "have them" if run.complete else "do not have them"
    return (
        f"warning: the log was rotated: its first {run.missing_files} files are gone, and with them the"
        f" events of the first {run.missing_steps} steps; totals {have}. A larger --event-log-size or"
        " --event-log-files keeps more"
    )


def document(run: Run) -> dict[str, Any]:
    """The JSON document."""
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
