"""The clients of flash, and the session to which those without a tier report what they move.

One account has everything that is moved: the flows of the open session's recorder, by stage and tier. The
session's own tiers report to it directly. Each other client (an optimizer, a checkpoint, a data set) is a
tier of its own there, and reports to whichever session is open; while none is, nothing is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from penstock.core.process import call_in_child
from penstock.observe.recorder import Recorder

OPTIMIZER: Final = "optimizer"
GRADIENTS: Final = "gradients"
CHECKPOINTS: Final = "checkpoints"
SUSPENDED: Final = "suspended"
DATA: Final = "data"
_MEASUREMENT: Final = " measurement"

ON_FLASH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "flash": "activations",
        OPTIMIZER: "optimizer states",
        GRADIENTS: "gradients",
        CHECKPOINTS: "checkpoints",
        SUSPENDED: "suspended jobs",
        DATA: "data sets",
        "flash" + _MEASUREMENT: "bandwidth measurement",
    }
)
"""Tiers whose bytes wear an SSD, and what is moved to and from each of them."""

_open: list[weakref.ref[Recorder]] = []
call_in_child(_open.clear)  # a child has no session, and the recorder's lock may be held


def measurement_of(tier: str) -> str:
    """Name under which the measurement of a tier is recorded."""
    return tier + _MEASUREMENT


def is_once(tier: str) -> bool:
    """Return whether further steps move no more of it, as of a measurement, or of an index."""
    return tier == DATA or tier.endswith(_MEASUREMENT)


def open_account(recorder: Recorder) -> None:
    """Have clients report to this recorder from now on."""
    _open[:] = [weakref.ref(recorder)]


def close_account(recorder: Recorder) -> None:
    """Have clients report to this recorder no more."""
    _open[:] = [ref for ref in _open if ref() not in (None, recorder)]


def open_recorder() -> Recorder | None:
    """Return the recorder of the open session, or ``None``."""
    refs = tuple(_open)
    return refs[0]() if refs else None
