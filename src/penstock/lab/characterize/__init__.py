"""Experiment of the poster "How to Exploit Flash Memory for DNN Training" on this machine.

Read in this order:

- ``settings``: what a run measures; ``networks``: the nine networks, and what a scale does to them;
- ``experiment``: :func:`characterize`, the measurements in order; ``claims``: the poster's claims;
- ``rank_processes``: processes of a job, seen by the parent; ``worker``: the process itself;
  ``training``, ``data``, ``checkpoint_methods``: its work; ``parallel``, ``pipeline_stages``: how several
  processes share a job;
- ``slowdown``, ``neighbours``: programs that run beside a job; ``energy``, ``machine``: the machine;
- ``scratch``, ``child_cleanup``: cleaning up;
- ``tables``, ``figures``: the results for reading.
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
    """Import a name when it is first used: most need torch, and neighbours run without it (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
