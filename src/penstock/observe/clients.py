"""The clients of flash, and the open session's recorder, to which they report their traffic.

That recorder counts all traffic, by stage and tier. The session's own tiers report to it directly. Each
other client (an optimizer, a checkpoint, a data set) counts there as a tier of its own, and reports to
the session that is open; while none is open, nothing is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Final

from penstock.core.fs import filesystem_of
from penstock.core.process import call_in_child
from penstock.observe.events import Stage, StallCause
from penstock.observe.recorder import Recorder

OPTIMIZER: Final = "optimizer"
GRADIENTS: Final = "gradients"
WEIGHTS: Final = "weights"
CHECKPOINTS: Final = "checkpoints"
SUSPENDED: Final = "suspended"
DATA: Final = "data"
_MEASUREMENT: Final = " measurement"

ON_FLASH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "flash": "activations",
        OPTIMIZER: "optimizer states",
        GRADIENTS: "gradients",
        WEIGHTS: "weights",
        CHECKPOINTS: "checkpoints",
        SUSPENDED: "suspended jobs",
        DATA: "data sets",
        "flash" + _MEASUREMENT: "bandwidth measurement",
    }
)
"""Description of the data in each tier whose writes wear an SSD."""

Waiting = Callable[[StallCause, str], AbstractContextManager[None]]
"""Returns a block in which this thread waits for a client: the cause, and the name of what is missing."""
_open: list[tuple[weakref.ref[Recorder], Waiting | None]] = []
call_in_child(_open.clear)  # a child has no session, and the recorder's lock may be held


def measurement_of(tier: str) -> str:
    """Name under which the measurement of a tier is recorded."""
    return tier + _MEASUREMENT


def is_measurement(tier: str) -> bool:
    """Return whether a name is that of the measurement of a tier."""
    return tier.endswith(_MEASUREMENT)


def is_once(tier: str) -> bool:
    """Return whether a tier's traffic happens once, not in each step: measurements, and indexes."""
    return tier == DATA or is_measurement(tier)


def open_account(recorder: Recorder, waiting: Waiting | None = None) -> None:
    """Make clients report to this recorder, and their waits to ``waiting``."""
    _open[:] = [(weakref.ref(recorder), waiting)]


def close_account(recorder: Recorder) -> None:
    """Stop clients from reporting to this recorder."""
    _open[:] = [one for one in _open if one[0]() not in (None, recorder)]


def open_recorder() -> Recorder | None:
    """Return the recorder of the open session, or ``None``."""
    known = tuple(_open)
    return known[0][0]() if known else None


def waiting_for(cause: StallCause, name: str) -> AbstractContextManager[None]:
    """Return a block in which this thread waits for a client: a stall of the open session's training."""
    known = tuple(_open)
    waiting = known[0][1] if known else None
    return nullcontext() if waiting is None else waiting(cause, name)


class ClientRecorder(Recorder):
    """Recorder of a client's tier: reports its transfers to the session that is open, and keeps nothing.

    Transfers of files in memory wear no SSD, and are not reported.
    """

    def __init__(self, directory: str) -> None:
        """Make a recorder for a tier whose files are in ``directory``."""
        super().__init__(event_bytes=0)
        self._is_in_memory = filesystem_of(directory).is_memory

    def span(
        self,
        stage: Stage,
        start_ns: int,
        end_ns: int,
        *,
        nbytes: int = 0,
        tier: str = "",
        slot: str = "",
        cause: str = "",
    ) -> None:
        """Report a transfer; ``slot`` is no slot of the session's plan, and left out."""
        recorder = open_recorder()
        if recorder is not None and not self._is_in_memory:
            now_ns = recorder.clock.now_ns()
            begun_ns = now_ns - (end_ns - start_ns)
            recorder.span(stage, begun_ns, now_ns, nbytes=nbytes, tier=tier, cause=cause)

    def level(self, memory: str, nbytes: int) -> None:
        """Ignore a level: the session shows its own tiers' only."""
