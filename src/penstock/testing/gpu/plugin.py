"""A pytest plugin for the tests on a device: every outcome goes to a file as soon as it is known.

``pytest -p penstock.testing.gpu.plugin --records FILE``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.testing.gpu import processes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--records``."""
    parser.addoption("--records", type=Path, help="append the outcome of every test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Note outcomes if a file is named."""
    records = config.getoption("--records")
    if records is not None:
        config.pluginmanager.register(_Notes(records), "penstock-gpu-notes")


class _Notes:
    def __init__(self, records: Path) -> None:
        self._records = records
        self._outcome: dict[str, Any] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = {"test": nodeid, "outcome": "passed", "seconds": 0.0, "said": ""}
        processes.append(self._records, {"begun": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        noted = self._outcome
        noted["seconds"] = round(noted["seconds"] + report.duration, 2)
        if report.skipped:
            noted["outcome"] = "xfailed" if hasattr(report, "wasxfail") else "skipped"
        elif report.failed:
            noted["outcome"] = "failed"
        if not report.passed:
            noted["said"] = _reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        processes.append(self._records, {"test": self._outcome})


def _reason(report: pytest.TestReport) -> str:
    """The error in a line."""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    return next(iter(text.splitlines()), "")
