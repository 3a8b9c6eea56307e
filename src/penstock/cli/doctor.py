"""The command ``penstock doctor``, which checks this machine and advises what to improve."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock import __version__
from penstock.cli.checks import CheckStatus, DoctorCheck, all_checks
from penstock.cli.command import add_common, formatter
from penstock.cli.output import show, write_json
from penstock.core.files import given_paths

_EXAMPLES: Final = """\
examples:
  penstock doctor --dir /nvme/spill
  penstock doctor --dir /nvme0/spill --dir /nvme1/spill --json

The exit code is 0 if no check failed; a warning is not a failure."""
_STYLES: Final = {CheckStatus.OK: "green", CheckStatus.WARN: "yellow", CheckStatus.FAIL: "bold red"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock doctor``."""
    made = argparse.ArgumentParser(
        prog="penstock doctor",
        description="Check this machine and its settings, and say what to improve.",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--dir",
        metavar="DIR",
        action="append",
        help="directory to offload to; repeat it for several (default: the current one)",
    )
    add_common(made, json_help="print one JSON document on standard output")
    return made


def execute(options: argparse.Namespace) -> int:
    """Run and print all checks; return 1 if one failed."""
    checks = all_checks(given_paths(options.dir or ["."], "--dir"))
    if options.json:
        write_json(document(checks), sys.stdout)
    else:
        show(table(checks), sys.stdout)
    return 0 if passed(checks) else 1


def passed(checks: Sequence[DoctorCheck]) -> bool:
    """Return whether no check failed."""
    return all(check.verdict is not CheckStatus.FAIL for check in checks)


def document(checks: Sequence[DoctorCheck]) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "schema": 1,
        "penstock": __version__,
        "ok": passed(checks),
        "checks": [asdict(check) for check in checks],
    }


def table(checks: Sequence[DoctorCheck]) -> RenderableType:
    """Return a table with a line and advice for each check, and an overall verdict."""
    lines = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    lines.add_column("", no_wrap=True)
    lines.add_column("check", overflow="fold")
    lines.add_column("found", overflow="fold")
    for check in checks:
        found = Text(check.value)
        if check.advice:
            found.append(f"\n→ {check.advice}", style="italic")
        verdict = Text(check.verdict, style=_STYLES[check.verdict])
        lines.add_row(verdict, Text(check.name), found)
    return Group(lines, Text(), _conclusion(checks))


def _conclusion(checks: Sequence[DoctorCheck]) -> Text:
    failed = sum(check.verdict is CheckStatus.FAIL for check in checks)
    warned = sum(check.verdict is CheckStatus.WARN for check in checks)
    if failed:
        return Text(f"{failed} failed, warnings: {warned}", style=_STYLES[CheckStatus.FAIL])
    if warned:
        return Text(f"Penstock works here; warnings: {warned}", style=_STYLES[CheckStatus.WARN])
    return Text("Penstock works here", style=_STYLES[CheckStatus.OK])
