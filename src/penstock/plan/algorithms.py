"""Time and workspace of convolutions, by the algorithm that computes them.

cuDNN has a family of algorithms for a convolution, and takes the fastest whose workspace fits a limit;
vDNN (MICRO 2016, sections 3.4 and 4.3) plans that choice. The cost of each algorithm is modelled here,
for any geometry, from its work and the bytes that it moves: a phase takes the longer of its arithmetic
and its memory traffic (:class:`Compute`), and an algorithm the sum of its phases. Nothing is fitted to a
network.

Implicit GEMM (Chetlur et al., "cuDNN", 2014, section 3)
    A matrix product whose left side is gathered from the map on the fly. No workspace. Beside the product
    the cores compute the address of each gathered element with ``INDEXING_OPERATIONS``, and use it for a
    whole tile of ``TILE_COLUMNS``.
GEMM with precomputed indices (cuDNN's IMPLICIT_PRECOMP_GEMM)
    The same without computing addresses. Its workspace is an offset for each element of a filter and of
    an output map. (cuDNN's GEMM materializes the product's input, which takes more bytes and more time
    than this. It is left out.)
FFT (Mathieu et al. 2013; Vasilache et al. 2014, section 2 and its table of steps)
    Maps and filters are transformed, transposed, multiplied point by point as complex matrices, and the
    products transposed and transformed back. A real transform of n points is 2.5 n log2 n operations; of
    a plane it is two passes over memory, in tiles small enough for on-chip memory one. The spectra of
    input, filters and output are its workspace: within 1 % of cuDNN's need for the second convolution of
    AlexNet as Oyama et al. (2018) give it (quoted from memory). Stride 1, 32 bits; maps of up to 256
    points a side, padded to a power of two.
Tiled FFT (cuDNN 4 and later; for the gradient of filters 6 and later)
    The same over tiles of 32 by 32, with the spectra of the filters and of one tile of every image at a
    time. cuDNN's manual says that it needs less than FFT for large maps, which rules out holding all
    tiles; one tile of every image makes the matrices wide enough. For a map of one tile the sizes are
    those that NVIDIA's sample ``mnistCUDNN`` prints.
Winograd (Lavin and Gray 2016; cuDNN 5 and later; for the gradient of filters 6 and later)
    F(4x4, 3x3), not fused: tiles of 6 by 6 are transformed, multiplied point by point and transformed
    back to 4 by 4 outputs. All transformed tiles are its workspace. Filters of 3 by 3, stride 1, 32 bits.

An operator of backward computes the gradient of the filters, or of the input as well, by its count of
operations: one or two *passes* of the geometry of the forward. Each has an algorithm of its own, and they
use one workspace after the other.

Small products do not fill a device whose ``Compute.processors`` are known (:mod:`.tiles`). The gradient
of filters is split along its depth as well, so it always fills.

A convolution may also be computed in *parts* of its batch, one after the other, each with a workspace for
that part only (Oyama et al., "μ-cuDNN", CLUSTER 2018): filters are read, and transformed, for each.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from penstock.plan.machine import Compute
from penstock.plan.operators import Convolution, Operator
from penstock.plan.tiles import TILE_COLUMNS, utilization

INDEXING_OPERATIONS: Final = 16
"""Operations to compute one address: two divisions by multiplication, products and sums, border check."""
INDEXING_SHARE: Final = TILE_COLUMNS / (TILE_COLUMNS + INDEXING_OPERATIONS)
"""Speed of implicit GEMM relative to a plain matrix product."""
MAX_PARTS: Final = 64
"""Largest number of parts that a batch is cut into; a power of two."""
_INDEX_BYTES: Final = 4
_FFT_MOST: Final = 256
_TILE: Final = 32
_MOVES_IN_PASSES: Final = 5
"""Number of times a spectrum is written or read outside the product: two passes and a transposition."""
_MOVES_ON_CHIP: Final = 3
"""Number of these moves for transforms that fit on-chip memory: one pass and a transposition."""
_WINOGRAD_TILE: Final = 6
_WINOGRAD_MOVES: Final = 1
"""Number of these moves for Winograd: the transform writes in the order in which the product reads."""
_WINOGRAD_TRANSFORM_OPERATIONS: Final = 12 * 12
"""Operations per tile: twelve one-dimensional transforms of twelve (Lavin and Gray, section 4.3)."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Algorithm, time and workspace of one convolution operator."""

    name: str
    took_ns: int
    """Time of all parts together."""
    workspace_bytes: int
    parts: int = 1
    """Number of parts of the batch that are computed one after the other."""


def fastest(
    operator: Operator, compute: Compute, limit_bytes: int | None = None, max_parts: int = 1
) -> Algorithm:
    """Return the fastest algorithm whose workspace fits; of equally fast ones that with the smallest.

    Args:
        operator: A convolution, or its backward.
        compute: The device that it runs on.
        limit_bytes: Limit of the workspace; None: no limit.
        max_parts: Number of parts that the batch may be cut into.
    """
    best: Algorithm | None = None
    parts = 1
    while parts <= min(max_parts, _geometry(operator).batch):
        found = (_first_that_fits(one, compute, limit_bytes) for one in _passes(operator, parts))
        whole = _together(found, parts)
        if best is None or whole.took_ns + parts < best.took_ns:  # by more than rounding
            best = whole
        parts *= 2
    assert best is not None
    return best


def least_for_time(operator: Operator, compute: Compute, more: float) -> Algorithm:
    """Return the algorithm with the least workspace that takes at most ``1 + more`` times the fastest."""
    found = better = fastest(operator, compute)
    most_ns = found.took_ns * (1 + more)
    while better.took_ns <= most_ns:
        found = better
        if not found.workspace_bytes:
            break
        better = fastest(operator, compute, found.workspace_bytes - 1, MAX_PARTS)
    return found


class _Kind(enum.Enum):
    """Result that a pass computes."""

    OUTPUT = enum.auto()
    INPUT_GRADIENT = enum.auto()
    FILTER_GRADIENT = enum.auto()


@dataclass(frozen=True, slots=True)
class _Pass:
    """One convolution: a pass over the geometry of the forward."""

    shape: Convolution
    kind: _Kind
    flops: float
    moved_bytes: float
    half: bool


def _passes(operator: Operator, parts: int = 1) -> Iterator[_Pass]:
    """Yield the passes of the operator, for the largest part of the batch."""
    shape = _geometry(operator)
    kinds = [_Kind.OUTPUT]
    if operator.backward:
        kinds = [_Kind.FILTER_GRADIENT]
        if not operator.flops or operator.flops > 1.5 * _direct_flops(shape):
            kinds = [_Kind.INPUT_GRADIENT, _Kind.FILTER_GRADIENT]
    flops = operator.flops / len(kinds) if operator.flops else _direct_flops(shape)
    moved_bytes = operator.moved_bytes / len(kinds)
    if parts > 1:
        batch = math.ceil(shape.batch / parts)
        filters = shape.channels_in // shape.groups * shape.channels_out
        filter_bytes = filters * math.prod(shape.kernel_size) * shape.element_bytes
        flops *= batch / shape.batch
        map_bytes = max(0, moved_bytes - filter_bytes)
        moved_bytes = map_bytes * batch / shape.batch + filter_bytes
        shape = replace(shape, batch=batch)
    for kind in kinds:
        yield _Pass(shape, kind, flops, moved_bytes, operator.half)


def _together(found: Iterable[Algorithm], parts: int = 1) -> Algorithm:
    """Combine the algorithms of consecutive passes, part by part, into one."""
    each = list(found)
    return Algorithm(
        " and ".join(dict.fromkeys(one.name for one in each)),
        parts * sum(one.took_ns for one in each),
        max(one.workspace_bytes for one in each),
        parts,
    )


def _first_that_fits(one: _Pass, compute: Compute, limit_bytes: int | None) -> Algorithm:
    for found in _by_speed(one, compute):
        if limit_bytes is None or found.workspace_bytes <= limit_bytes:
            return found
    return _lean(one, compute)


@lru_cache(maxsize=4096)
def _by_speed(one: _Pass, compute: Compute) -> tuple[Algorithm, ...]:
    found = _applicable(one, compute)
    return tuple(sorted(found, key=lambda each: (each.took_ns, each.workspace_bytes)))


def _applicable(one: _Pass, compute: Compute) -> Iterator[Algorithm]:
    shape = one.shape
    yield _lean(one, compute)
    entries = shape.channels_in // shape.groups * math.prod(shape.kernel_size)
    indices_bytes = _INDEX_BYTES * (entries + math.prod(shape.output_size))
    yield Algorithm("precomputed GEMM", _gemm_ns(one, compute, 1.0), indices_bytes)
    plane = len(shape.kernel_size) == 2 and set(shape.stride) == {1} and shape.groups == 1
    if one.half or not plane:
        return
    of_filters = one.kind is _Kind.FILTER_GRADIENT
    if max(shape.kernel_size) > 1:
        sides = [_padded(*each) for each in zip(shape.output_size, shape.kernel_size, strict=True)]
        if max(sides) <= _FFT_MOST:
            yield _transformed(one, compute, _fft(sides, tiles=1))
        if max(shape.kernel_size) < _TILE and (compute.cudnn >= 6 or not of_filters):
            yield _transformed(one, compute, _fft([_TILE, _TILE], tiles=_tiles(shape, _TILE)))
    if shape.kernel_size == (3, 3) and compute.cudnn >= 5 + of_filters:
        yield _transformed(one, compute, _winograd(_tiles(shape, _WINOGRAD_TILE)))


def _lean(one: _Pass, compute: Compute) -> Algorithm:
    return Algorithm("implicit GEMM", _gemm_ns(one, compute, INDEXING_SHARE), 0)


def _tiles(shape: Convolution, side: int) -> int:
    """Return the number of overlapping tiles of this side that cover a map."""
    spans = zip(shape.output_size, shape.kernel_size, strict=True)
    return math.prod(math.ceil(out / (side - k + 1)) for out, k in spans)


def _gemm_ns(one: _Pass, compute: Compute, share: float) -> int:
    rate = compute.half_flops_per_s if one.half else compute.float32_flops_per_s
    work_s = one.flops / (rate * compute.efficiency * share * _gemm_filled(one, compute))
    traffic_s = one.moved_bytes / compute.memory_bytes_per_s
    return round(1e9 * max(work_s, traffic_s, compute.operator_s))


def _gemm_filled(one: _Pass, compute: Compute) -> float:
    shape = one.shape
    if one.kind is _Kind.FILTER_GRADIENT or shape.groups == shape.channels_in > 1:
        return 1.0  # a depthwise convolution is no matrix product
    if one.kind is _Kind.OUTPUT:
        size, channels = shape.output_size, shape.channels_out
    else:
        size, channels = shape.input_size, shape.channels_in
    rows = shape.batch * math.prod(size)
    return utilization(compute, rows, channels // shape.groups, shape.groups)


@dataclass(frozen=True, slots=True)
class _Transform:
    """Transform from a tile of a map to points that are multiplied one by one, and back."""

    name: str
    tiles: int
    """Tiles of one map."""
    held: int
    """Tiles of one map that are in memory at once."""
    tile_bytes: int
    """Size of one transformed tile."""
    operations: float
    """Floating-point operations to transform one tile."""
    points: int
    """Points of one transformed tile, each of which takes one matrix product."""
    point_operations: int
    """Floating-point operations to multiply two points and accumulate."""
    moves: int
    """Number of times a transformed tile is written or read outside the product."""


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


def _transformed(one: _Pass, compute: Compute, into: _Transform) -> Algorithm:
    shape = one.shape
    channels = shape.channels_in + shape.channels_out
    filters = shape.channels_in * shape.channels_out
    images = shape.batch * into.tiles
    transformed = images * channels + filters
    transformed_bytes = transformed * into.tile_bytes
    transform_s = _phase_s(
        compute,
        flops=into.operations * transformed,
        nbytes=one.moved_bytes + into.moves * transformed_bytes,
    )
    busy = 1.0
    if one.kind is not _Kind.FILTER_GRADIENT:
        busy = utilization(compute, images, shape.channels_out, into.points)
    product_flops = float(into.point_operations * into.points * images * filters)
    product_s = _phase_s(compute, flops=product_flops / busy, nbytes=transformed_bytes)
    return Algorithm(
        into.name,
        round(1e9 * max(compute.operator_s, transform_s + product_s)),
        (shape.batch * into.held * channels + filters) * into.tile_bytes,
    )


def _phase_s(compute: Compute, *, flops: float, nbytes: float) -> float:
    work_s = flops / (compute.float32_flops_per_s * compute.efficiency)
    return max(work_s, nbytes / compute.memory_bytes_per_s)


def _direct_flops(shape: Convolution) -> float:
    per_output = 2.0 * (shape.channels_in // shape.groups) * math.prod(shape.kernel_size)
    return max(1.0, per_output * shape.batch * shape.channels_out * math.prod(shape.output_size))


def _padded(output: int, kernel: int) -> int:
    """Return the power of two that a side with its padding fits in."""
    return int(2 ** math.ceil(math.log2(output + kernel - 1)))


def _geometry(operator: Operator) -> Convolution:
    assert operator.convolution is not None
    return operator.convolution
