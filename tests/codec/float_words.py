"""Float words that are easily got wrong, for the tests of the lossy codecs."""

import numpy as np
import torch
from hypothesis import strategies as st

from penstock.codec.base import ITEMSIZE
from penstock.testing.codec_samples import placed

UNSIGNED = {2: np.uint16, 4: np.uint32}
SIGNED = {2: np.int16, 4: np.int32}
_EDGES = {
    "float16": [
        0,
        1,
        2,
        0x3FF,
        0x400,
        0x401,
        0x7BFF,
        0x7C00,
        0x7C01,
        0x7E00,
        0x8000,
        0xFBFF,
        0xFC00,
    ],
    "bfloat16": [0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x8000, 0x8001, 0xFF7F, 0xFF80],
    "float32": [
        *(0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x80000000),
        *(0x80000001, 0xFF7FFFFF, 0xFF800000, 0xFFFFFFFF),
        *(
            0x477FE000,
            0x477FEFFF,
            0x477FF000,
            0x477FF001,
            0x33000000,
            0x33000001,
            0x387FFFFF,
        ),  # float16
        *(0x7F7F7FFF, 0x7F7F8000, 0x3F808000, 0x3F818000, 0x3F818001),  # bfloat16
        *(0x0A800000, 0x0AD00000, 0x0AD00001, 0x03800000, 0x03FC0000),  # the least scales and steps
    ],
}


def words_of(dtype):
    """Hypothesis: up to three blocks of words, any bits or edges, of like or wildly unlike size."""
    size = ITEMSIZE[dtype]
    bits = 8 * size
    anything = st.integers(0, 2**bits - 1)
    near = st.integers(0, 2 ** (bits - 8)).map(lambda low: low + 2 ** (bits - 3))
    word = st.one_of(st.sampled_from(_EDGES[dtype]), anything, near)
    run = st.tuples(word, st.sampled_from([1, 1, 1, 100, 128, 256]))
    return st.lists(run, max_size=40).map(
        lambda runs: np.array([w for w, times in runs for _ in range(times)][:700], UNSIGNED[size])
    )


def bytes_of(words):
    """Words as memory that a codec takes."""
    return placed(words.tobytes())


def around_every_half(dtype):
    """Float32 bits: every value of a 16-bit type, every midpoint of two, and their neighbours."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    wide = halves.view(getattr(torch, dtype)).to(torch.float32).numpy().view(np.uint32)
    last = 13 if dtype == "float16" else 16
    middle = wide + np.uint32(1 << (last - 1))
    offsets = np.array([-1, 0, 1], np.int64)
    near = np.concatenate([wide, middle]).astype(np.int64)[:, None] + offsets
    return (near.ravel() & 0xFFFFFFFF).astype(np.uint32)
