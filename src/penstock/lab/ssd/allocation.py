"""Where consecutive pages go: static allocation over channels, chips, dies and planes."""

from __future__ import annotations

import dataclasses

from penstock.lab.ssd.cells import Geometry


def die_order(geometry: Geometry, allocation: str) -> list[int]:
    """By ``number % dies``, the die counted over the drive, in the order of ``ftl.allocation``."""
    flat = dataclasses.replace(geometry, planes_per_die=1)
    return plane_order(flat, allocation)


def plane_order(geometry: Geometry, allocation: str) -> list[int]:
    """By ``lpn % planes``, the plane counted over the drive: channel, chip, die, plane, plane fastest."""
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
