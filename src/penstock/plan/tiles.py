"""Fraction of a device's peak that matrix products reach.

It is measured for some sizes, or else told from the tiles that keep the device busy. A product is
computed in tiles, and a last wave of tiles takes as long as a full one (NVIDIA's "Matrix Multiplication
Background User's Guide", chapter 3: tile and wave quantization). A multiprocessor computes 128 by 128
outputs at a time, or as many in another shape.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

from penstock.plan.machine import PRODUCT_SIDES, Compute
from penstock.plan.operators import Product

TILE_COLUMNS: Final = 128
"""Columns of the blocks that matrix products are computed in (Lavin and Gray's and cuDNN's SGEMM)."""
NARROWEST_TILE: Final = 32
"""Columns of the narrowest block that cuDNN's kernels compute."""


def utilization(compute: Compute, rows: int, columns: int, products: int) -> float:
    """Return the fraction of the device that products of one size keep busy; over 0, at most 1."""
    if not compute.processors:
        return 1.0
    even = 1 << (columns - 1).bit_length()
    width = min(TILE_COLUMNS, max(NARROWEST_TILE, even))
    height = TILE_COLUMNS**2 // width
    tiles = products * math.ceil(rows / height) * math.ceil(columns / width)
    waves = math.ceil(tiles / compute.processors)
    return products * rows * columns / (waves * compute.processors * TILE_COLUMNS**2)


def product_share(compute: Compute, one: Product, *, half: bool) -> float:
    """Return the fraction of the peak that a call of ``mm`` or the like reaches; over 0, at most 1.

    Where it is measured, which is in 32 bits, the shortest side tells it: the fewer operations there are
    for each element, the longer memory takes beside them. Else it is ``compute.efficiency`` of what keeps
    the device busy. A product whose depth is larger than both of its sides is split along its depth as
    well, like the gradient of a convolution's filters: it always fills the device.
    """
    if compute.product_efficiency and not half:
        return _measured_share(compute.product_efficiency, min(one.rows, one.columns, one.depth))
    if one.depth > max(one.rows, one.columns):
        return compute.efficiency
    return compute.efficiency * max(
        utilization(compute, one.rows, one.columns, one.count),
        utilization(compute, one.columns, one.rows, one.count),
    )


def _measured_share(shares: tuple[float, ...], side: int) -> float:
    """Interpolate on logarithmic axes: between measured sides, a power of the side."""
    last = len(PRODUCT_SIDES) - 1
    if side >= PRODUCT_SIDES[last]:
        return shares[last]
    above = max(1, bisect_right(PRODUCT_SIDES, side))
    low, high = PRODUCT_SIDES[above - 1], PRODUCT_SIDES[above]
    part = math.log(max(side, 1) / low) / math.log(high / low)
    return float(shares[above - 1] ** (1 - part) * shares[above] ** part)
