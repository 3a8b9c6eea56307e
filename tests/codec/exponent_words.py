"""Words whose exponents are given, for the tests of the codec ``exponent``."""

import numpy as np

from penstock.codec.base import ITEMSIZE

UNSIGNED = {"bfloat16": np.uint16, "float32": np.uint32}


def with_exponents(exponents, dtype, seed=0):
    """Words with these exponents, and a random sign and mantissa."""
    random = np.random.default_rng(seed)
    mantissa_bits = 8 * ITEMSIZE[dtype] - 9
    words = random.integers(0, 1 << mantissa_bits, len(exponents), np.uint64)
    words |= np.asarray(exponents, np.uint64) << np.uint64(mantissa_bits)
    words |= random.integers(0, 2, len(exponents), np.uint64) << np.uint64(mantissa_bits + 8)
    return words.astype(UNSIGNED[dtype])
