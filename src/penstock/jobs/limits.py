"""What a machine that was described has in fact, and what each job may hold of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from penstock.core.errors import ConfigError, free_space_bytes
from penstock.core.units import MIB, format_bytes
from penstock.jobs.description import Machine
from penstock.jobs.policy import ALIVE, Entry, Limits, Phase

_ASLEEP_BYTES: Final = 64 * MIB
"""For a process that sleeps, above what it holds: it has threads that do not."""


def limits_of(machine: Machine, resting_bytes: int) -> Limits:
    """What jobs may have of a machine.

    Args:
        machine: As it was described.
        resting_bytes: What of its flash jobs of an earlier manager have.

    Raises:
        ConfigError: Memory or flash are less than is promised; with the figures.
    """
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if machine.memory_bytes > there:
        raise ConfigError(
            f"[machine] memory is {format_bytes(machine.memory_bytes)}, and this machine has"
            f" {format_bytes(there)}, for all that runs on it: share out less"
        )
    flash = None
    if machine.directories:
        devices = {os.stat(each).st_dev: each for each in machine.directories}
        free = sum(map(free_space_bytes, devices.values())) + resting_bytes
        flash = free if machine.capacity_bytes is None else machine.capacity_bytes
        if flash > free:
            raise ConfigError(
                f"[machine] flash_capacity is {format_bytes(flash)}, and"
                f" {', '.join(machine.directories)} has {format_bytes(free)} free"
            )
    return Limits(
        memory_bytes=machine.memory_bytes,
        slice_s=machine.slice_s,
        patience_s=machine.patience_s,
        device_bytes=machine.device_bytes,
        flash_bytes=flash,
    )


def shares(entries: Sequence[Entry], budget_bytes: int) -> dict[str, int]:
    """How much each job that has a process may hold; together no more than the budget.

    Each may hold what it is charged for. What is free is shared out: a little to those who sleep, the
    rest in equal parts to those who compute.

    Args:
        entries: All jobs.
        budget_bytes: Of all together. If they are charged for more, those who compute and hold less than
            they are charged for get less.
    """
    alive = [each for each in entries if each.phase in ALIVE]
    made = {each.name: each.charge_bytes for each in alive}
    free = budget_bytes - sum(each.charge_bytes for each in entries)
    for each in alive:
        if free < 0 and each.phase is Phase.AWAKE:
            less = min(-free, each.charge_bytes - each.held_bytes)
            made[each.name] -= less
            free += less
    if not alive or free <= 0:
        return made
    resting = [each for each in alive if each.phase is Phase.ASLEEP]
    a_little = min(_ASLEEP_BYTES, free // len(alive))
    for each in resting:
        made[each.name] += a_little
    up = [each for each in alive if each not in resting]
    for each in up:
        made[each.name] += (free - a_little * len(resting)) // len(up)
    return made
