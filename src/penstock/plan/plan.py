"""What goes where and when: a frozen value, printable, comparable, JSON both ways."""

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
"""How the note of a plan begins that cannot keep its budget."""


class Action(enum.StrEnum):
    """What becomes of a saved storage."""

    KEEP = "keep"
    """It stays where it is until backward has used it."""
    OFFLOAD = "offload"
    """It goes to a tier when it is saved and comes back before it is needed."""
    RECOMPUTE = "recompute"
    """It is dropped; what made it is run again before it is needed."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one slot, and why."""

    key: SlotKey
    action: Action
    tier: str
    """``"flash"`` or ``"host"``; ``""`` where the slot is kept."""
    reason: str
    """For people. What differs between slots of one cause follows a semicolon."""
    codec: str = ""
    """How it is encoded on its way to the tier, by name; ``""``: its bytes go as they are."""
    ratio: float = 1.0
    """Bytes in the tier per byte of the slot, as expected; 1 without a codec."""
    prefetch_at: int | None = None
    """Reading it back begins no sooner than when backward first asks for the slot at this place of the
    plan's ``need_order``; None: as soon as the window has room."""
    recipe: str = ""
    """Which of the plan's ``recomputed`` makes it again, if that is a recipe and not a module."""

    def __post_init__(self) -> None:
        moves = self.action is Action.OFFLOAD
        if self.recipe and self.action is not Action.RECOMPUTE:
            raise PlanError(f"slot {self.key}: action {self.action} with recipe {self.recipe!r}")
        if self.tier not in (("flash", "host") if moves else ("",)):
            raise PlanError(f"slot {self.key}: action {self.action} with tier {self.tier!r}")
        if not moves and (self.codec or self.prefetch_at is not None):
            raise PlanError(
                f"slot {self.key}: action {self.action} with codec {self.codec!r} and prefetch_at"
                f" {self.prefetch_at}"
            )
        if self.prefetch_at is not None and self.prefetch_at < 0:
            raise PlanError(f"slot {self.key}: prefetch_at is {self.prefetch_at}")
        if not (math.isfinite(self.ratio) and self.ratio >= 0) or (
            not self.codec and self.ratio != 1
        ):
            raise PlanError(
                f"slot {self.key}: ratio {self.ratio} with codec {self.codec!r}; it must be zero or"
                " more, and 1 without a codec"
            )

    @property
    def encoded_bytes(self) -> int:
        """What the slot is expected to take in its tier."""
        return math.ceil(self.key.nbytes * self.ratio)


@dataclass(frozen=True)
class Plan:
    """A policy's answer. One decision per match key, in the order of saving."""

    policy: str
    budgets: Budgets
    decisions: tuple[Decision, ...]
    need_order: tuple[SlotKey, ...]
    """The slots that backward asked for, in the order of first asking, kept ones included."""
    window_bytes: int
    """The most bytes in targets of reads, prefetched and in use; at least what one node uses. It may
    be more than is free while much is kept: reads ahead take only what is free at the moment."""
    notes: tuple[str, ...] = ()
    """What a user should know, as waits that are certain or a budget that cannot be kept."""
    recomputed: tuple[str, ...] = ()
    """Paths of the modules that are run again in backward, none inside another; and names of recipes
    (``plan.recipes``), by which the output of a module is made again for those that save it."""
    workspace_limits: tuple[WorkspaceLimit, ...] = ()
    """The convolutions that are not computed the fastest way (vDNN, sections 3.4 and 4.3). Advice, which
    replays follow: the runtime leaves the choice of algorithms to PyTorch."""
    widest_bytes: int | None = None
    """How far the window may grow where reads come late, if not to the device's budget. Further, reads
    ahead would take the room of what is saved or made again in backward, and be dropped for that."""
    joined: bool = False
    """Whether a layer of forward is over only when what is written under it is, as vDNN has it (section
    3.2), and reads begin at their ``prefetch_at`` without regard to the window: vDNN has none. On
    paper only: the runtime writes behind while there is room."""
    _by_match: dict[MatchKey, Decision] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {decision.key.match_key: decision for decision in reversed(self.decisions)}
        if len(index) != len(self.decisions):
            raise PlanError(f"plan {self.policy!r}: two decisions match the same slot")
        if self.window_bytes < 0:
            raise PlanError(f"plan {self.policy!r}: window_bytes is {self.window_bytes}")
        object.__setattr__(self, "_by_match", index)

    def lookup(self, key: SlotKey) -> Decision | None:
        """The decision for a slot of this module, ordinal and size bucket; None: there is none."""
        return self._by_match.get(key.match_key)

    def lookup_match(self, match: MatchKey) -> Decision | None:
        """The same by the slot's ``match_key``, where that is known already."""
        return self._by_match.get(match)

    @property
    def lean_convolutions(self) -> tuple[str, ...]:
        """Paths of the convolutions that have a limit for their workspace."""
        return tuple(dict.fromkeys(one.module for one in self.workspace_limits))

    @property
    def feasible(self) -> bool:
        """Whether the device budget can be kept, as far as the profile tells."""
        return not any(note.startswith(INFEASIBLE) for note in self.notes)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the decisions that offload, each slot counted once."""
        return sum(d.key.nbytes for d in self.decisions if d.action is Action.OFFLOAD)

    @property
    def encoded_bytes(self) -> int:
        """What ``offloaded_bytes`` are expected to be in the tiers; the same if nothing is encoded."""
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
        """One JSON document."""
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
        made = f" {again} made again ({format_bytes(self.recomputed_bytes)})," if again else ""
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
