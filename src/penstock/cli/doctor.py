"""The command ``penstock doctor``, which checks this machine and advises what to improve."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.checks import CheckStatus, DoctorCheck, all_checks
from penstock.cli.command import new_parser
from penstock.cli.output import print_result
from penstock.core.files import given_paths
from penstock.observe.summary_text import text_table

_EXAMPLES: Final = """\
examples:
  penstock doctor --dir /nvme/spill
  penstock doctor --dir /nvme0/spill --dir /nvme1/spill --json

The exit code is 0 if no check failed; a warning is not a failure."""
_STYLES: Final = {CheckStatus.OK: "green", CheckStatus.WARN: "yellow", CheckStatus.FAIL: "bold red"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock doctor``."""
    made = new_parser(
        "doctor",
        "Check this machine and its settings, and say what to improve.",
        examples=_EXAMPLES,
        execute=execute,
    )
    made.add_argument(
        "--dir",
        metavar="DIR",
        action="append",
        help="directory to offload to; repeat it for several (default: the current one)",
    )
    return made


def execute(options: argparse.Namespace) -> int:
    """Run and print all checks; return 1 if one failed."""
    checks = all_checks(given_paths(options.dir or ["."], "--dir"))
    print_result(options.json, lambda: document(checks), lambda: table(checks))
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
    rows = []
    for check in checks:
        found = Text(check.value)
        if check.advice:
            found.append(f"\n→ {check.advice}", style="italic")
        rows.append((Text(check.verdict, style=_STYLES[check.verdict]), check.name, found))
    lines = text_table(("", "check", "found"), rows)
    lines.columns[0].no_wrap = True
    return Group(lines, Text(), _conclusion(checks))


def _conclusion(checks: Sequence[DoctorCheck]) -> Text:
    failed = sum(check.verdict is CheckStatus.FAIL for check in checks)
    warned = sum(check.verdict is CheckStatus.WARN for check in checks)
    if failed:
        return Text(f"{failed} failed, warnings: {warned}", style=_STYLES[CheckStatus.FAIL])
    if warned:
        return Text(f"Penstock works here; warnings: {warned}", style=_STYLES[CheckStatus.WARN])
    return Text("Penstock works here", style=_STYLES[CheckStatus.OK])
