"""The contract: what Penstock, and the emulated device of its tests, believe of CUDA and of torch on it.

Every belief is a function in one of the modules ``facts_*``. A belief that proves wrong on a device is
worth more than a pass: it is reported with what was believed and what was found.
"""

from __future__ import annotations

import argparse
import faulthandler
from typing import Final

from penstock.testing.gpu import (
    facts_capture,
    facts_copies,
    facts_memory,
    facts_order,
    facts_threads,
    processes,
)
from penstock.testing.gpu.fact import Fact, Outcome, judge
from penstock.testing.gpu.machine import kind_of

FACTS: Final[tuple[Fact, ...]] = (
    *facts_order.FACTS,
    *facts_copies.FACTS,
    *facts_memory.FACTS,
    *facts_threads.FACTS,
    *facts_capture.FACTS,
)
LIMIT_S: Final = 30.0
"""A fact that takes longer hangs: its process ends and says where."""


def named(name: str) -> Fact:
    """The fact of a name. Raises KeyError."""
    return {each.name: each for each in FACTS}[name]


def work(options: argparse.Namespace) -> int:
    """Examine the facts of some names, in a process of :mod:`.child`.

    Notes ``begun`` and then ``finding`` of each. Ends after one whose examination failed: its error may
    be left in CUDA, so others are examined in a new process.
    """
    kind = kind_of(options.device)
    for name in options.names:
        processes.append(options.records, {"begun": name})
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        finding = judge(named(name), kind)
        faulthandler.cancel_dump_traceback_later()
        processes.append(options.records, {"finding": finding.as_dict()})
        if finding.outcome is Outcome.ERROR:
            break
    return 0
