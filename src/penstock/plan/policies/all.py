"""``all``: everything above the floor is offloaded. The least memory, and the most traffic."""

from __future__ import annotations

from penstock.plan.assemble import assemble
from penstock.plan.groups import groups_of
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile


def offload_all(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Offload every slot, earliest saved first where the tiers fill up."""
    return assemble(
        "all",
        profile,
        machine,
        budgets,
        chosen=list(groups_of(profile)),
        why_kept=lambda _: "",  # every group is chosen
    )
