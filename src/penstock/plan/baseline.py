"""Memory and time of a network without a plan: the two baselines that plans are measured against.

vDNN (MICRO 2016) compares with a *static baseline*, which allocates everything that a step ever needs
at once and for the whole step, and with an *oracle*, a device with enough memory (section 5).
"""

from __future__ import annotations

from penstock.plan.algorithms import fastest
from penstock.plan.convolution import with_algorithms
from penstock.plan.machine import Machine
from penstock.plan.profile import Profile


def static_bytes(profile: Profile, machine: Machine) -> int:
    """Return the device memory of a network-wide static allocation, with the fastest convolutions.

    Every saved storage has its own place for the whole step. Gradients and outputs that are not saved
    share one place, as large as their peak; workspaces share another, as large as the largest.

    Args:
        profile: A profile of a whole device; of any other, only the bytes that its budget counts.
        machine: Chooses the convolutions' algorithms.
    """
    fast = with_algorithms(profile, machine, ())
    if not fast.transients:
        return fast.saved_bytes + fast.small_bytes
    passing = max(one.nbytes for one in profile.transients)
    return fast.fixed_bytes + fast.saved_bytes + passing + workspace_bytes(profile, machine)


def workspace_bytes(profile: Profile, machine: Machine) -> int:
    """Return the largest workspace of the fastest convolutions."""
    if machine.compute is None:
        return 0
    found = (fastest(one, machine.compute) for one in profile.operators if one.convolution)
    return max((one.workspace_bytes for one in found), default=0)


def oracle_ns(profile: Profile, machine: Machine) -> int:
    """Return the step time with unlimited memory: the fastest convolutions and no waits."""
    fast = with_algorithms(profile, machine, ())
    begins = [one.start_ns for one in fast.passes] + [one.start_ns for one in fast.operators]
    ends = [one.end_ns for one in fast.passes] + [one.end_ns for one in fast.operators]
    return max(ends, default=0) - min(begins, default=0)
