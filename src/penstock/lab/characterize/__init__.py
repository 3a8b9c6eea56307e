"""The poster's experiment, "How to Exploit Flash Memory for DNN Training", on the machine at hand.

Read in this order:

- ``settings``: what is asked for; ``networks``: the nine, and what a scale means;
- ``experiment``: :func:`characterize`, what is measured when; ``claims``: what the poster claims, judged;
- ``teams``: processes, from outside; ``worker``: from inside; ``training``, ``data``, ``saving``: what
  they do; ``parallel``, ``halves``: how several share a job;
- ``beside``, ``neighbours``: what runs beside a job; ``energy``, ``machine``: what the machine tells;
- ``scratch``, ``orphans``: nothing is left behind;
- ``tables``, ``figures``: the results to look at.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.lab.characterize.experiment import characterize, merge
    from penstock.lab.characterize.figures import plot
    from penstock.lab.characterize.settings import Settings
    from penstock.lab.characterize.tables import table

__all__ = ["Settings", "characterize", "merge", "plot", "table"]
_HOMES: Final = {
    "Settings": "settings",
    "characterize": "experiment",
    "merge": "experiment",
    "plot": "figures",
    "table": "tables",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: neighbours do without (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
