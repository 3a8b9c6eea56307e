"""A plan that is followed, taken apart for the questions that are asked of it while a pass runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.config import UNLIMITED
from penstock.plan.groups import SlotGroup, groups_of
from penstock.plan.machine import Budgets, Machine
from penstock.plan.pipeline import channel_bound
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import Profile
from penstock.plan.slots import MatchKey, SlotKey


@dataclass(frozen=True, slots=True)
class InForce:
    """Index of a plan's answers. Without arguments: there is no plan yet."""

    plan: Plan | None = None
    ranks: dict[MatchKey, int] = field(default_factory=dict)
    """Order of need of the plan, by match key."""
    triggers: dict[MatchKey, int] = field(default_factory=dict)
    """When, by match key, reading a slot back may begin, as a place in the order of need."""
    made_again: frozenset[tuple[str, int]] = frozenset()
    """Slots that are made again, of whatever size, as (module path, ordinal)."""
    first_ranks: dict[str, int] = field(default_factory=dict)
    """By path of a module that is run again: when backward first asks for anything in it."""
    codecs_pay: bool = False
    """True if codecs could win something: a channel is as busy as the network, or tiers are too small."""
    moves_nothing: bool = False
    """True if nothing is moved, and there is no budget, or no tier, to depart from the plan for."""
    _by_module: dict[tuple[str, int], Decision] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plan: Plan, *, profile: Profile | None, machine: Machine, budgets: Budgets
    ) -> InForce:
        """Take a plan apart.

        Args:
            plan: What is to be followed.
            profile: What it was made from; ``None`` if that is not known, and codecs then never pay.
            machine: The bandwidths that it was made for.
            budgets: What there is, whatever the plan was made for.
        """
        return cls(
            plan=plan,
            ranks={key.match_key: rank for rank, key in enumerate(plan.need_order)},
            triggers={
                decision.key.match_key: decision.prefetch_at
                for decision in plan.decisions
                if decision.prefetch_at is not None
            },
            made_again=frozenset(
                (decision.key.module, decision.key.ordinal)
                for decision in plan.decisions
                if decision.action is Action.RECOMPUTE and not decision.recipe
            ),
            first_ranks=_first_ranks(plan),
            codecs_pay=profile is not None
            and (
                channel_bound(profile, machine, _placed(profile, plan))
                or _is_tight(profile, plan, budgets)
            ),
            moves_nothing=not (plan.offloaded_bytes or plan.recomputed)
            and (
                budgets.device_bytes >= UNLIMITED or not (budgets.flash_bytes or budgets.host_bytes)
            ),
            _by_module={
                (decision.key.module, decision.key.bucket): decision
                for decision in reversed(plan.decisions)
                if decision.action is not Action.RECOMPUTE
            },
        )

    def decision_for(self, key: SlotKey) -> Decision | None:
        """Return the decision for a saved slot, or for its likes in the same module; None: unknown."""
        if self.plan is None:
            return None
        known = self.plan.lookup(key) or self._by_module.get((key.module, key.bucket))
        if known is None or (known.action is Action.RECOMPUTE and not known.recipe):
            return None
        return known


def _placed(profile: Profile, plan: Plan) -> list[tuple[SlotGroup, str]]:
    """Return the groups that the plan offloads, and to which tier."""
    decisions = ((group, plan.lookup(group.key)) for group in groups_of(profile))
    return [(group, decision.tier) for group, decision in decisions if decision and decision.tier]


def _is_tight(profile: Profile, plan: Plan, budgets: Budgets) -> bool:
    """Return whether the tiers are too small for bytes as they are, and more room would help."""
    lacking = profile.saved_bytes > budgets.host_bytes + budgets.flash_bytes
    counted_on = any(decision.codec for decision in plan.decisions)
    return lacking and (plan.policy == "all" or not plan.feasible or counted_on)


def _first_ranks(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for rank, key in enumerate(plan.need_order if plan.recomputed else ()):
        path = key.module
        while path and path not in plan.recomputed:
            path = path.rpartition(".")[0]
        if path:
            found.setdefault(path, rank)
    return found
