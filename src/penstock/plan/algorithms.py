"""How long convolutions take, and what they need beside, by the algorithm that computes them.

cuDNN has a family of algorithms for a convolution, and takes the fastest whose workspace fits a limit; vDNN
(MICRO 2016, sections 3.4 and 4.3) makes a plan of that. What each takes is modelled here, for any
geometry, from the work and the bytes that it moves: a phase takes the longer of its arithmetic and its
memory traffic (:class:`Compute`), and an algorithm the sum of its phases. Nothing is fitted to a network.

Implicit GEMM (Chetlur et al., "cuDNN", 2014, section 3)
    A matrix product whose left side is gathered from the map on the fly. No workspace. Beside the product
    the cores work out where each gathered element lies: ``INDEXING_OPERATIONS`` for each, which is then
    used for a whole tile of ``TILE_COLUMNS``.
GEMM with precomputed indices (cuDNN's IMPLICIT_PRECOMP_GEMM)
    The same without that. Its workspace is an offset for each element of a filter and of an output map.
    (cuDNN's GEMM writes out what the product reads: more bytes and more time than this, so it is left out.)
FFT (Mathieu et al. 2013; Vasilache et al. 2014, section 2 and its table of steps)
    Maps and filters are transformed, transposed, multiplied point by point as complex matrices, and the
    products transposed and transformed back. A real transform of n points is 2.5 n log2 n operations; of
    a plane it is two passes over memory, in tiles small enough for on-chip memory one. The spectra of
    input, filters and output are its workspace: cuDNN's need for the second convolution of AlexNet, as
    Oyama et al. (2018) tell it, is that to within 1 %. Stride 1, 32 bits; maps of up to 256 points a side,
    padded to a power of two.
Tiled FFT (cuDNN 4 and later)
    The same over tiles of 32 by 32, with the spectra of the filters and of one tile of every image at a
    time. cuDNN's manual says that it needs less than FFT for large maps, as it would not if it held all
    tiles; a tile of every image makes the matrices wide enough. For a map of one tile the sizes are
    those that NVIDIA's sample ``mnistCUDNN`` prints.
Winograd (Lavin and Gray 2016; cuDNN 5 and later, so only where ``Compute.winograd`` says so)
    F(4x4, 3x3), not fused: tiles of 6 by 6 are transformed, multiplied point by point and transformed
    back to 4 by 4 outputs. All transformed tiles are its workspace. Filters of 3 by 3, stride 1, 32 bits.

An operator of backward computes the gradient of the input, of the filters, or both: one or two
convolutions of the same geometry, by its count of operations.

Small products do not fill a device whose ``Compute.processors`` are known ("Matrix Multiplication Background
User's Guide", NVIDIA, chapter 3: tile and wave quantization): a processor is busy with 128 by 128 outputs at
a time, or as many in another shape, and a last wave takes as long as a full one. The gradient of
filters is split along its depth as well, so that it always fills.

A convolution may also be computed in *parts* of its batch, one after the other, each with a workspace for
that part only (Oyama et al., "μ-cuDNN", CLUSTER 2018): filters are read, and transformed, for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from penstock.plan.machine import Compute
from penstock.plan.operators import Convolution, Operator

INDEXING_OPERATIONS: Final = 16
"""Two divisions by multiplication, the products and sums of an address, and the check of the border."""
TILE_COLUMNS: Final = 128
"""Of the blocks that matrix products are computed in (Lavin and Gray's and cuDNN's SGEMM alike)."""
INDEXING_SHARE: Final = TILE_COLUMNS / (TILE_COLUMNS + INDEXING_OPERATIONS)
"""Speed of implicit GEMM in that of a plain matrix product."""
NARROWEST_TILE: Final = 32
"""Columns of the narrowest block that cuDNN's kernels compute."""
MOST_PARTS: Final = 64
"""Into how many parts a batch is cut at the most; halves of halves."""
_INDEX_BYTES: Final = 4
_FFT_MOST: Final = 256
_TILE: Final = 32
_MOVES_IN_PASSES: Final = 5
"""How often a spectrum is written or read beside the product: by two passes and a transposition."""
_MOVES_ON_CHIP: Final = 3
"""By one pass and a transposition."""
_WINOGRAD_TILE: Final = 6
_WINOGRAD_MOVES: Final = 1
"""The transform writes in the order that the product reads."""
_WINOGRAD_TRANSFORM_OPERATIONS: Final = 12 * 12
"""Of a tile: twelve transforms of one dimension, of twelve operations (Lavin and Gray, section 4.3)."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How one convolution operator is computed."""

    name: str
    took_ns: int
    """All parts together."""
    workspace_bytes: int
    parts: int = 1
    """Of the batch, one after the other."""


def lean_algorithm(operator: Operator, compute: Compute) -> Algorithm:
    """The memory-optimal algorithm. The operator must be a convolution."""
    return Algorithm("implicit GEMM", _gemm_ns(operator, compute, INDEXING_SHARE), 0)


def fastest(
    operator: Operator, compute: Compute, limit_bytes: int | None = None, most_parts: int = 1
) -> Algorithm:
    """The fastest algorithm whose workspace fits; of equals that of the least workspace.

    Args:
        operator: A convolution, or its backward.
        compute: What it runs on.
        limit_bytes: For the workspace; None: there is none, which makes it the performance-optimal one.
        most_parts: Into how many parts the batch may be cut.
    """
    best: Algorithm | None = None
    parts = 1
    while parts <= min(most_parts, _geometry(operator).batch):
        found = _first_that_fits(_of_part(operator, parts), compute, limit_bytes)
        whole = replace(found, took_ns=parts * found.took_ns, parts=parts)
        if best is None or whole.took_ns + parts < best.took_ns:  # by more than is rounded
            best = whole
        parts *= 2
    assert best is not None
    return best


def _first_that_fits(operator: Operator, compute: Compute, limit_bytes: int | None) -> Algorithm:
    same = replace(operator, module="", pass_index=0, start_ns=0, end_ns=0)
    for one in _by_speed(same, compute):
        if limit_bytes is None or one.workspace_bytes <= limit_bytes:
            return one
    return lean_algorithm(operator, compute)


@lru_cache(maxsize=4096)
def _by_speed(operator: Operator, compute: Compute) -> tuple[Algorithm, ...]:
    found = _applicable(operator, compute)
    return tuple(sorted(found, key=lambda one: (one.took_ns, one.workspace_bytes)))


def _of_part(operator: Operator, parts: int) -> Operator:
    """The same for the largest part of the batch."""
    if parts == 1:
        return operator
    shape = _geometry(operator)
    batch = math.ceil(shape.batch / parts)
    filters = shape.channels_in // shape.groups * shape.channels_out
    filter_bytes = filters * math.prod(shape.kernel_size) * shape.element_bytes
    map_bytes = max(0, operator.moved_bytes - filter_bytes)
    return replace(
        operator,
        flops=math.ceil(operator.flops * batch / shape.batch),
        moved_bytes=math.ceil(map_bytes * batch / shape.batch) + filter_bytes,
        convolution=replace(shape, batch=batch),
    )


def _applicable(operator: Operator, compute: Compute) -> Iterator[Algorithm]:
    shape = _geometry(operator)
    yield lean_algorithm(operator, compute)
    entries = shape.channels_in // shape.groups * math.prod(shape.kernel_size)
    indices_bytes = _INDEX_BYTES * (entries + math.prod(shape.output_size))
    yield Algorithm("precomputed GEMM", _gemm_ns(operator, compute, 1.0), indices_bytes)
    plane = len(shape.kernel_size) == 2 and set(shape.stride) == {1} and shape.groups == 1
    if operator.half or not plane:
        return
    if max(shape.kernel_size) > 1:
        sides = [_padded(*one) for one in zip(shape.output_size, shape.kernel_size, strict=True)]
        if max(sides) <= _FFT_MOST:
            yield _transformed(operator, compute, _fft(sides, tiles=1))
        if max(shape.kernel_size) < _TILE:
            tiles = _tiles(shape, _TILE)
            yield _transformed(operator, compute, _fft([_TILE, _TILE], tiles=tiles))
    if compute.winograd and shape.kernel_size == (3, 3):
        yield _transformed(operator, compute, _winograd(_tiles(shape, _WINOGRAD_TILE)))


def _tiles(shape: Convolution, side: int) -> int:
    """How many overlapping tiles of this side a map needs."""
    spans = zip(shape.output_size, shape.kernel_size, strict=True)
    return math.prod(math.ceil(out / (side - k + 1)) for out, k in spans)


def _gemm_ns(operator: Operator, compute: Compute, share: float) -> int:
    rate = compute.half_flops_per_s if operator.half else compute.float32_flops_per_s
    filled = 1.0
    shape, passes = _geometry(operator), _passes(operator)
    if shape.groups < max(2, shape.channels_in):  # else no product at all
        rows, columns = shape.batch * math.prod(shape.output_size), shape.channels_out
        if operator.backward:
            rows, columns = shape.batch * math.prod(shape.input_size), shape.channels_in
        filled = _filled(compute, rows, columns // shape.groups, shape.groups)
    slower = (passes - 1 + 1 / filled) / passes if not operator.backward or passes > 1 else 1.0
    work_s = slower * _flops(operator) / (rate * compute.efficiency * share)
    traffic_s = operator.moved_bytes / compute.memory_bytes_per_s
    return round(1e9 * max(work_s, traffic_s, compute.operator_s))


def _filled(compute: Compute, rows: int, columns: int, products: int) -> float:
    """The share of the device that so many products of one size keep busy; over 0, at most 1."""
    if not compute.processors:
        return 1.0
    width = min(TILE_COLUMNS, max(NARROWEST_TILE, 2 ** math.ceil(math.log2(columns))))
    height = TILE_COLUMNS**2 // width
    tiles = products * math.ceil(rows / height) * math.ceil(columns / width)
    waves = math.ceil(tiles / compute.processors)
    return products * rows * columns / (waves * compute.processors * TILE_COLUMNS**2)


@dataclass(frozen=True, slots=True)
class _Transform:
    """From a tile of a map to what is multiplied point by point, and back."""

    name: str
    tiles: int
    """Of one map."""
    held: int
    """Tiles of one map that are there at once."""
    tile_bytes: int
    """Of one transformed tile."""
    operations: float
    """To transform one tile."""
    points: int
    """Of one transformed tile: so many products of matrices."""
    point_operations: int
    """To multiply two points, and add it up."""
    moves: int
    """How often a transformed tile is written or read beside the product."""


def _fft(sides: list[int], *, tiles: int) -> _Transform:
    points, kept = math.prod(sides), sides[0] * (sides[1] // 2 + 1)
    on_chip = max(sides) <= _TILE
    return _Transform(
        name="FFT" if tiles == 1 else "tiled FFT",
        tiles=tiles,
        held=1,
        tile_bytes=8 * kept,
        operations=2.5 * points * math.log2(points),
        points=kept,
        point_operations=8,
        moves=_MOVES_ON_CHIP if on_chip else _MOVES_IN_PASSES,
    )


def _winograd(tiles: int) -> _Transform:
    return _Transform(
        name="Winograd",
        tiles=tiles,
        held=tiles,
        tile_bytes=4 * _WINOGRAD_TILE**2,
        operations=_WINOGRAD_TRANSFORM_OPERATIONS,
        points=_WINOGRAD_TILE**2,
        point_operations=2,
        moves=_WINOGRAD_MOVES,
    )


def _transformed(operator: Operator, compute: Compute, one: _Transform) -> Algorithm:
    shape = _geometry(operator)
    channels = shape.channels_in + shape.channels_out
    filters = shape.channels_in * shape.channels_out
    images = shape.batch * one.tiles
    transformed = images * channels + filters
    transformed_bytes = transformed * one.tile_bytes
    transform_s = _phase_s(
        compute,
        flops=one.operations * transformed,
        nbytes=operator.moved_bytes / _passes(operator) + one.moves * transformed_bytes,
    )
    product_s = _phase_s(
        compute,
        flops=one.point_operations
        * one.points
        * images
        * filters
        / _filled(compute, images, shape.channels_out, one.points),
        nbytes=transformed_bytes,
    )
    return Algorithm(
        one.name,
        _total_ns(operator, compute, transform_s + product_s),
        (shape.batch * one.held * channels + filters) * one.tile_bytes,
    )


def _phase_s(compute: Compute, *, flops: float, nbytes: float) -> float:
    work_s = flops / (compute.float32_flops_per_s * compute.efficiency)
    return max(work_s, nbytes / compute.memory_bytes_per_s)


def _total_ns(operator: Operator, compute: Compute, one_s: float) -> int:
    return round(1e9 * max(compute.operator_s, _passes(operator) * one_s))


def _passes(operator: Operator) -> int:
    """How many convolutions of its geometry the operator computes."""
    if not operator.flops:
        return 2 if operator.backward else 1
    return max(1, round(operator.flops / _direct_flops(_geometry(operator))))


def _flops(operator: Operator) -> float:
    return operator.flops or _passes(operator) * _direct_flops(_geometry(operator))


def _direct_flops(shape: Convolution) -> float:
    per_output = 2.0 * (shape.channels_in // shape.groups) * math.prod(shape.kernel_size)
    return max(1.0, per_output * shape.batch * shape.channels_out * math.prod(shape.output_size))


def _padded(output: int, kernel: int) -> int:
    """The power of two that a side with its padding fits in."""
    return int(2 ** math.ceil(math.log2(output + kernel - 1)))


def _geometry(operator: Operator) -> Convolution:
    assert operator.convolution is not None
    return operator.convolution
