"""The profile of one step: saved slots, when they were saved and needed, and the operators between.

Times are nanoseconds of compute on the profiled step's own axis: waits for Penstock are subtracted, so
that a profile shows what the network does, not the cost of an earlier plan.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import PlanError
from penstock.plan import serial
from penstock.plan.operators import Operator
from penstock.plan.slots import MatchKey, SlotKey

if TYPE_CHECKING:
    from penstock.plan.arrays import StepArrays

VERSION: Final = 6
NODE_NS: Final = 50_000
"""Slots needed within this time of each other are assumed to be needed by one node of backward."""


class Event(enum.IntEnum):
    """Event in the life of a slot, in this order."""

    SAVE = 0
    """Forward saves it."""
    USE = 1
    """A node of backward asks for it."""
    FREE = 2
    """The node is done with it, or its pass ended without using it."""


Step = tuple[int, Event, int]
"""(time in ns, event, index of the slot)."""


@dataclass(frozen=True, slots=True)
class CodecSample:
    """Measured ratio and speeds of a codec on a sample of one slot's bytes.

    Raises:
        PlanError: The codec has no name, or a figure is not finite, or not positive (but ``ratio`` may
            be 0).
    """

    codec: str
    """Name such as ``"zero-value"``, or of a chain, ``"zero-value+bfloat16"``."""
    ratio: float
    """Bytes of the frame per byte of the source."""
    encode_bytes_per_s: float
    """Encoding speed in bytes of the source, on one core."""
    decode_bytes_per_s: float
    """Decoding speed in bytes of the source, on one core."""

    def __post_init__(self) -> None:
        if not self.codec:
            raise PlanError("codec sample: the codec has no name")
        for name in ("ratio", "encode_bytes_per_s", "decode_bytes_per_s"):
            value = getattr(self, name)
            low = value < 0 or (value == 0 and name != "ratio")
            if not math.isfinite(value) or low:
                least = "zero or more" if name == "ratio" else "positive"
                raise PlanError(
                    f"codec sample {self.codec!r}: {name} is {value}, it must be {least}"
                )

    def encoded_bytes(self, nbytes: int) -> int:
        """Return the expected frame bytes of ``nbytes`` of source; a frame is never empty."""
        return max(1, math.ceil(nbytes * self.ratio))

    def encode_s(self, nbytes: int) -> float:
        """Return the seconds of one core to encode ``nbytes`` of source."""
        return nbytes / self.encode_bytes_per_s

    def decode_s(self, nbytes: int) -> float:
        """Return the seconds of one core to decode to ``nbytes`` of source."""
        return nbytes / self.decode_bytes_per_s


@dataclass(frozen=True, slots=True)
class SlotProfile:
    """One storage that a pass saved."""

    key: SlotKey
    pass_index: int
    """The pass (a forward graph and its backward) that saved it."""
    saved_at_ns: int
    needed_at_ns: int | None
    """Time when backward first asked for it, None if never."""
    kind: str
    """Type of the module that saved it, as ``"Conv2d"``."""
    held_elsewhere: bool
    """True if something else kept the storage alive, so that offloading it would have freed nothing."""
    dtype: str
    small_bytes: int | None = None
    """Bytes below the floor that are alive when it is saved, None for the profile's ``small_bytes``."""
    codecs: tuple[CodecSample, ...] = ()
    """Samples of the codecs that a plan may choose for it, lossless ones and those whose loss is proven
    to change no gradient. If empty, it is not encoded."""
    producer: str | None = None
    """Path of the innermost module in whose forward the storage was made. A module that both made and
    saved it can recompute it; None: not known, so it cannot be recomputed. In a measured profile
    everything that saved it is inside that forward as well, in the same call of the module."""
    small_bytes_at_need: int | None = None
    """Bytes below the floor that are alive when it is needed, None for as many as at its save, since the
    last saved is the first needed."""
    recipe: tuple[str, ...] = ()
    """Paths of the modules that recompute it from ``source``, called one after the other: the first
    makes its storage, the others change that in place. Empty: there is no recipe."""
    source: int | None = None
    """Index of the slot, of the same pass, that the first module of ``recipe`` is called with."""

    @property
    def idle_ns(self) -> int | None:
        """Time from save to need, None if never needed."""
        return None if self.needed_at_ns is None else self.needed_at_ns - self.saved_at_ns


@dataclass(frozen=True, slots=True)
class PassProfile:
    """One forward graph and its backward."""

    index: int
    start_ns: int
    backward_start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Transient:
    """Device memory that is neither fixed nor in a slot, from ``at_ns`` until the next entry."""

    at_ns: int
    nbytes: int


@dataclass(frozen=True)
class Profile:
    """Saved storages of one step, in the order in which they were saved."""

    device: str
    slots: tuple[SlotProfile, ...]
    passes: tuple[PassProfile, ...]
    small_bytes: int = 0
    """Most bytes alive at once in storages below the floor, which always stay resident."""
    small_count: int = 0
    """Number of storages below the floor that the step saved."""
    protected_bytes: int = 0
    """Saved bytes that are parameters, buffers or optimizer state. They are alive anyway."""
    operators: tuple[Operator, ...] = ()
    """Operators that the network computed, in order; without them nothing can be recomputed."""
    fixed_bytes: int = 0
    """Bytes that are always on the device: parameters, their gradients, buffers and optimizer state.
    0: the budget does not count them, as on a machine whose device is host memory."""
    transients: tuple[Transient, ...] = ()
    """Device memory over time that a plan cannot move: intermediate outputs and gradients, workspaces,
    storages below the floor. In a profile of the whole device, ``small_bytes`` of a slot are the fixed
    and the largest transient bytes beside it, at its save and at its need. Empty: the budget counts none
    of it."""
    unrepeatable: tuple[str, ...] = ()
    """Paths of modules that must not be recomputed as a whole, because a second run would differ or
    cannot be arranged. Modules inside them may be."""

    def __post_init__(self) -> None:
        known = set()
        for one in self.passes:
            known.add(one.index)
            if not one.start_ns <= one.backward_start_ns <= one.end_ns:
                raise PlanError(f"profile: times of pass {one.index} are not in order: {one}")
        if len(known) != len(self.passes):
            raise PlanError("profile: two passes have the same index")
        for slot in self.slots:
            _check_slot(slot, known)
            self._check_recipe(slot)

    def _check_recipe(self, slot: SlotProfile) -> None:
        if bool(slot.recipe) != (slot.source is not None):
            raise PlanError(
                f"profile: slot {slot.key} has recipe {slot.recipe} and source {slot.source};"
                " it must have both, or neither"
            )
        if slot.source is None:
            return
        if not 0 <= slot.source < len(self.slots):
            raise PlanError(
                f"profile: slot {slot.key} is made from slot {slot.source}, but there are only"
                f" {len(self.slots)} slots"
            )
        source = self.slots[slot.source]
        if source is slot or source.pass_index != slot.pass_index:
            raise PlanError(
                f"profile: slot {slot.key} of pass {slot.pass_index} is made from {source.key} of"
                f" pass {source.pass_index}; it must be another slot of the same pass"
            )

    def without_codecs(self) -> Profile:
        """Return the profile as if no codec had been tried."""
        return replace(self, slots=tuple(replace(slot, codecs=()) for slot in self.slots))

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved storages above the floor."""
        return sum(slot.key.nbytes for slot in self.slots)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Events of all slots in order of time. Passes may overlap.

        A slot is in use until the next node of its pass begins, so that the slots of one node are
        in use together.
        """
        found = [step for one in self.passes for step in self._pass_steps[one.index]]
        found.sort(key=lambda step: step[0])  # stable: events of one pass and time stay in order
        return tuple(found)

    @cached_property
    def arrays(self) -> StepArrays:
        """Events and slots as NumPy arrays."""
        from penstock.plan.arrays import step_arrays  # noqa: PLC0415  (loads NumPy)

        return step_arrays(
            self.steps,
            [slot.key.nbytes for slot in self.slots],
            [slot.needed_at_ns is not None for slot in self.slots],
            self.small_beside,
            self.small_at_need,
        )

    @property
    def axis_ns(self) -> tuple[int, int]:
        """Begin and end of the step, as far as they are known."""
        begins = [one.start_ns for one in self.passes]
        ends = [one.end_ns for one in self.passes]
        if self.steps:
            begins.append(self.steps[0][0])
            ends.append(self.steps[-1][0])
        if self.operators:
            begins.append(self.operators[0].start_ns)
            ends.append(self.operators[-1].end_ns)
        return min(begins, default=0), max(ends, default=0)

    @cached_property
    def peak_saved_bytes(self) -> int:
        """Most bytes that would be resident at once if everything stayed."""
        return self.arrays.most_alive_bytes(self.small_bytes)

    @cached_property
    def small_beside(self) -> tuple[int, ...]:
        """Bytes below the floor that are alive when each slot is saved."""
        return tuple(
            self.small_bytes if slot.small_bytes is None else slot.small_bytes
            for slot in self.slots
        )

    @cached_property
    def small_at_need(self) -> tuple[int, ...]:
        """Bytes below the floor that are alive when each slot is needed."""
        return tuple(
            at_save if slot.small_bytes_at_need is None else slot.small_bytes_at_need
            for slot, at_save in zip(self.slots, self.small_beside, strict=True)
        )

    def small_at(self, event: Event, index: int) -> int:
        """Return the bytes below the floor that are alive at an event of a slot."""
        return (self.small_beside if event is Event.SAVE else self.small_at_need)[index]

    @cached_property
    def match_keys(self) -> tuple[MatchKey, ...]:
        """Key by which a plan is looked up, per slot."""
        return tuple(slot.key.match_key for slot in self.slots)

    @cached_property
    def derived(self) -> dict[object, Any]:
        """Cache of what was made from this profile and takes long to make."""
        return {}

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """Indices of the slots that backward asked for, pass by pass in order of first use."""
        return tuple(
            index
            for one in self.passes
            for _, event, index in self._pass_steps[one.index]
            if event is Event.USE
        )

    @cached_property
    def _pass_steps(self) -> dict[int, list[Step]]:
        return {one.index: list(self._steps_of(one)) for one in self.passes}

    def _steps_of(self, one: PassProfile) -> Iterator[Step]:
        mine = self._by_pass[one.index]
        slots = self.slots
        save, use, free = Event.SAVE, Event.USE, Event.FREE
        for i in mine:
            yield slots[i].saved_at_ns, save, i
        needed = sorted(
            ((when, i) for i in mine if (when := slots[i].needed_at_ns) is not None),
        )
        node: list[int] = []
        begin_ns = end_ns = one.end_ns
        for when, i in needed:
            if not node or when - begin_ns > NODE_NS:
                for j in node:
                    yield when, free, j
                node, begin_ns = [], when
            yield when, use, i
            node.append(i)
            end_ns = max(end_ns, when)
        never = (i for i in mine if slots[i].needed_at_ns is None)
        yield from ((end_ns, free, i) for i in (*node, *never))

    @cached_property
    def _by_pass(self) -> dict[int, list[int]]:
        mine: dict[int, list[int]] = {one.index: [] for one in self.passes}
        for i, slot in enumerate(self.slots):
            mine[slot.pass_index].append(i)
        return mine

    def to_json(self) -> str:
        """Return one JSON document."""
        return serial.dump("profile", VERSION, self)

    @staticmethod
    def from_json(text: str, *, source: str = "") -> Profile:
        """Parse ``to_json``'s text. Raises PlanError naming ``source`` and the field at fault."""
        return serial.load(Profile, text, kind="profile", version=VERSION, source=source)


def _check_slot(slot: SlotProfile, passes: set[int]) -> None:
    if slot.pass_index not in passes:
        raise PlanError(
            f"profile: slot {slot.key} belongs to pass {slot.pass_index}, which the profile does not have"
        )
    if slot.key.nbytes <= 0:
        raise PlanError(f"profile: slot {slot.key} has {slot.key.nbytes} bytes")
    if len({sample.codec for sample in slot.codecs}) != len(slot.codecs):
        names = ", ".join(sample.codec for sample in slot.codecs)
        raise PlanError(f"profile: slot {slot.key} has two samples of one codec: {names}")
    if slot.needed_at_ns is not None and slot.needed_at_ns < slot.saved_at_ns:
        raise PlanError(
            f"profile: slot {slot.key} is needed at {slot.needed_at_ns} ns, before it is saved at"
            f" {slot.saved_at_ns} ns"
        )
