"""Planning: pure functions from a profile to a frozen plan of which slots to keep, offload or recompute.

1. The runtime records one step as a :class:`Profile`.
2. A policy (:mod:`penstock.plan.policies`) turns it, a :class:`Machine` and :class:`Budgets` into a
   :class:`Plan`.
3. The runtime looks every saved slot up in the plan (:meth:`Plan.lookup`).

Nothing here imports torch or moves a byte, so planning for a machine that is not at hand takes
milliseconds.
"""

from penstock.plan.machine import Budgets, Compute, Machine
from penstock.plan.operators import Convolution, Operator, WorkspaceLimit
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import CodecSample, PassProfile, Profile, SlotProfile, Transient
from penstock.plan.slots import MatchKey, SlotKey

__all__ = [
    "Action",
    "Budgets",
    "CodecSample",
    "Compute",
    "Convolution",
    "Decision",
    "Machine",
    "MatchKey",
    "Operator",
    "PassProfile",
    "Plan",
    "Profile",
    "SlotKey",
    "SlotProfile",
    "Transient",
    "WorkspaceLimit",
]
