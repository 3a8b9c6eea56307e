"""Lossless codecs in plans for a script's step: where a session tries them, and what it then plans."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.units import format_bytes
from penstock.plan.plan import Plan
from penstock.runtime.policy_request import PolicyRequest, has_codecs


@dataclass(frozen=True, slots=True)
class CodecUse:
    """Bytes that a plan encodes with one codec, in one pass of each kind."""

    codec: str
    source_bytes: int
    frame_bytes: int

    def __str__(self) -> str:
        """Format such as ``"zero-value makes 2.10 MiB of 4.00 MiB"``."""
        made = format_bytes(self.frame_bytes)
        return f"{self.codec} makes {made} of {format_bytes(self.source_bytes)}"


def would_try(request: PolicyRequest, plan: Plan) -> bool:
    """Return whether a session tries codecs, once it has made this plan without them."""
    choice: Any = importlib.import_module("penstock.runtime.codec_choice")  # loads torch
    return bool(choice.codecs_pay(plan, request.profile, request.machine, request.budgets))


def encoding_plan(request: PolicyRequest) -> tuple[PolicyRequest, Plan] | None:
    """Return the plan of a session that has tried codecs, with what it was asked; None: it uses none.

    What codecs work in is taken from the budget.
    """
    stores: Any = importlib.import_module("penstock.runtime.stores")  # loads torch
    on_device, device_bytes = request.profile.device != "cpu", request.budgets.device_bytes
    scratch_bytes = stores.codec_scratch_bytes(device_bytes, on_device=on_device)
    if not scratch_bytes or not has_codecs(request.plan()):
        return None
    left = replace(request.budgets, device_bytes=device_bytes - scratch_bytes)
    request = replace(request, budgets=left, scratch_bytes=scratch_bytes)
    plan = request.plan()
    return (request, plan) if has_codecs(plan) else None


def codec_uses(request: PolicyRequest, plan: Plan) -> tuple[CodecUse, ...]:
    """Return what each codec makes of what it encodes; most bytes first."""
    found: dict[str, tuple[int, int]] = {}
    for slot in request.profile.slots:
        decision = plan.lookup(slot.key)
        if decision is not None and decision.codec:
            source, frames = found.get(decision.codec, (0, 0))
            nbytes = slot.key.nbytes
            found[decision.codec] = source + nbytes, frames + round(decision.ratio * nbytes)
    uses = (CodecUse(name, *nbytes) for name, nbytes in found.items())
    return tuple(sorted(uses, key=lambda one: -one.source_bytes))
