"""The contract: assumptions of Penstock, and of the emulated device of its tests, about CUDA and torch.

Every assumption is a function in one of the modules ``facts_*``. One that is wrong on a device is more
valuable than a pass: it is reported with the assumption and the observation.
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
from penstock.testing.gpu.fact import Fact, FactOutcome, judge
from penstock.testing.gpu.machine import kind_of

FACTS: Final[tuple[Fact, ...]] = (
    *facts_order.FACTS,
    *facts_copies.FACTS,
    *facts_memory.FACTS,
    *facts_threads.FACTS,
    *facts_capture.FACTS,
)
LIMIT_S: Final = 30.0
"""Time limit of a fact, after which its process ends with a traceback."""


def named(name: str) -> Fact:
    """Return the fact of a name. Raises KeyError."""
    return {each.name: each for each in FACTS}[name]


def work(options: argparse.Namespace) -> int:
    """Examine the named facts, in a process of :mod:`.child`.

    Records ``begun`` and then ``finding`` of each. Stops after a failed examination: its error may
    persist in CUDA, so others are examined in a new process.
    """
    kind = kind_of(options.device)
    for name in options.names:
        processes.append(options.records, {"begun": name})
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        finding = judge(named(name), kind)
        faulthandler.cancel_dump_traceback_later()
        processes.append(options.records, {"finding": finding.as_dict()})
        if finding.outcome is FactOutcome.ERROR:
            break
    return 0
