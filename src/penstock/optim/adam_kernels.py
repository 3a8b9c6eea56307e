"""Adam of compact states in one pass over memory.

Unpacked by one kernel, stepped by torch and packed by another, what a chunk needs goes through memory
nine times in float32. Here it is taken in strips that stay in a core's cache, by the same packing
kernels, so that a step costs little more than packing does. The step itself is torch's fused one, in the
same order of operations; a product may be rounded before it is added where torch's is not.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from penstock.optim.kernels import cut, from_bfloat16, from_float8, join, to_bfloat16, to_float8

_U32: Final = np.uint32
_F32: Final = np.float32
STRIP: Final = 4096
"""Elements; a multiple of the 256 that share an exponent."""
_BLOCK: Final = 256


@njit(nogil=True, cache=True, error_model="numpy")
def adam(weights: Any, m: Any, v: Any, grads: Any, numbers: Any) -> None:
    """Step on float32[n]; ``numbers``, float32[9], are those of ``compact_adam.numbers_of``."""
    sign, decay, l2, lerp, beta2 = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    rest, root, eps, size = numbers[5], numbers[6], numbers[7], numbers[8]
    is_short = lerp < _F32(0.5)
    coefficient = lerp if is_short else _F32(lerp - _F32(1))
    for i in range(weights.size):
        grad = _F32(grads[i] * sign)
        grad = _F32(grad + _F32(weights[i] * l2)) if l2 else grad
        weight = _F32(weights[i] * decay)
        base = m[i] if is_short else grad
        mean = _F32(base + _F32(coefficient * _F32(grad - m[i])))
        square = _F32(_F32(v[i] * beta2) + _F32(_F32(rest * grad) * grad))
        below = _F32(_F32(np.sqrt(square) / root) + eps)
        m[i] = mean
        v[i] = square
        weights[i] = _F32(weight - _F32(_F32(size * mean) / below))


@njit(nogil=True, cache=True)
def _widen(grads: Any, out: Any) -> None:
    if grads.itemsize == 2:  # bfloat16
        from_bfloat16(grads, out)
    else:
        for i in range(out.size):
            out[i] = grads[i]


@njit(nogil=True, cache=True)
def step_bfloat16(  # noqa: PLR0917  (Numba has no keywords)
    masters: Any,
    weights: Any,
    low: Any,
    m: Any,
    v: Any,
    grads: Any,
    keys: Any,
    first: Any,
    numbers: Any,
) -> None:
    """A step on masters and bfloat16 states.

    Args:
        masters: Float32 bits, uint32[n]; or scratch, uint32[4096], if the two that follow are given.
        weights: The upper halves of masters, rounded, uint16[n]; or nothing, uint16[0].
        low: The lower halves; or nothing.
        m: A state, uint16[n].
        v: The other.
        grads: bfloat16 bits, uint16[n], or float32 bits, uint32[n].
        keys: What decides how m and v are rounded, uint32[2].
        first: The index of the first element.
        numbers: As ``adam`` takes them.
    """
    means, squares = np.empty(STRIP, np.uint32), np.empty(STRIP, np.uint32)
    wide, is_whole = np.empty(STRIP, np.uint32), not low.size
    for start in range(0, grads.size, STRIP):
        stop = min(grads.size, start + STRIP)
        count = stop - start
        mine = masters[start:stop] if is_whole else masters[:count]
        at = _U32(_U32(first) + _U32(start))
        if not is_whole:
            join(weights[start:stop], low[start:stop], mine)
        from_bfloat16(m[start:stop], means[:count])
        from_bfloat16(v[start:stop], squares[:count])
        _widen(grads[start:stop], wide[:count])
        adam(
            mine.view(np.float32),
            means[:count].view(np.float32),
            squares[:count].view(np.float32),
            wide[:count].view(np.float32),
            numbers,
        )
        to_bfloat16(means[:count], m[start:stop], keys[0], at)
        to_bfloat16(squares[:count], v[start:stop], keys[1], at)
        if not is_whole:
            cut(mine, weights[start:stop], low[start:stop])


@njit(nogil=True, cache=True)
def step_float8(  # noqa: PLR0917
    masters: Any,
    weights: Any,
    low: Any,
    m: Any,
    m_exponents: Any,
    v: Any,
    v_exponents: Any,
    grads: Any,
    keys: Any,
    first: Any,
    numbers: Any,
) -> None:
    """As ``step_bfloat16``, on 8-bit states: codes, uint8[n], and exponents, uint8[ceil(n / 256)]."""
    means, squares = np.empty(STRIP, np.uint32), np.empty(STRIP, np.uint32)
    wide, is_whole = np.empty(STRIP, np.uint32), not low.size
    for start in range(0, grads.size, STRIP):
        stop = min(grads.size, start + STRIP)
        count = stop - start
        mine = masters[start:stop] if is_whole else masters[:count]
        at = _U32(_U32(first) + _U32(start))
        some = slice(start // _BLOCK, -(-stop // _BLOCK))
        if not is_whole:
            join(weights[start:stop], low[start:stop], mine)
        from_float8(m[start:stop], m_exponents[some], means[:count], True)
        from_float8(v[start:stop], v_exponents[some], squares[:count], False)
        _widen(grads[start:stop], wide[:count])
        adam(
            mine.view(np.float32),
            means[:count].view(np.float32),
            squares[:count].view(np.float32),
            wide[:count].view(np.float32),
            numbers,
        )
        to_float8(means[:count], m[start:stop], m_exponents[some], keys[0], at, True)
        to_float8(squares[:count], v[start:stop], v_exponents[some], keys[1], at, False)
        if not is_whole:
            cut(mine, weights[start:stop], low[start:stop])
