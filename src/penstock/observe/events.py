"""What is recorded: the names of stages, and the events.

The members of :class:`Stage` are the only names a stage has: in comments, variables, columns of the
log and lanes of the trace. All times are nanoseconds of the recorder's clock.

[Note: raw events]
    The recorder keeps events as plain tuples: a tag (``SPAN``, ``LEVEL``, ``MARK``), then fields.
    A plain tuple is made six times as fast as a named one, and the garbage collector stops looking
    at one that holds only strings and integers, which counts when there are many thousands.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

FieldValue: TypeAlias = str | int | float | bool | None
"""What the fields of a mark hold."""


class Stage(enum.StrEnum):
    """One stage of a tensor's trip, or of the training step around it."""

    PACK = "pack"
    """Autograd hands over a tensor that it saves."""
    UNPACK = "unpack"
    """Autograd asks for it again."""
    PLAN = "plan"
    """A policy makes a plan."""
    ENCODE = "encode"
    """A codec turns a tensor into bytes."""
    DECODE = "decode"
    """A codec turns bytes into a tensor."""
    WRITE = "write"
    """Bytes go to a tier."""
    READ = "read"
    """Bytes come from a tier."""
    COPY_OUT = "copy_out"
    """From the device to host memory."""
    COPY_IN = "copy_in"
    """From host memory to the device."""
    RECOMPUTE = "recompute"
    """A module is run again in backward."""
    STALL = "stall"
    """The training thread waits for Penstock; the cause is a :class:`StallCause`."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STEP = "step"
    """One training step, from its first forward to the end of its optimizer step."""


class StallCause(enum.StrEnum):
    """Why the training thread had to wait."""

    BUDGET = "budget"
    """``pack`` waits for room in the budget: writes have not caught up."""
    DEMAND = "demand"
    """``unpack`` waits for a read that nobody had started."""
    LATE = "late_prefetch"
    """``unpack`` waits for a prefetch that had started and was not done."""
    FORWARDING = "forwarding"
    """``unpack`` waits for a tensor that is still on its way out."""
    SAMPLING = "sampling"
    """``pack`` measures what codecs make of a storage."""
    COPY = "copy"
    """A copy between device and host memory is waited for."""


class Span(NamedTuple):
    """Something that took time."""

    stage: str
    start_ns: int
    end_ns: int
    nbytes: int
    tier: str
    slot: str
    cause: str


class Level(NamedTuple):
    """From ``t_ns`` on, ``memory`` holds ``nbytes``."""

    t_ns: int
    memory: str
    nbytes: int


class Mark(NamedTuple):
    """Something that happened at one moment."""

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
    """The event that a raw tuple stands for; see [Note: raw events]."""
    return _KINDS[raw[0]]._make(raw[1:])
