"""The line of an event log that says what a plan does with each slot, and why."""

from __future__ import annotations

from typing import Any, Final

from penstock.plan.plan import Plan
from penstock.plan.profile import Profile, SlotProfile

MOST_SLOTS: Final = 2000
"""Maximum number of slots of a line, some 200 bytes each; the smallest are left out."""


def plan_fields(plan: Plan, profile: Profile) -> dict[str, Any]:
    """Return the fields of a line of kind ``plan``, except its time and device.

    Times are nanoseconds from the beginning of the slot's pass in the profile.

    Args:
        plan: The plan that comes into force.
        profile: The passes that it was made for.
    """
    slots = list(profile.slots)
    kept = sorted(slots, key=lambda slot: -slot.key.nbytes)[:MOST_SLOTS]
    if len(kept) < len(slots):
        chosen = set(map(id, kept))
        slots = [slot for slot in slots if id(slot) in chosen]
    starts = {each.index: each.start_ns for each in profile.passes}
    return {
        "policy": plan.policy,
        "left_out": len(profile.slots) - len(slots),
        "passes": [
            {
                "index": each.index,
                "forward_ns": each.backward_start_ns - each.start_ns,
                "backward_ns": each.end_ns - each.backward_start_ns,
            }
            for each in profile.passes
        ],
        "slots": [_slot_fields(plan, slot, starts[slot.pass_index]) for slot in slots],
    }


def _slot_fields(plan: Plan, slot: SlotProfile, start_ns: int) -> dict[str, Any]:
    decision = plan.lookup(slot.key)
    return {
        "slot": str(slot.key),
        "nbytes": slot.key.nbytes,
        "module_kind": slot.kind,
        "dtype": slot.dtype,
        "pass": slot.pass_index,
        "saved_ns": slot.saved_at_ns - start_ns,
        "needed_ns": None if slot.needed_at_ns is None else slot.needed_at_ns - start_ns,
        "action": "" if decision is None else str(decision.action),
        "tier": "" if decision is None else decision.tier,
        "codec": "" if decision is None else decision.codec,
        "reason": "not in the plan" if decision is None else decision.reason,
    }
