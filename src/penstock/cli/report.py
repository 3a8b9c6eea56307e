"""The command ``penstock report``, which prints the summary of a finished run from its file."""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.command import new_parser
from penstock.cli.output import print_result, say
from penstock.cli.paths import file_to_write, write_file
from penstock.core.errors import ConfigError
from penstock.core.units import format_bytes
from penstock.observe.job_summary import JobSummary, joined, rank_line
from penstock.observe.summary_text import render
from penstock.report.run_file import FinishedRun, read_run

_EXAMPLES: Final = """\
examples:
  penstock run --device-memory 2GiB --flash /nvme/spill --event-log run.jsonl train.py
  penstock report run.jsonl
  penstock report run.jsonl --json
  penstock report run.rank0.jsonl run.rank1.jsonl
  penstock report run.jsonl --html run.html

The exit code is 0, or 1 for an incomplete log, or 2 for a file that is not of a run."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock report``."""
    made = new_parser(
        "report",
        "Print the summary of a run: memory, traffic by tier, stalls by cause, decisions of"
        " the plan,\nand its prediction beside the measurement. Of several files, a line for each rank.",
        examples=_EXAMPLES,
        usage="penstock report RUN [RUN ...] [--json] [--html FILE]",
        execute=execute,
    )
    made.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="an event log, or what `penstock run --json` printed; of a job, those of its ranks",
    )
    made.add_argument(
        "--html",
        metavar="FILE",
        help="write a page with pictures of event logs, which a browser opens without a network;"
        " several logs stand side by side",
    )
    return made


def execute(options: argparse.Namespace) -> int:
    """Read and print a run; return 1 if the log is incomplete.

    Raises:
        ConfigError: The file is not of a run, or of another version.
    """
    if options.html is not None:
        runs = _write_page(options)
    elif len(runs := [read_run(each) for each in options.runs]) == 1:
        print_result(options.json, lambda: document(runs[0]), lambda: text(runs[0]))
    else:
        job = _job(options.runs, runs)
        print_result(options.json, lambda: _job_document(job), lambda: job)
    for path, run in zip(options.runs, runs, strict=True):
        if not run.complete:
            say(
                f"error: {path} ends before its run did: the summary covers only its"
                f" {run.summary.steps} steps"
            )
    return 0 if all(run.complete for run in runs) else 1


def _write_page(options: argparse.Namespace) -> list[FinishedRun]:
    """Write the page, and print where it is. Raises ConfigError if it cannot be written."""
    from penstock.report.page import page_of  # noqa: PLC0415  (loads NumPy)

    target = file_to_write(options.html, "--html")
    for each in options.runs:
        if os.path.exists(target) and os.path.exists(each) and os.path.samefile(target, each):
            raise ConfigError(f"--html: {target!r} is the log of the run; name another file")
    page, runs = page_of(options.runs)
    write_file(target, page, "--html")
    size = len(page.encode())
    print_result(
        options.json,
        lambda: {"schema": 1, "penstock": __version__, "page": target, "bytes": size},
        lambda: Text(f"{target}: {format_bytes(size)}; open it in a browser"),
    )
    return runs


def _job(paths: list[str], runs: list[FinishedRun]) -> JobSummary:
    """Return the summary of a job. Raises ConfigError if a rank is missing in a file, or there twice."""
    files: dict[int | None, str] = {}
    for path, run in zip(paths, runs, strict=True):
        number = run.summary.rank
        if number is None:
            raise ConfigError(f"{path} is of a run of one process; name it alone")
        if number in files:
            raise ConfigError(f"{files[number]} and {path} are both of rank {number}")
        files[number] = path
    return joined((rank_line(run.summary) for run in runs), len(runs))


def _job_document(job: JobSummary) -> dict[str, Any]:
    return {"schema": 1, "penstock": __version__, "job": job.to_json()}


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
