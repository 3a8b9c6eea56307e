"""Policies by name. One file each; a policy is a pure function of profile, machine and budgets."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.errors import ConfigError
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.policies.all import offload_all
from penstock.plan.policies.auto import auto
from penstock.plan.policies.flashneuron import flashneuron
from penstock.plan.policies.keep import keep
from penstock.plan.policies.lifetime import lifetime
from penstock.plan.policies.ranked import ranked
from penstock.plan.policies.recompute import recompute
from penstock.plan.policies.vdnn_all import vdnn_all
from penstock.plan.policies.vdnn_conv import vdnn_conv
from penstock.plan.policies.vdnn_dyn import vdnn_dyn
from penstock.plan.profile import Profile

Policy = Callable[[Profile, Machine, Budgets], Plan]
"""Pure, and the same plan for the same arguments, everywhere."""

_POLICIES: dict[str, Policy] = {
    "all": offload_all,
    "auto": auto,
    "flashneuron": flashneuron,
    "keep": keep,
    "lifetime": lifetime,
    "ranked": ranked,
    "recompute": recompute,
    "vdnn-all": vdnn_all,
    "vdnn-conv": vdnn_conv,
    "vdnn-dyn": vdnn_dyn,
}


def get(name: str) -> Policy:
    """The policy of this name. Raises ConfigError, listing the names, where there is none."""
    try:
        return _POLICIES[name]
    except KeyError:
        raise ConfigError(f"unknown policy {name!r}; known are {', '.join(names())}") from None


def names() -> tuple[str, ...]:
    """The names of the policies, in alphabetical order."""
    return tuple(sorted(_POLICIES))
