"""Fraction of a device that small matrix products keep busy.

A product is computed in tiles, and a last wave of tiles takes as long as a full one (NVIDIA's "Matrix
Multiplication Background User's Guide", chapter 3: tile and wave quantization). A multiprocessor computes
128 by 128 outputs at a time, or as many in another shape.
"""

from __future__ import annotations

import math
from typing import Final

from penstock.plan.machine import Compute
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


def product_utilization(compute: Compute, one: Product) -> float:
    """Return the fraction of the device that a call of ``mm`` or the like keeps busy.

    A product whose depth is larger than both of its sides is split along its depth as well, like the
    gradient of a convolution's filters: it always fills the device.
    """
    if one.depth > max(one.rows, one.columns):
        return 1.0
    return max(
        utilization(compute, one.rows, one.columns, one.count),
        utilization(compute, one.columns, one.rows, one.count),
    )
