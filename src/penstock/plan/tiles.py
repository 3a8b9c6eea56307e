"""The share of a device that products of matrices keep busy, where they are small.

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
"""Of the blocks that matrix products are computed in (Lavin and Gray's and cuDNN's SGEMM alike)."""
NARROWEST_TILE: Final = 32
"""Columns of the narrowest block that cuDNN's kernels compute."""


def filled(compute: Compute, rows: int, columns: int, products: int) -> float:
    """The share of the device that so many products of one size keep busy; over 0, at most 1."""
    if not compute.processors:
        return 1.0
    even = 1 << (columns - 1).bit_length()
    width = min(TILE_COLUMNS, max(NARROWEST_TILE, even))
    height = TILE_COLUMNS**2 // width
    tiles = products * math.ceil(rows / height) * math.ceil(columns / width)
    waves = math.ceil(tiles / compute.processors)
    return products * rows * columns / (waves * compute.processors * TILE_COLUMNS**2)


def product_filled(compute: Compute, one: Product) -> float:
    """The same of a call of ``mm`` or the like.

    A product whose depth is larger than both of its sides is split along its depth as well, as the
    gradient of a convolution's filters is: it always fills the device.
    """
    if one.depth > max(one.rows, one.columns):
        return 1.0
    return max(
        filled(compute, one.rows, one.columns, one.count),
        filled(compute, one.columns, one.rows, one.count),
    )
