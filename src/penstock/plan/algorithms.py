"""How long convolutions take, and what they need beside, by the algorithm that computes them.

vDNN (MICRO 2016, section 4.3) chooses for each convolution between a memory-optimal algorithm, which
needs no workspace, and the performance-optimal one. What either takes is modelled here, for any
geometry, from the work and the bytes that it moves: a phase takes the longer of its arithmetic and its
memory traffic (:class:`Compute`), and an algorithm the sum of its phases. Nothing is fitted to a network.
The algorithms are those that cuDNN had when vDNN was measured; Winograd's came with the next version.

Implicit GEMM (Chetlur et al., "cuDNN", 2014, section 3)
    A matrix product whose left side is gathered from the map on the fly. No workspace. Beside the product
    the cores work out where each gathered element lies: ``INDEXING_OPERATIONS`` for each, which is then
    used for a whole tile of ``TILE_COLUMNS``.
GEMM with precomputed indices (cuDNN's IMPLICIT_PRECOMP_GEMM)
    The same without that. Its workspace is an offset for each element of a filter and of an output map.
FFT (Mathieu et al. 2013; Vasilache et al. 2014, section 2 and its table of steps)
    Maps and filters are transformed, transposed, multiplied point by point as complex matrices, and the
    products transposed and transformed back. A real transform of n points is 2.5 n log2 n operations; of
    a plane it is two passes over memory, in tiles small enough for on-chip memory one. The spectra of
    input, filters and output are its workspace. Stride 1, 32 bits; maps of up to 256 points a side,
    padded to a power of two, or tiles of 32 by 32.

An operator of backward computes the gradient of the input, of the filters, or both: one or two
convolutions of the same geometry, by its count of operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from penstock.plan.machine import Compute
from penstock.plan.operators import Convolution, Operator

INDEXING_OPERATIONS: Final = 16
"""Two divisions by multiplication, the products and sums of an address, and the check of the border."""
TILE_COLUMNS: Final = 128
"""Of the blocks that matrix products are computed in (Lavin and Gray's and cuDNN's SGEMM alike)."""
INDEXING_SHARE: Final = TILE_COLUMNS / (TILE_COLUMNS + INDEXING_OPERATIONS)
"""Speed of implicit GEMM in that of a plain matrix product."""
_INDEX_BYTES: Final = 4
_COMPLEX_BYTES: Final = 8
_FFT_MOST: Final = 256
_TILE: Final = 32
_MOVES_IN_PASSES: Final = 5
"""How often a spectrum is written or read beside the product: by two passes and a transposition."""
_MOVES_ON_CHIP: Final = 3
"""By one pass and a transposition."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How one convolution operator is computed."""

    name: str
    took_ns: int
    workspace_bytes: int


def lean_algorithm(operator: Operator, compute: Compute) -> Algorithm:
    """The memory-optimal algorithm. The operator must be a convolution."""
    return Algorithm("implicit GEMM", _gemm_ns(operator, compute, INDEXING_SHARE), 0)


def fastest(operator: Operator, compute: Compute) -> Algorithm:
    """The performance-optimal algorithm of those that apply; of equals, that of the least workspace."""
    return min(_applicable(operator, compute), key=lambda one: (one.took_ns, one.workspace_bytes))


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
            yield _fft("FFT", operator, compute, sides, tiles=1)
        if max(shape.kernel_size) < _TILE:
            spans = zip(shape.output_size, shape.kernel_size, strict=True)
            tiles = math.prod(math.ceil(out / (_TILE - k + 1)) for out, k in spans)
            yield _fft("tiled FFT", operator, compute, [_TILE, _TILE], tiles=tiles)


def _gemm_ns(operator: Operator, compute: Compute, share: float) -> int:
    rate = compute.half_flops_per_s if operator.half else compute.float32_flops_per_s
    work_s = _flops(operator) / (rate * compute.efficiency * share)
    traffic_s = operator.moved_bytes / compute.memory_bytes_per_s
    return round(1e9 * max(work_s, traffic_s, compute.operator_s))


def _fft(
    name: str, operator: Operator, compute: Compute, sides: list[int], *, tiles: int
) -> Algorithm:
    shape = _geometry(operator)
    points, kept = math.prod(sides), sides[0] * (sides[1] // 2 + 1)
    images = shape.batch * tiles
    maps = images * (shape.channels_in + shape.channels_out)
    filters = shape.channels_in * shape.channels_out
    spectra_bytes = (maps + filters) * kept * _COMPLEX_BYTES
    moves = _MOVES_ON_CHIP if max(sides) <= _TILE else _MOVES_IN_PASSES
    transform = _phase_s(
        compute,
        flops=2.5 * points * math.log2(points) * (maps + filters),
        nbytes=operator.moved_bytes / _passes(operator) + moves * spectra_bytes,
    )
    product = _phase_s(compute, flops=8.0 * images * filters * kept, nbytes=spectra_bytes)
    return Algorithm(name, _total_ns(operator, compute, transform + product), spectra_bytes)


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
