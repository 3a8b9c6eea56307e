"""The plan: a frozen value with a decision for each slot, printable, comparable, to JSON and back."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from penstock.core.errors import PlanError
from penstock.core.units import format_bytes
from penstock.plan import serial
from penstock.plan.machine import Budgets
from penstock.plan.operators import WorkspaceLimit
from penstock.plan.slots import MatchKey, SlotKey

VERSION = 5
INFEASIBLE = "infeasible: "
"""Prefix of the note of a plan that cannot keep its budget."""
TIGHT = "only "
"""Prefix of the note of a plan that keeps its budget, with little room for reads."""


class Action(enum.StrEnum):
    """Treatment of a saved storage."""

    KEEP = "keep"
    """Stay resident until backward has used it."""
    OFFLOAD = "offload"
    """Move to a tier when it is saved and come back before it is needed."""
    RECOMPUTE = "recompute"
    """Free it, and recompute it before it is needed."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Treatment of one slot, with the reason."""

    key: SlotKey
    action: Action
    tier: str
    """``"flash"`` or ``"host"``; ``""`` if the slot is not offloaded."""
    reason: str
    """Reason to show a user. Details that differ between slots of one cause follow a semicolon."""
    codec: str = ""
    """Name of the codec that encodes it for the tier; ``""``: not encoded."""
    ratio: float = 1.0
    """Expected bytes in the tier per byte of the slot; 1 without a codec."""
    prefetch_at: int | None = None
    """Index in the plan's ``need_order``: its read starts only once backward asks for the slot there;
    None: as soon as the read window has room."""
    recipe: str = ""
    """Name of the plan's ``recomputed`` that recomputes it, if that is a recipe and not a module."""

    def __post_init__(self) -> None:
        moves = self.action is Action.OFFLOAD
        if self.recipe and self.action is not Action.RECOMPUTE:
            raise PlanError(
                f"slot {self.key}: action {self.action} cannot have recipe {self.recipe!r}"
            )
        if self.tier not in (("flash", "host") if moves else ("",)):
            raise PlanError(f"slot {self.key}: action {self.action} cannot have tier {self.tier!r}")
        if not moves and (self.codec or self.prefetch_at is not None):
            raise PlanError(
                f"slot {self.key}: action {self.action} cannot have codec {self.codec!r} and"
                f" prefetch_at {self.prefetch_at}; only offloaded slots have them"
            )
        if self.prefetch_at is not None and self.prefetch_at < 0:
            raise PlanError(
                f"slot {self.key}: prefetch_at is {self.prefetch_at}, it must be zero or more"
            )
        if not (math.isfinite(self.ratio) and self.ratio >= 0) or (
            not self.codec and self.ratio != 1
        ):
            raise PlanError(
                f"slot {self.key}: ratio {self.ratio} with codec {self.codec!r}; it must be zero or"
                " more, and 1 without a codec"
            )

    @property
    def encoded_bytes(self) -> int:
        """Expected size of the slot in its tier."""
        return math.ceil(self.key.nbytes * self.ratio)


@dataclass(frozen=True)
class Plan:
    """Result of a policy. One decision per match key, in the order of saving."""

    policy: str
    budgets: Budgets
    decisions: tuple[Decision, ...]
    need_order: tuple[SlotKey, ...]
    """Slots that backward asked for, in the order of first use, kept ones included."""
    window_bytes: int
    """Largest number of bytes in targets of reads, prefetched and in use; at least those of one node. It
    may exceed the memory that is free while much is kept: prefetches take only what is free."""
    notes: tuple[str, ...] = ()
    """Warnings to the user, such as waits that are certain or a budget that cannot be kept."""
    recomputed: tuple[str, ...] = ()
    """Paths of modules that are recomputed in backward, none inside another; and names of recipes
    (``plan.recipes``), which recompute the output of a module for others that save it."""
    workspace_limits: tuple[WorkspaceLimit, ...] = ()
    """Convolutions that do not use their fastest algorithm (vDNN, sections 3.4 and 4.3). Only replays
    follow this: the runtime leaves the choice of algorithms to PyTorch."""
    widest_bytes: int | None = None
    """Largest useful read window in bytes, None for the device budget. The runtime widens the window when
    reads are late; wider still, prefetches would take the room of bytes that backward saves or
    recomputes, and be dropped for those."""
    joined: bool = False
    """True if a layer of forward ends only when the writes that began under it have ended (vDNN, section
    3.2), and reads start at their ``prefetch_at`` regardless of the window, which vDNN does not have.
    Only replays follow this: the runtime writes behind while there is room."""
    _by_match: dict[MatchKey, Decision] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {decision.key.match_key: decision for decision in reversed(self.decisions)}
        if len(index) != len(self.decisions):
            raise PlanError(f"plan {self.policy!r}: two decisions match the same slot")
        if self.window_bytes < 0:
            raise PlanError(
                f"plan {self.policy!r}: window_bytes is {self.window_bytes}, it must be zero or more"
            )
        object.__setattr__(self, "_by_match", index)

    def lookup(self, key: SlotKey) -> Decision | None:
        """Return the decision for a slot of this module, ordinal and size bucket, or None."""
        return self._by_match.get(key.match_key)

    def lookup_match(self, match: MatchKey) -> Decision | None:
        """Return the decision for a ``match_key``, or None."""
        return self._by_match.get(match)

    @property
    def lean_convolutions(self) -> tuple[str, ...]:
        """Paths of the convolutions whose workspace has a limit."""
        return tuple(dict.fromkeys(one.module for one in self.workspace_limits))

    @property
    def feasible(self) -> bool:
        """True if the device budget can be kept according to the profile."""
        return not any(note.startswith(INFEASIBLE) for note in self.notes)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the decisions that offload, each slot counted once."""
        return sum(d.key.nbytes for d in self.decisions if d.action is Action.OFFLOAD)

    @property
    def encoded_bytes(self) -> int:
        """Expected size of ``offloaded_bytes`` in the tiers; equal if nothing is encoded."""
        return sum(d.encoded_bytes for d in self.decisions if d.action is Action.OFFLOAD)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the decisions that keep, each slot counted once."""
        return sum(d.key.nbytes for d in self.decisions if d.action is Action.KEEP)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes of the decisions that recompute, each slot counted once."""
        return sum(d.key.nbytes for d in self.decisions if d.action is Action.RECOMPUTE)

    def to_json(self) -> str:
        """Return one JSON document."""
        return serial.dump("plan", VERSION, self)

    @staticmethod
    def from_json(text: str, *, source: str = "") -> Plan:
        """Parse ``to_json``'s text. Raises PlanError naming ``source`` and the field at fault."""
        return serial.load(Plan, text, kind="plan", version=VERSION, source=source)

    def __str__(self) -> str:
        offloaded, kept, again = (
            sum(d.action is action for d in self.decisions)
            for action in (Action.OFFLOAD, Action.KEEP, Action.RECOMPUTE)
        )
        made = f" {again} recomputed ({format_bytes(self.recomputed_bytes)})," if again else ""
        lines = [
            f"plan {self.policy!r} for {format_bytes(self.budgets.device_bytes)} of device memory:"
            f" {offloaded} slots offloaded ({self._offloaded_text()}),"
            f" {kept} kept ({format_bytes(self.kept_bytes)}),{made}"
            f" read window {format_bytes(self.window_bytes)}",
            *(f"  note: {note}" for note in self.notes),
        ]
        verdicts = [f"{d.action} {d.tier} {d.codec}".rstrip() for d in self.decisions]
        wide = max((len(str(decision.key)) for decision in self.decisions), default=0)
        broad = max(13, *map(len, verdicts)) if verdicts else 0
        for decision, verdict in zip(self.decisions, verdicts, strict=True):
            lines.append(f"  {decision.key!s:<{wide}}  {verdict:<{broad}}  {decision.reason}")
        return "\n".join(lines)

    def _offloaded_text(self) -> str:
        text = format_bytes(self.offloaded_bytes)
        if any(decision.codec for decision in self.decisions):
            return f"{text}, as about {format_bytes(self.encoded_bytes)}"
        return text
