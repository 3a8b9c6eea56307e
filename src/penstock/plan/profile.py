"""What one step saved, and when it wanted it back: the ordered events that a policy plans from.

Times are nanoseconds of compute on the profiled step's own axis: what the step waited for Penstock
is taken out, so that a profile says what the network does and not what an earlier plan cost it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from penstock.core.errors import PlanError
from penstock.plan import serial
from penstock.plan.operators import Operator
from penstock.plan.slots import MatchKey, SlotKey

if TYPE_CHECKING:
    from penstock.plan.arrays import StepArrays

VERSION: Final = 6
NODE_NS: Final = 50_000
"""Slots needed within this time of each other are taken to be needed by one node of backward."""


class Event(enum.IntEnum):
    """What happens to a slot, in this order."""

    SAVE = 0
    """Forward hands it over."""
    USE = 1
    """A node of backward asks for it."""
    FREE = 2
    """That node is done with it, or its pass ended without asking."""


Step = tuple[int, Event, int]
"""(when in ns, what, index of the slot)."""


@dataclass(frozen=True, slots=True)
class CodecSample:
    """What a codec did with a sample of one slot's bytes, as measured on this machine.

    Raises:
        PlanError: The codec has no name, or a figure is not finite, or not positive (but ``ratio`` may
            be 0).
    """

    codec: str
    """Its name as ``"zero-value"``, or a chain's as ``"zero-value+bfloat16"``."""
    ratio: float
    """Bytes of the frame per byte of the source."""
    encode_bytes_per_s: float
    """Bytes of the source, on one core."""
    decode_bytes_per_s: float
    """Bytes of the source, on one core."""

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
        """What ``nbytes`` of source are expected to take in a tier; a frame is never empty."""
        return max(1, math.ceil(nbytes * self.ratio))

    def encode_s(self, nbytes: int) -> float:
        """Seconds of one core to encode ``nbytes`` of source."""
        return nbytes / self.encode_bytes_per_s

    def decode_s(self, nbytes: int) -> float:
        """Seconds of one core to decode to ``nbytes`` of source."""
        return nbytes / self.decode_bytes_per_s


@dataclass(frozen=True, slots=True)
class SlotProfile:
    """One storage that a pass saved."""

    key: SlotKey
    pass_index: int
    """The pass (a forward graph and its backward) that saved it."""
    saved_at_ns: int
    needed_at_ns: int | None
    """When backward first asked for it, or None if it never did."""
    kind: str
    """Type of the module that saved it, as ``"Conv2d"``."""
    held_elsewhere: bool
    """Something else kept the storage alive, so offloading it would have freed nothing."""
    dtype: str
    small_bytes: int | None = None
    """Bytes below the floor that are alive beside it when it is saved. Where it is ``None``, all of the
    profile's are taken to be."""
    codecs: tuple[CodecSample, ...] = ()
    """Those that a plan may choose for it, which are lossless ones, and ones whose loss is proven to
    change no gradient. Without any it goes to a tier as it is."""
    producer: str | None = None
    """Path of the innermost module in whose forward the storage was made. It can be made again by running
    a module that both made and saved it; None: not known, so it cannot. In a measured profile everything
    that saved it is in that forward as well, by one and the same call of the module."""
    small_bytes_at_need: int | None = None
    """The same as ``small_bytes``, when it is needed. Where it is ``None``, as much as then, since the
    last saved is the first needed."""
    recipe: tuple[str, ...] = ()
    """Paths of the modules that make it again from ``source``, called one after the other: the first
    makes its storage, those that follow change that in place. Empty: there is no such way."""
    source: int | None = None
    """The slot, of the same pass, that the first module of ``recipe`` is called with: by its index."""

    def moved(
        self,
        saved_at_ns: int,
        needed_at_ns: int | None,
        small_bytes: int | None,
        small_bytes_at_need: int | None,
    ) -> SlotProfile:
        """The same at another time, and beside other bytes. Quicker than ``replace``."""
        return SlotProfile(
            self.key,
            self.pass_index,
            saved_at_ns,
            needed_at_ns,
            self.kind,
            self.held_elsewhere,
            self.dtype,
            small_bytes,
            self.codecs,
            self.producer,
            small_bytes_at_need,
            self.recipe,
            self.source,
        )

    @property
    def idle_ns(self) -> int | None:
        """From being saved to being needed, or None if it never was."""
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
    """Bytes of device memory that are neither fixed nor in a slot, from a moment to the next one."""

    at_ns: int
    nbytes: int


@dataclass(frozen=True)
class Profile:
    """The saved storages of one step, in the order in which they were saved."""

    device: str
    slots: tuple[SlotProfile, ...]
    passes: tuple[PassProfile, ...]
    small_bytes: int = 0
    """The most bytes alive at once in storages below the floor. They stay, and are resident."""
    small_count: int = 0
    """How many storages below the floor the step saved."""
    protected_bytes: int = 0
    """Saved bytes that are parameters, buffers or optimizer state. They are alive anyway."""
    operators: tuple[Operator, ...] = ()
    """What the network computed, in order; without them nothing can be computed again."""
    fixed_bytes: int = 0
    """Parameters, their gradients, buffers and optimizer state: what is on the device all the time.
    0: the budget does not count them, as on a machine whose device is host memory."""
    transients: tuple[Transient, ...] = ()
    """Outputs and gradients on their way, workspaces, storages below the floor: the device memory that
    nothing is to be done about, over time. Of a profile of the whole device, ``small_bytes`` of a slot
    are the fixed and the worst of the transient bytes beside it, at its save and at its need. Empty: the
    budget counts none of it."""
    unrepeatable: tuple[str, ...] = ()
    """Paths of the modules that must not be run again as a whole: another run would not do the same, or
    cannot be arranged. What is inside them may be."""

    def __post_init__(self) -> None:
        known = set()
        for one in self.passes:
            known.add(one.index)
            if not one.start_ns <= one.backward_start_ns <= one.end_ns:
                raise PlanError(f"profile: pass {one.index} goes back in time: {one}")
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
                f"profile: slot {slot.key} is made from slot {slot.source}, and there are"
                f" {len(self.slots)}"
            )
        source = self.slots[slot.source]
        if source is slot or source.pass_index != slot.pass_index:
            raise PlanError(
                f"profile: slot {slot.key} of pass {slot.pass_index} is made from {source.key} of"
                f" pass {source.pass_index}; it must be another slot of the same pass"
            )

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages above the floor that the step saved."""
        return sum(slot.key.nbytes for slot in self.slots)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What happens to which slot, in order. Passes may overlap in time.

        A slot is in use until the next node of its pass begins, so that the slots of one node are
        in use together.
        """
        found = [step for one in self.passes for step in self._pass_steps[one.index]]
        found.sort(key=lambda step: step[0])  # stable: what a pass does at one time stays in order
        return tuple(found)

    @cached_property
    def arrays(self) -> StepArrays:
        """The same as arrays."""
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
        """When the step begins and ends, as far as is known."""
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
        """The most bytes that would be resident at once if everything stayed."""
        return self.arrays.most_alive_bytes(self.small_bytes)

    @cached_property
    def small_beside(self) -> tuple[int, ...]:
        """For each slot, the bytes below the floor that are alive beside it when it is saved."""
        return tuple(
            self.small_bytes if slot.small_bytes is None else slot.small_bytes
            for slot in self.slots
        )

    @cached_property
    def small_at_need(self) -> tuple[int, ...]:
        """For each slot, the same when it is needed."""
        return tuple(
            at_save if slot.small_bytes_at_need is None else slot.small_bytes_at_need
            for slot, at_save in zip(self.slots, self.small_beside, strict=True)
        )

    def small_at(self, event: Event, index: int) -> int:
        """Bytes below the floor beside a slot at what happens to it."""
        return (self.small_beside if event is Event.SAVE else self.small_at_need)[index]

    @cached_property
    def match_keys(self) -> tuple[MatchKey, ...]:
        """For each slot, what plans are looked up by."""
        return tuple(slot.key.match_key for slot in self.slots)

    @cached_property
    def derived(self) -> dict[object, Profile]:
        """Profiles that were made from this one, by what was changed: some take long to make."""
        return {}

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """Indices of the slots that backward asked for, pass by pass in the order of asking."""
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
        """One JSON document."""
        return serial.dump("profile", VERSION, self)

    @staticmethod
    def from_json(text: str, *, source: str = "") -> Profile:
        """Parse ``to_json``'s text. Raises PlanError naming ``source`` and the field at fault."""
        return serial.load(Profile, text, kind="profile", version=VERSION, source=source)


def _check_slot(slot: SlotProfile, passes: set[int]) -> None:
    if slot.pass_index not in passes:
        raise PlanError(
            f"profile: slot {slot.key} belongs to pass {slot.pass_index}, which is not there"
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
