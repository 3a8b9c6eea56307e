"""Codecs that a planner may choose from, and when it is measured what they make of the bytes.

[Note: sampled passes]
    Where transfers keep a tier busy for as long as the network, or the tiers have not room enough for
    bytes as they are, and codecs are to be chosen, the next pass is sampled: what lossless codecs make
    of each storage is measured, and the plan is made again with that. Else they would win nothing, and
    Numba, which they need, takes memory, and time to compile. It is sampled once more when codecs no
    longer make of the bytes what the plan was made for: sparsity changes during training. So it is when
    they prove far slower beside a network than they were alone. Sparsity that appears only in what goes
    raw is not noticed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from penstock.codec import registry
from penstock.codec.base import Fidelity
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.units import format_bytes
from penstock.observe.recorder import Recorder
from penstock.plan.groups import SlotGroup, groups_of
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.runtime.orders import Orders, PassRecord
from penstock.runtime.profiling import was_sampled
from penstock.runtime.stores import LEAST_CODEC_BUDGET_BYTES

TRIAL_PASSES: Final = 3
"""Passes from which the time under a plan with codecs is told."""
LOSS: Final = 1.1
"""How much longer than foretold without codecs such a pass may take."""
RATIO_DRIFT: Final = 0.15
"""Share of the encoded source bytes by which their frames may differ from what was planned."""
MAX_SAMPLED_PASSES: Final = 32
"""Passes sampled at most: those that are waited for may never come back."""


class CodecChoice:
    """Codecs as one planner may use them. Changed under its lock.

    Attributes:
        chosen: Whether codecs are chosen, by what they were measured to make of a slot.
        forced: Name of the codec to use wherever it can be; ``""``: there is none.
        pays: Whether they could win something under the plan.
        scratch_bytes: Memory that they work in; 0 until it is taken.
    """

    def __init__(self, codec: str, open_codecs: Callable[[], int], recorder: Recorder) -> None:
        """Take no memory yet.

        Args:
            codec: ``"auto"``, ``"none"``, or the name of the one to use wherever it can be.
            open_codecs: Takes the scratch memory of codecs from the device budget; returns its bytes, 0
                if there is no room.
            recorder: Receives a mark if there is none.
        """
        self.chosen = codec == "auto"
        self.forced = "" if codec in ("auto", "none") else codec
        self.pays = False
        self.scratch_bytes = 0
        self._open_codecs = open_codecs
        self._recorder = recorder
        self._sampled_passes = 0
        self._sample_again = False
        self._without_ns = 0
        self._took_ns: list[int] = []

    @property
    def can_encode(self) -> bool:
        """Return whether codecs are chosen and have their scratch memory."""
        return self.chosen and self.scratch_bytes > 0

    def begin(self, budget_bytes: int, *, planned: bool) -> None:
        """Take the scratch memory that is known to be needed, before anything is saved.

        Args:
            budget_bytes: Limit of the device budget.
            planned: Whether there is a plan already, with codecs; without room for their scratch memory
                what it has encoded goes as it is.

        Raises:
            ConfigError: There is no such codec, or it may not be used everywhere.
            BudgetError: The budget has no room for its scratch memory.
        """
        if self.chosen and budget_bytes < LEAST_CODEC_BUDGET_BYTES:
            self._do_without()  # or passes would be sampled for nothing
        name = self.forced
        if not name:
            if self.chosen and planned:
                self.open()
            return
        if registry.get(name).fidelity is Fidelity.POSITIVE:
            raise ConfigError(
                f"codec {name!r} keeps only signs: it is chosen by itself, where that is proven to be"
                " enough; give codec='auto'"
            )
        self.scratch_bytes = self._open_codecs()
        if not self.scratch_bytes:
            raise BudgetError(
                f"the device budget of {budget_bytes} bytes has no room for what codec"
                f" {name!r} works in; give at least {format_bytes(LEAST_CODEC_BUDGET_BYTES)}, or"
                " codec='none'",
                slot=f"codec {name}",
                limit_bytes=budget_bytes,
                least_bytes=LEAST_CODEC_BUDGET_BYTES,
            )

    def open(self) -> None:
        """Take the scratch memory; if there is no room, choose no codecs from now on."""
        self.note_opened(self._open_codecs())

    def note_opened(self, scratch_bytes: int) -> None:
        """Note that so much scratch memory was taken; 0: there was no room."""
        self.scratch_bytes = scratch_bytes
        if not scratch_bytes:
            self._do_without()

    def _do_without(self, reason: str = "no room for their scratch memory") -> None:
        self.chosen = False
        self._recorder.mark("no_codecs", reason=reason)

    def expect(self, without_ns: int) -> None:
        """Note how long a pass is foretold to take without the codecs of a new plan; 0: it has none."""
        self._without_ns = without_ns
        self._took_ns.clear()

    def lose(self, record: PassRecord) -> bool:
        """Return whether codecs are given up: passes take longer than foretold without them.

        How fast a worker is beside a network and other transfers is known only from that.
        """
        if not self._without_ns or not self.chosen or record.observed or record.sampled:
            return False
        self._took_ns.append(record.took_ns)
        if len(self._took_ns) <= TRIAL_PASSES:  # the first pass is the one in which code is loaded
            return False
        took_ns = statistics.median(self._took_ns[-TRIAL_PASSES:])
        lost = took_ns > LOSS * self._without_ns
        self._without_ns = 0
        if lost:
            self._do_without("passes took longer than foretold without them")
        return lost

    def learn(self, record: PassRecord, orders: Orders) -> bool:
        """Note what a pass under these orders tells of codecs.

        Returns:
            Whether codecs were measured, so that a plan can be made with that.
        """
        sampled = record.sampled and any(slot.codecs for slot in record.slots)
        self._sampled_passes += record.sampled
        if sampled:
            self._sample_again = record.slow_codecs  # found when it ended, after the samples
        elif record.shortage or record.slow_codecs or ratios_drifted(record, orders):
            self._sample_again = True
        return sampled

    def wants_samples(self, orders: Orders, kinds: Sequence[PassRecord]) -> bool:
        """Return whether a better plan may be made if the next pass is sampled; ``kinds`` are known."""
        return (
            self.chosen
            and self._sampled_passes < MAX_SAMPLED_PASSES
            and (self._sample_again or not all(was_sampled(known) for known in kinds))
            and orders.plan is not None
            and orders.plan.offloaded_bytes > 0
            and self.pays
        )


def ratios_drifted(record: PassRecord, orders: Orders) -> bool:
    """Return whether codecs made of a pass's bytes something else than the plan counted on."""
    source = foreseen = found = 0.0
    for slot in record.slots:
        decision = None if slot.frame_bytes is None else orders.decision_for(slot.key)
        if decision is not None and decision.codec and slot.frame_bytes is not None:
            source += slot.key.nbytes
            foreseen += decision.ratio * slot.key.nbytes
            found += slot.frame_bytes
    return abs(found - foreseen) > RATIO_DRIFT * source


def codecs_pay(plan: Plan, profile: Profile, machine: Machine, budgets: Budgets) -> bool:
    """Return whether codecs could win something.

    They can where a channel is as busy as the network, or where the tiers are too small for bytes as they
    are and more room would help.

    Args:
        plan: The plan.
        profile: The profile that it was made from.
        machine: The bandwidths that it was made for.
        budgets: What there is.
    """
    from penstock.plan.pipeline import channel_bound  # noqa: PLC0415  (only once there is a plan)

    placed = _placed(profile, plan)
    return channel_bound(profile, machine, placed, budgets.staging_bytes) or _is_tight(
        profile, plan, budgets
    )


def _placed(profile: Profile, plan: Plan) -> list[tuple[SlotGroup, str]]:
    """Return the groups that the plan offloads, and to which tier."""
    decisions = ((group, plan.lookup(group.key)) for group in groups_of(profile))
    return [(group, decision.tier) for group, decision in decisions if decision and decision.tier]


def _is_tight(profile: Profile, plan: Plan, budgets: Budgets) -> bool:
    lacking = profile.saved_bytes > budgets.host_bytes + budgets.flash_bytes
    counted_on = any(decision.codec for decision in plan.decisions)
    return lacking and (plan.policy == "all" or not plan.feasible or counted_on)
