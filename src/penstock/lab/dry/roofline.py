"""Operator times on a machine that is not at hand, from shapes alone.

The roofline (Williams et al., CACM 2009): an operator takes the longer of its arithmetic at the device's
peak and its memory traffic at the device's bandwidth, and at least its launch. Convolutions reach only
a share of the peak, ``Compute.efficiency``; matrix products a share that depends on their sizes
(:mod:`penstock.plan.tiles`); everything else is bound by memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from penstock.core.errors import ConfigError, PlanError
from penstock.plan.machine import Compute, Machine
from penstock.plan.operators import Operator, Product
from penstock.plan.profile import Profile
from penstock.plan.tiles import product_share
from penstock.plan.time_map import TimeMap

DENSE: Final = frozenset(
    {
        "aten.addmm",
        "aten.baddbmm",
        "aten.bmm",
        "aten.convolution",
        "aten.convolution_backward",
        "aten.mm",
    }
)
"""Operators that multiply matrices or are equivalent to that."""
_FUSED_ATTENTION: Final = "aten._scaled_dot_product_"


def is_dense(name: str) -> bool:
    """Return True if an operator of this name is bound by arithmetic where its shapes allow it."""
    return name in DENSE or name.startswith(_FUSED_ATTENTION)


def compute_of(machine: Machine) -> Compute:
    """Return the machine's compute speeds. Raises ConfigError if they are not known."""
    if machine.compute is None:
        raise ConfigError(
            f"machine {machine.name!r}: its field 'compute' is missing, so no operator can be timed from"
            " its shape; take a preset, or add the device's peak rates and memory bandwidth"
        )
    return machine.compute


def operator_ns(
    compute: Compute,
    *,
    flops: int,
    moved_bytes: int,
    half: bool,
    dense: bool,
    product: Product | None = None,
) -> int:
    """Nanoseconds that an operator takes; at least one, and never less for more work.

    Args:
        compute: What it runs on.
        flops: Floating-point operations; a multiplication and an addition are two.
        moved_bytes: Device memory that it reads and writes.
        half: True if it computes in 16 bits.
        dense: True if it reaches only a share of the peak.
        product: Sizes of its matrix products, which tell this share; None: ``compute.efficiency``.
    """
    rate = compute.half_flops_per_s if half else compute.float32_flops_per_s
    if product is not None:
        rate *= product_share(compute, product, half=half)
    elif dense:
        rate *= compute.efficiency
    arithmetic_ns = _ns(flops, rate)
    traffic_ns = _ns(moved_bytes, compute.memory_bytes_per_s)
    return max(1, arithmetic_ns, traffic_ns, round(compute.operator_s * 1e9))


def _ns(count: int, per_s: float) -> int:
    """Return the time of ``count`` at a rate, rounded up; in integers, so that more never takes less."""
    numerator, denominator = per_s.as_integer_ratio()
    return -(-count * denominator * 1_000_000_000 // numerator)


def retimed(profile: Profile, machine: Machine) -> Profile:
    """Return the profile as it would be on another machine: the same slots and bytes, other times.

    Gaps between operators keep their length; times within an operator keep their fraction of it.

    Args:
        profile: A profile whose operators have counts, as a dry profile's do.
        machine: A machine with known compute speeds.

    Raises:
        ConfigError: The machine's compute speeds are not known.
        PlanError: The profile has no operators, or one without counts, or two at the same time.
    """
    compute = compute_of(machine)
    _check(profile)
    took = [_time_of(operator, compute) for operator in profile.operators]
    operators = _moved(profile.operators, took)
    at = TimeMap(
        (was.start_ns, was.end_ns, one.start_ns, one.end_ns)
        for was, one in zip(profile.operators, operators, strict=True)
    )
    return replace(
        profile,
        slots=tuple(
            replace(
                slot,
                saved_at_ns=at(slot.saved_at_ns),
                needed_at_ns=None if slot.needed_at_ns is None else at(slot.needed_at_ns),
            )
            for slot in profile.slots
        ),
        passes=tuple(
            replace(
                one,
                start_ns=at(one.start_ns),
                backward_start_ns=at(one.backward_start_ns),
                end_ns=at(one.end_ns),
            )
            for one in profile.passes
        ),
        operators=tuple(operators),
        transients=tuple(replace(one, at_ns=at(one.at_ns)) for one in profile.transients),
    )


def _moved(operators: Sequence[Operator], took: Sequence[int]) -> list[Operator]:
    """Return the operators with their new durations, shifted by those of earlier ones."""
    found, shift = [], 0
    for one, took_ns in zip(operators, took, strict=True):
        start_ns = one.start_ns + shift
        found.append(one.moved(start_ns, start_ns + took_ns))
        shift += took_ns - one.took_ns
    return found


def _time_of(operator: Operator, compute: Compute) -> int:
    return operator_ns(
        compute,
        flops=operator.flops,
        moved_bytes=operator.moved_bytes,
        half=operator.half,
        dense=is_dense(operator.name),
        product=operator.product,
    )


def _check(profile: Profile) -> None:
    if not profile.operators:
        raise PlanError(
            "profile: it has no operators, so it cannot be timed for another machine; use a dry profile"
        )
    for operator in profile.operators:
        if not (operator.flops or operator.moved_bytes):
            raise PlanError(
                f"profile: operator {operator.name!r} of {operator.module!r} has neither flops nor"
                " moved_bytes: it was measured and is valid only for the machine it was measured on;"
                " use a dry profile"
            )
    for one, following in pairwise(profile.operators):
        if following.start_ns < one.end_ns:
            raise PlanError(
                f"profile: operator {following.name!r} of {following.module!r} starts at"
                f" {following.start_ns} ns, before {one.name!r} has ended at {one.end_ns} ns"
            )
