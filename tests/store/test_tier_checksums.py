"""What checksums find: every byte if full, every block if sampled, and what they cost in reading."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store import checksums
from penstock.store.checksums import BLOCK_BYTES, LINE_BYTES, STRIDE_BYTES, WHOLE_BYTES
from tries import tries

LONG = WHOLE_BYTES + 70_001
MEMORY = np.random.default_rng(1).integers(0, 256, 2 * LONG, dtype=np.uint8)


def found(name, change, *, skew=0, nbytes=LONG):
    """Whether the checksum of a name tells changed bytes from what they were."""
    data = MEMORY[skew : skew + nbytes].copy()
    before = checksums.sum_of(name, data.ctypes.data, nbytes)
    assert before[0] == name
    assert checksums.sum_of(name, data.ctypes.data, nbytes) == before
    change(data)
    return checksums.sum_of(name, data.ctypes.data, nbytes) != before


def flip(place):
    def change(data):
        data[place] ^= 1

    return change


@given(place=st.integers(0, LONG - 1))
def test_full_finds_a_flipped_bit_anywhere(place):
    assert found("full", flip(place))


@pytest.mark.parametrize("nbytes", [1, 63, 64, 4096, WHOLE_BYTES])
def test_sampled_finds_a_flipped_bit_in_what_is_short(nbytes):
    for place in {0, nbytes // 2, nbytes - 1}:
        assert found("sampled", flip(place), nbytes=nbytes)


def test_sampled_does_not_find_a_flipped_bit_between_its_lines():
    """So that nobody takes it for a full one."""
    assert not found("sampled", flip(LINE_BYTES))
    assert found("sampled", flip(STRIDE_BYTES))
    assert found("sampled", flip(LONG - 1))


@settings(max_examples=tries(200))
@given(data=st.data(), nbytes=st.integers(WHOLE_BYTES + 1, LONG))
def test_sampled_finds_a_block_of_other_bytes_wherever_it_lies(data, nbytes):
    """A stale, torn, missing or misplaced block of the device, however the data lie in it."""
    begin = data.draw(st.integers(-BLOCK_BYTES + LINE_BYTES, nbytes - LINE_BYTES), label="begin")

    def replace(bytes_):
        block = bytes_[max(0, begin) : begin + BLOCK_BYTES]
        block[:] = MEMORY[LONG : LONG + len(block)]

    assert found("sampled", replace, nbytes=nbytes)


@given(one=st.integers(0, 20), other=st.integers(0, 20))
def test_sampled_finds_two_blocks_that_changed_places(one, other):
    def swap(data):
        first = slice(one * BLOCK_BYTES, (one + 1) * BLOCK_BYTES)
        second = slice(other * BLOCK_BYTES, (other + 1) * BLOCK_BYTES)
        data[first], data[second] = data[second].copy(), data[first].copy()

    assert found("sampled", swap) == (one != other)


def test_sampled_looks_at_every_place_in_a_block():
    places = {(j * STRIDE_BYTES) % BLOCK_BYTES // LINE_BYTES for j in range(64)}
    assert places == set(range(BLOCK_BYTES // LINE_BYTES))


def test_off_is_no_checksum():
    assert checksums.sum_of("off", MEMORY.ctypes.data, 8) is None


@settings(max_examples=tries(60))
@given(
    kind=st.sampled_from(["full", "sampled", "off"]),
    nbytes=st.integers(1, LONG),
    cuts=st.lists(st.integers(0, LONG // BLOCK_BYTES), max_size=6),
)
def test_a_checksum_of_pieces_is_that_of_the_whole(kind, nbytes, cuts):
    address = MEMORY.ctypes.data
    running = checksums.RunningSum(kind, nbytes)
    places = sorted({0, nbytes, *(min(nbytes, cut * BLOCK_BYTES) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        running.add(address + start, end - start)
    assert running.result() == checksums.sum_of(kind, address, nbytes)
