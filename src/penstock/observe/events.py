"""Recorded events, and the names of stages.

The members of :class:`Stage` are the only names a stage has: in comments, variables, columns of the
log and lanes of the trace. All times are nanoseconds of the recorder's clock.

[Note: raw events]
    The recorder keeps events as plain tuples: a tag (``SPAN``, ``LEVEL``, ``MARK``), then fields.
    A plain tuple is created six times as fast as a named one, and the garbage collector stops tracking
    one that holds only strings and integers, which matters when there are many thousands.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

FieldValue: TypeAlias = str | int | float | bool | None
"""Value of a field of a mark."""


class Stage(enum.StrEnum):
    """A stage of a tensor's life, or of the training step around it."""

    PACK = "pack"
    """Autograd saves a tensor."""
    UNPACK = "unpack"
    """Autograd reads a saved tensor."""
    PLAN = "plan"
    """A policy makes a plan."""
    ENCODE = "encode"
    """A codec turns a tensor into bytes."""
    DECODE = "decode"
    """A codec turns bytes into a tensor."""
    WRITE = "write"
    """Bytes are written to a tier."""
    READ = "read"
    """Bytes are read from a tier."""
    COPY_OUT = "copy_out"
    """Bytes are copied from the device to host memory."""
    COPY_IN = "copy_in"
    """Bytes are copied from host memory to the device."""
    RECOMPUTE = "recompute"
    """A module is recomputed in backward."""
    STALL = "stall"
    """The training thread waits for Penstock; the cause is a :class:`StallCause`."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STEP = "step"
    """One training step, from its first forward to the end of its optimizer step."""


class StallCause(enum.StrEnum):
    """Cause of a wait of the training thread."""

    BUDGET = "budget"
    """Wait of ``pack`` for memory within the budget, which writes have not freed yet."""
    DEMAND = "demand"
    """Wait of ``unpack`` for a read that had not been started."""
    LATE = "late_prefetch"
    """Wait of ``unpack`` for a prefetch that has started and not ended."""
    SAMPLING = "sampling"
    """Measurement of codecs on a storage by ``pack``."""
    WEIGHTS = "weights"
    """Wait for a weight that rests on flash."""
    UPDATE = "update"
    """Wait of backward for updates that free the memory of gradients and weights."""


class Span(NamedTuple):
    """An event with a duration."""

    stage: str
    start_ns: int
    end_ns: int
    nbytes: int
    tier: str
    slot: str
    cause: str


class Level(NamedTuple):
    """A memory's level: ``memory`` holds ``nbytes`` from ``t_ns`` on."""

    t_ns: int
    memory: str
    nbytes: int


class Mark(NamedTuple):
    """An event at one moment."""

    t_ns: int
    name: str
    fields: Mapping[str, FieldValue]


Event: TypeAlias = Span | Level | Mark

SPAN: Final = 0
LEVEL: Final = 1
MARK: Final = 2
_KINDS: Final = (Span, Level, Mark)

RawEvent: TypeAlias = tuple[Any, ...]


def typed(raw: RawEvent) -> Event:
    """Return the event that a raw tuple represents; see [Note: raw events]."""
    return _KINDS[raw[0]]._make(raw[1:])
