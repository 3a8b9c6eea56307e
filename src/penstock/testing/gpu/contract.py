"""The contract: what Penstock, and the emulated device of its tests, believe of CUDA and of torch on it.

Every belief is a function in one of the modules ``facts_*``. A belief that proves wrong on a device is
worth more than a pass: it is reported with what was believed and what was found.
"""

from __future__ import annotations

from typing import Final

from penstock.testing.gpu import (
    facts_capture,
    facts_copies,
    facts_memory,
    facts_order,
    facts_threads,
)
from penstock.testing.gpu.fact import Fact

FACTS: Final[tuple[Fact, ...]] = (
    *facts_order.FACTS,
    *facts_copies.FACTS,
    *facts_memory.FACTS,
    *facts_threads.FACTS,
    *facts_capture.FACTS,
)


def named(name: str) -> Fact:
    """The fact of a name. Raises KeyError."""
    for each in FACTS:
        if each.name == name:
            return each
    raise KeyError(name)
