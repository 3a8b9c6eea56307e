"""Which codecs a session may use, and when it is measured what they make of the bytes.

[Note: sampled passes]
    Where transfers keep a tier busy for as long as the network, or the tiers have not room enough for
    bytes as they are, and codecs are to be chosen, the next pass is sampled: what lossless codecs make
    of each storage is measured, and the plan is made again with that. Else they would win nothing, and
    Numba, which they need, takes memory, and time to compile. It is sampled once more when codecs no
    longer make of the bytes what the plan was made for: sparsity changes during training. Sparsity that
    appears only in what goes raw is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from penstock.codec import registry
from penstock.codec.base import Fidelity
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.units import format_bytes
from penstock.observe.recorder import Recorder
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import Profile
from penstock.plan.slots import SlotKey
from penstock.runtime.in_force import InForce
from penstock.runtime.known_passes import was_sampled
from penstock.runtime.shortage import Shortage
from penstock.runtime.storage import Pass
from penstock.runtime.stores import LEAST_CODEC_BUDGET_BYTES
from penstock.store.account import Account

RATIO_DRIFT: Final = 0.15
"""Share of the encoded source bytes by which what they took may differ from what was foreseen."""
MAX_SAMPLED_PASSES: Final = 32
"""So that passes that never come back are not waited for."""


class CodecUse:
    """Codecs as one planner may use them. Changed under its lock.

    Attributes:
        chosen: Whether codecs are chosen, by what they were measured to make of a slot.
        has_scratch: Whether they have the memory that they work in.
        shortage: What is done where tiers are too small for what was planned.
    """

    def __init__(self, codec: str, prepare: Callable[[], int], recorder: Recorder) -> None:
        """Use none yet.

        Args:
            codec: ``"auto"``, ``"none"``, or the name of the one to use wherever it can be.
            prepare: Takes the scratch memory of codecs from the budget and says how much that is, 0 if
                there was no room.
            recorder: Is told if there was none.
        """
        self.chosen = codec == "auto"
        self.has_scratch = False
        self.shortage = Shortage()
        self._forced = "" if codec in ("auto", "none") else codec
        self._prepare = prepare
        self._recorder = recorder
        self._sampled_passes = 0
        self._sample_again = False

    def begin(self, budget: Account, *, planned: bool) -> int:
        """Take what a codec that is to be used everywhere needs, before anything is saved.

        Args:
            budget: The device's.
            planned: Whether there is a plan already, with codecs; without room for their scratch memory
                what it has encoded goes as it is.

        Returns:
            Bytes of scratch memory taken from the budget.

        Raises:
            ConfigError: There is no such codec, or it may not be used everywhere.
            BudgetError: The budget has no room for its scratch memory.
        """
        if self.chosen and budget.limit_bytes < LEAST_CODEC_BUDGET_BYTES:
            self._do_without()  # or passes would be sampled for nothing
        name = self._forced
        if not name:
            return self.open() if self.chosen and planned else 0
        if registry.get(name).fidelity is Fidelity.POSITIVE:
            raise ConfigError(
                f"codec {name!r} keeps only signs: it is chosen by itself, where that is proven to be"
                " enough; give codec='auto'"
            )
        scratch_bytes = self._take_scratch()
        if not scratch_bytes:
            raise BudgetError(
                f"the device budget of {budget.limit_bytes} bytes has no room for what codec"
                f" {name!r} works in; give at least {format_bytes(LEAST_CODEC_BUDGET_BYTES)}, or"
                " codec='none'",
                slot=f"codec {name}",
                limit_bytes=budget.limit_bytes,
                least_bytes=LEAST_CODEC_BUDGET_BYTES,
            )
        return scratch_bytes

    def open(self) -> int:
        """Take their scratch memory, as many bytes as is said; if there is no room, do without them."""
        scratch_bytes = self._take_scratch()
        if not scratch_bytes:
            self._do_without()
        return scratch_bytes

    def _take_scratch(self) -> int:
        scratch_bytes = self._prepare()
        self.has_scratch = scratch_bytes > 0
        return scratch_bytes

    def _do_without(self) -> None:
        self.chosen = False
        self._recorder.mark("no_codecs", reason="no room for their scratch memory")

    def apply(self, decision: Decision) -> Decision:
        """The decision, with the codec that is to be used wherever it can be, if there is one."""
        if not self._forced or decision.action is not Action.OFFLOAD:
            return decision
        return replace(decision, codec=self._forced)

    def follow(self, plan: Plan, profile: Profile) -> None:
        """Follow ``plan``, made from ``profile``, from now on."""
        self.shortage.follow(plan, profile)

    def note(
        self, finished: Pass, decided: Mapping[SlotKey, Decision | None], *, asked: bool
    ) -> bool:
        """Take note of what a pass tells of codecs.

        Args:
            finished: The pass.
            decided: What became of its slots.
            asked: Whether it was to be sampled.

        Returns:
            Whether it was sampled, so that a plan can be made with that.
        """
        sampled = asked and any(record.codecs for record in finished.records)
        if asked:
            self._sampled_passes += 1
        if sampled:
            self._sample_again = False
        elif self.shortage.active or _ratios_drifted(finished, decided):
            self._sample_again = True
        return sampled

    def want_samples(self, in_force: InForce, kinds: Sequence[Pass]) -> bool:
        """Return whether a better plan may be made if the next pass is sampled; ``kinds`` are known."""
        plan = in_force.plan
        return (
            plan is not None
            and plan.offloaded_bytes > 0
            and self.chosen
            and self._sampled_passes < MAX_SAMPLED_PASSES
            and in_force.codecs_pay
            and (self._sample_again or not all(was_sampled(known) for known in kinds))
        )


def _ratios_drifted(finished: Pass, decided: Mapping[SlotKey, Decision | None]) -> bool:
    source = foreseen = found = 0.0
    for record in finished.records:
        decision = None if record.frame_bytes is None else decided.get(record.key)
        if decision is not None and decision.codec and record.frame_bytes is not None:
            source += record.key.nbytes
            foreseen += decision.ratio * record.key.nbytes
            found += record.frame_bytes
    return abs(found - foreseen) > RATIO_DRIFT * source
