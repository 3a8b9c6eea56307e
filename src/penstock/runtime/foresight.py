"""Cost of a plan on this machine, before it has run: a replay, in plain numbers."""

from __future__ import annotations

from penstock.core.errors import PlanError
from penstock.observe.forecast import Forecast
from penstock.plan.machine import Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.replay import replay


def foresee(profile: Profile, plan: Plan, machine: Machine, *, since_ns: int) -> Forecast | None:
    """Replay a plan that comes into force now.

    Gaps between the profile's passes do not count: an optimizer may step there.

    Args:
        profile: Of the passes that the plan is for.
        plan: As it is followed.
        machine: Its measured speeds.
        since_ns: Now, by the recorder's clock.

    Returns:
        ``None`` if the profile has no pass, or does not tell enough.
    """
    if not profile.passes:
        return None
    try:
        found = replay(profile, plan, machine)
    except PlanError:  # a given plan runs modules again, and its passes are not observed
        return None
    return Forecast(
        since_ns=since_ns,
        machine=machine.name,
        passes=len(profile.passes),
        compute_ns=sum(one.end_ns - one.start_ns for one in profile.passes) + found.lean_ns,
        recompute_ns=found.recompute_ns,
        interference_ns=found.interference_ns,
        budget_ns=found.budget_ns,
        demand_ns=found.demand_ns,
        late_ns=found.late_ns,
        device_peak_bytes=found.peak_bytes,
        host_peak_bytes=found.host.peak_bytes,
        flash_peak_bytes=found.flash.peak_bytes,
        host_written_bytes=found.host.written_bytes,
        host_read_bytes=found.host.read_bytes,
        flash_written_bytes=found.flash.written_bytes,
        flash_read_bytes=found.flash.read_bytes,
        saved_bytes=profile.peak_saved_bytes,
    )
