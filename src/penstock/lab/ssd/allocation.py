"""Static allocation of consecutive pages over channels, chips, dies and planes."""

from __future__ import annotations

import dataclasses

from penstock.lab.ssd.cells import Geometry


def die_order(geometry: Geometry, allocation: str) -> list[int]:
    """Return, by ``number % dies``, the die counted over the drive, as ``ftl.allocation`` orders."""
    flat = dataclasses.replace(geometry, planes_per_die=1)
    return plane_order(flat, allocation)


def plane_order(geometry: Geometry, allocation: str) -> list[int]:
    """Return, by ``lpn % planes``, the plane counted over the drive (channel, chip, die, then plane)."""
    sizes = {
        "C": geometry.channels,
        "W": geometry.chips_per_channel,
        "D": geometry.dies_per_chip,
        "P": geometry.planes_per_die,
    }
    order = []
    for number in range(geometry.planes):
        left, at = number, {}
        for letter in allocation:
            left, at[letter] = divmod(left, sizes[letter])
        die = (at["C"] * sizes["W"] + at["W"]) * sizes["D"] + at["D"]
        order.append(die * sizes["P"] + at["P"])
    return order
