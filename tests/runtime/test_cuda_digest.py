"""Checksums that a device makes: equal to their definition, and different for what is different."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.cuda import digest
from tries import tries


def slow_digest(data):
    """[Note: digests] word for word."""
    row_bytes = digest.ROW_WORDS * digest.WORD_BYTES
    whole = len(data) // row_bytes * row_bytes
    words = np.frombuffer(data[:whole], np.uint64).tolist()
    sums = [0] * 5
    for index, word in enumerate(words):
        row, column = divmod(index, digest.ROW_WORDS)
        sums[0] += word
        sums[1] += word * (row + 1)
        sums[2] += word * (column + 1)
    for index, byte in enumerate(data[whole:]):
        sums[3] += byte
        sums[4] += byte * (index + 1)
    return np.array([each % 2**64 for each in sums], np.uint64).tobytes()


def quick_digest(data):
    made = digest.digest_of(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert made.numel() == digest.DIGEST_BYTES
    return made.numpy().tobytes()


@settings(max_examples=tries(25))
@given(
    nbytes=st.sampled_from([1, 7, 8, 32767, 32768, 32769, 65536, 100_001]), seed=st.integers(0, 99)
)
def test_the_digest_is_the_one_of_its_definition(nbytes, seed):
    data = random.Random(seed).randbytes(nbytes)
    assert quick_digest(data) == slow_digest(data)


@given(data=st.data())
def test_a_wrong_byte_or_a_block_in_the_wrong_place_changes_the_digest(data):
    good = random.Random(data.draw(st.integers(0, 9))).randbytes(100_001)
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    assert quick_digest(flipped) != quick_digest(good)
    first, second = sorted(data.draw(st.sets(st.integers(0, 23), min_size=2, max_size=2)))
    blocks = [good[start : start + 4096] for start in range(0, len(good), 4096)]
    blocks[first], blocks[second] = blocks[second], blocks[first]
    assert quick_digest(b"".join(blocks)) != quick_digest(good)
    blocks[first] = bytes(4096)
    assert quick_digest(b"".join(blocks)) != quick_digest(good)
