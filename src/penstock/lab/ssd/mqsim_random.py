"""MQSim's random numbers, so that a workload of its XML has the same addresses here.

They are L'Ecuyer's MRG32k3a (Operations Research, 1999): two recurrences of order three, combined. A seed
gives the distance of a jump ahead. MQSim computes the jump in signed integers of 64 bits, which overflow;
this does the same, because its streams would differ otherwise.
"""

from __future__ import annotations

import math
from typing import Final

_M: Final = (4_294_967_087, 4_294_944_443)
_A12, _A13N, _A21, _A23N = 1_403_580, 810_728, 527_612, 1_370_589
_NORM: Final = 2.328306549295728e-10
_EACH: Final = 200
"""Number of seeds that share a number of jumps."""
_Matrix = list[list[int]]


class MqsimRandom:
    """A random stream of MQSim, by its seed."""

    def __init__(self, seed: int) -> None:
        """Jump ahead like MQSim: ``seed // 200 + 1`` jumps of two to the ``seed % 200``."""
        jumps, doublings = seed // _EACH + 1, seed % _EACH
        steps: tuple[_Matrix, _Matrix] = (
            [[0, 1, 0], [0, 0, 1], [_M[0] - _A13N, _A12, 0]],
            [[0, 1, 0], [0, 0, 1], [_M[1] - _A23N, 0, _A21]],
        )
        self._first, self._second = (
            [float(value) for value in _jumped(step, modulus, jumps, doublings)]
            for step, modulus in zip(steps, _M, strict=True)
        )
        self._left = 0.0

    def next(self) -> float:
        """Return a uniform number above 0 and at most 1."""
        one = _mod(_A12 * self._first[1] - _A13N * self._first[0], float(_M[0]))
        self._first = [*self._first[1:], one]
        two = _mod(_A21 * self._second[2] - _A23N * self._second[0], float(_M[1]))
        self._second = [*self._second[1:], two]
        difference = one - two
        return (difference + (float(_M[0]) if difference < 0 else 0.0) + 1) * _NORM

    def between(self, least: int, most: int) -> int:
        """Return a whole number, with both limits included."""
        return least + int(float(most - least + 1) * self.next())

    def exponential(self, mean: float) -> float:
        """Return an exponentially distributed number with this mean."""
        return -mean * math.log(self.next())

    def normal(self, mean: float, deviation: float) -> float:
        """Return a normal number, by Marsaglia's polar method, which makes two at a time."""
        if self._left:
            drawn, self._left = self._left, 0.0
            return mean + drawn * deviation
        square = 1.0
        while square >= 1.0:
            one, two = 2 * self.next() - 1, 2 * self.next() - 1
            square = one * one + two * two
        scale = math.sqrt(-2 * math.log(square) / square)
        self._left = two * scale
        return mean + one * scale * deviation


def _jumped(step: _Matrix, modulus: int, jumps: int, doublings: int) -> list[int]:
    state = [1, 1, 1]
    for _ in range(doublings):
        step = _product(step, step, modulus)
    while jumps:
        if jumps & 1:
            state = [_dot(row, state, modulus) for row in step]
        jumps >>= 1
        if jumps:
            step = _product(step, step, modulus)
    return state


def _product(left: _Matrix, right: _Matrix, modulus: int) -> _Matrix:
    columns = list(zip(*right, strict=True))
    return [[_dot(row, list(column), modulus) for column in columns] for row in left]


def _dot(left: list[int], right: list[int], modulus: int) -> int:
    total = 0
    for a, b in zip(left, right, strict=True):
        wide = (a * b + total + (1 << 63)) % (1 << 64) - (1 << 63)  # wraps around like 64 bits
        total = abs(wide) % modulus * (1 if wide >= 0 else -1)  # rounded towards zero
    return total


def _mod(value: float, modulus: float) -> float:
    value -= float(int(value / modulus)) * modulus
    return value + modulus if value < 0 else value
