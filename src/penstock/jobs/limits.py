"""Limits of a configured machine, and each job's share of the budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from penstock.core.errors import ConfigError, free_space_bytes
from penstock.core.memory import physical_bytes
from penstock.core.units import MIB, format_bytes
from penstock.jobs.description import JobsMachine
from penstock.jobs.policy import ALIVE, JobEntry, JobPhase, Limits

_ASLEEP_BYTES: Final = 64 * MIB
"""Margin for a sleeping process above what it holds, since some of its threads do not sleep."""


def limits_of(machine: JobsMachine, resting_bytes: int) -> Limits:
    """Return the limits of a machine.

    Args:
        machine: Configured machine.
        resting_bytes: Bytes of its flash that jobs of an earlier manager use.

    Raises:
        ConfigError: The machine has less memory or flash than configured.
    """
    there = physical_bytes()
    if machine.memory_bytes > there:
        raise ConfigError(
            f"[machine] memory is {format_bytes(machine.memory_bytes)}, but this machine has only"
            f" {format_bytes(there)}, for all its processes: lower it"
        )
    flash = None
    if machine.directories:
        devices = {os.stat(each).st_dev: each for each in machine.directories}
        free = sum(map(free_space_bytes, devices.values())) + resting_bytes
        flash = free if machine.capacity_bytes is None else machine.capacity_bytes
        if flash > free:
            raise ConfigError(
                f"[machine] flash_capacity is {format_bytes(flash)}, but"
                f" {', '.join(machine.directories)} has only {format_bytes(free)} free: lower it"
            )
    return Limits(
        memory_bytes=machine.memory_bytes,
        slice_s=machine.slice_s,
        patience_s=machine.patience_s,
        device_bytes=machine.device_bytes,
        flash_bytes=flash,
    )


def shares(entries: Sequence[JobEntry], budget_bytes: int) -> dict[str, int]:
    """Return the memory limit of each job that has a process; the sum is at most the budget.

    Each gets what it is charged for. The rest is divided: a little to sleeping jobs, the remainder in
    equal parts to computing jobs.

    Args:
        entries: All jobs.
        budget_bytes: Budget of all together. If the charges exceed it, computing jobs that hold less than
            their charge get less.
    """
    alive = [each for each in entries if each.phase in ALIVE]
    made = {each.name: each.charge_bytes for each in alive}
    free = budget_bytes - sum(each.charge_bytes for each in entries)
    for each in alive:
        if free < 0 and each.phase is JobPhase.AWAKE:
            less = min(-free, each.charge_bytes - each.held_bytes)
            made[each.name] -= less
            free += less
    if not alive or free <= 0:
        return made
    resting = [each for each in alive if each.phase is JobPhase.ASLEEP]
    a_little = min(_ASLEEP_BYTES, free // len(alive))
    for each in resting:
        made[each.name] += a_little
    up = [each for each in alive if each not in resting]
    for each in up:
        made[each.name] += (free - a_little * len(resting)) // len(up)
    return made
