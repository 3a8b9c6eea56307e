"""``keep``: everything stays. The base line, and what a session does before it has a profile."""

from __future__ import annotations

from penstock.plan.assemble import assemble
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile


def keep(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Offload nothing, whatever the budget."""
    return assemble(
        "keep",
        profile,
        machine,
        budgets,
        chosen=[],
        why_kept=lambda _: "policy keep: everything stays",
    )
