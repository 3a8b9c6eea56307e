"""Pytest plugin for tests on a device, which writes every outcome to a file as soon as it is known.

``pytest -p penstock.testing.gpu.plugin --records FILE [--observe]``. With ``--observe`` the order of each
test's accesses on the device is recorded, too; see :mod:`.observer`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.access_order import AccessOrder
from penstock.testing.gpu import processes
from penstock.testing.gpu.observer import observed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--records`` and ``--observe``."""
    parser.addoption("--records", type=Path, help="append the outcome of every test to this file")
    parser.addoption("--observe", action="store_true", help="note the order of accesses as well")


def pytest_configure(config: pytest.Config) -> None:
    """Record outcomes if a file is named."""
    records = config.getoption("--records")
    if records is not None:
        config.pluginmanager.register(_Outcomes(records), "penstock-gpu-outcomes")
        if config.getoption("--observe"):
            handovers = _handovers(config.rootpath / "tests" / "device")
            config.pluginmanager.register(_Orders(records, handovers), "penstock-gpu-orders")


class _Outcomes:
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


class _Orders:
    def __init__(self, records: Path, handovers: Any) -> None:
        self._records = records
        self._handovers = handovers

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        order = AccessOrder()
        self._handovers.use(order)
        try:
            with observed(order):
                return (yield)
        finally:
            self._handovers.use(None)
            found = {"test": item.nodeid, "checked": order.checked, "complaints": order.complaints}
            processes.append(self._records, {"order": found})


def _handovers(directory: Path) -> Any:
    """Import the tests' module with the hand-overs between Penstock's threads."""
    sys.path.insert(0, str(directory))
    module: Any = importlib.import_module("handovers")
    module.install()
    return module


def _reason(report: pytest.TestReport) -> str:
    """Return the error in a line."""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    return next(iter(text.splitlines()), "")
