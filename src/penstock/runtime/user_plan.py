"""User plans: reading one, and refusing one that is for another model, or for other tiers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError, PlanError
from penstock.core.files import read_text
from penstock.core.units import format_bytes
from penstock.plan.machine import Budgets
from penstock.plan.plan import Plan

SUFFIX: Final = ".json"
"""Suffix of the name of a plan's file; names of policies do not have it."""


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a file, as ``penstock plan --save-plan FILE.json`` writes it, or ``Plan.to_json``.

    Raises:
        ConfigError: It cannot be read.
        PlanError: It is no plan; names the file and the field at fault.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan {str(path)!r} cannot be read: {error}") from error
    return Plan.from_json(text, source=str(path))


def check_tiers(plan: Plan, budgets: Budgets) -> None:
    """Raise PlanError if a plan sends slots to a tier that does not exist."""
    for tier, nbytes in (("host", budgets.host_bytes), ("flash", budgets.flash_bytes)):
        user = next((d for d in plan.decisions if d.tier == tier), None)
        if user is not None and not nbytes:
            wanted = "host_memory" if tier == "host" else "a flash directory"
            raise PlanError(
                f"plan {plan.policy!r} sends slot {user.key} to the {tier} tier, but there is none;"
                f" give {wanted}, or plan anew"
            )


def note_on_budget(plan: Plan, budgets: Budgets) -> tuple[str, ...]:
    """Return a note if the plan was made for more device memory than there is."""
    needed, there = plan.budgets.device_bytes, budgets.device_bytes
    if needed <= there:
        return ()
    return (
        f"the plan was made for {format_bytes(needed)} of device memory, the session has"
        f" {format_bytes(there)}: what does not fit is spilled on demand, which is slow",
    )


def check_paths(plan: Plan, known: Collection[str], root: str) -> None:
    """Raise PlanError if a plan names modules below ``root`` that are not there."""
    for key in (decision.key for decision in plan.decisions):
        mine = key.module == root or key.module.startswith(root + ".")
        if mine and "<" not in key.module and key.module not in known:
            raise PlanError(
                f"plan {plan.policy!r} is for another model: it tells of slot {key}, and this"
                f" {root} has no module {key.module!r}; plan anew"
            )
