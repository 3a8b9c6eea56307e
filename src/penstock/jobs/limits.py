"""What a machine that was described has in fact."""

from __future__ import annotations

import os

from penstock.core.errors import ConfigError, free_space_bytes
from penstock.core.units import format_bytes
from penstock.jobs.description import Machine
from penstock.jobs.policy import Limits


def limits_of(machine: Machine, resting_bytes: int) -> Limits:
    """What jobs may have of a machine.

    Args:
        machine: As it was described.
        resting_bytes: What of its flash jobs of an earlier manager have.

    Raises:
        ConfigError: Flash has less room than is promised; with the figures.
    """
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
