"""A page about one run, or about the ranks of a job: one file of HTML that needs nothing else.

The numbers are in the page as JSON, and a script in it draws them; neither the page nor this module loads
anything from a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import resources
from typing import Final

from penstock.report.page_data import page_data
from penstock.report.run_file import FinishedRun

_SCRIPTS: Final = ("charts.js", "page.js", "slots.js")
"""Parts of the page's script, in their order."""


def page_of(paths: Sequence[str | os.PathLike[str]]) -> tuple[str, list[FinishedRun]]:
    """Return the page of event logs, of one run or of each rank of a job, and the runs that were read.

    Raises:
        ConfigError: A file is no event log, or cannot be read as one.
    """
    data, runs = page_data(paths)
    return _page(json.dumps(data, allow_nan=False)), runs


def _page(data: str) -> str:
    """Return the page with its data, of which nothing can end the element that it is in."""
    page = _asset("page.html")
    for name, text in (
        ("STYLE", _asset("page.css")),
        ("SCRIPT", "\n".join(map(_asset, _SCRIPTS))),
        ("DATA", data.replace("<", "\\u003c").replace("&", "\\u0026")),
    ):
        before, after = page.split(f"/*{name}*/")
        page = before + text + after
    return page


def _asset(name: str) -> str:
    return (resources.files("penstock.report") / "assets" / name).read_text(encoding="utf-8")
