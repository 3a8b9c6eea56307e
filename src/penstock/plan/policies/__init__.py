"""Policies by name. One file each; a policy is a pure function of profile, machine and budgets.

They are imported at their first use: the names are needed earlier, and plans need NumPy, which must not
be imported before ``penstock run`` has set up its threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import cast

from penstock.core.errors import ConfigError
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile

Policy = Callable[[Profile, Machine, Budgets], Plan]
"""Pure function that returns the same plan for the same arguments on every machine."""


def _run(place: str, profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    module, function = place.split(":")
    policy = cast(Policy, getattr(import_module(f"{__name__}.{module}"), function))
    return policy(profile, machine, budgets)


_POLICIES: dict[str, Policy] = {
    "all": partial(_run, "all:offload_all"),
    "auto": partial(_run, "auto:auto"),
    "flashneuron": partial(_run, "flashneuron:flashneuron"),
    "keep": partial(_run, "keep:keep"),
    "lifetime": partial(_run, "lifetime:lifetime"),
    "ranked": partial(_run, "ranked:ranked"),
    "recompute": partial(_run, "recompute:recompute"),
    "vdnn-all": partial(_run, "vdnn_all:vdnn_all"),
    "vdnn-conv": partial(_run, "vdnn_conv:vdnn_conv"),
    "vdnn-dyn": partial(_run, "vdnn_dyn:vdnn_dyn"),
}


def get(name: str) -> Policy:
    """Return the policy of this name. Raises ConfigError with the known names if there is none."""
    try:
        return _POLICIES[name]
    except KeyError:
        raise ConfigError(f"unknown policy {name!r}; known are {', '.join(names())}") from None


def names() -> tuple[str, ...]:
    """Return the names of the policies, in alphabetical order."""
    return tuple(sorted(_POLICIES))
