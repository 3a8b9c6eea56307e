"""The codec byteplane: conformance, its kernels beside their twin, sizes, and damage of each kind."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codec.base import HEADER_BYTES, ITEMSIZE, read_header
from penstock.codec.byteplane import BytePlane
from penstock.codec.kernels import byteplane as kernels
from penstock.codec.twins import byteplane as twins
from penstock.core.errors import CodecError
from penstock.testing.codec_samples import Guarded, placed, sources
from penstock.testing.codecs import CodecTests, decode, roundtrip

BLOCK = kernels.BLOCK
UNSIGNED = {"bfloat16": np.uint16, "float32": np.uint32}
PACKED_BYTES = {"bfloat16": 2 + BLOCK * 3 // 2, "float32": 2 + BLOCK * 7 // 2}


class TestBytePlane(CodecTests):
    golden = Path(__file__).parents[1] / "golden/codec/byteplane"

    def make_codec(self):
        return BytePlane()


def frame_of(words, dtype):
    """Encoded, decoded again and compared."""
    return roundtrip(BytePlane(), placed(words.tobytes()), dtype)


def with_exponents(exponents, dtype, seed=0):
    """Words with these exponents, and a random sign and mantissa."""
    random = np.random.default_rng(seed)
    mantissa_bits = 8 * ITEMSIZE[dtype] - 9
    words = random.integers(0, 1 << mantissa_bits, len(exponents), np.uint64)
    words |= np.asarray(exponents, np.uint64) << np.uint64(mantissa_bits)
    words |= random.integers(0, 2, len(exponents), np.uint64) << np.uint64(mantissa_bits + 8)
    return words.astype(UNSIGNED[dtype])


def exponents_of_blocks():
    """Of some blocks, each with exponents in some range, some of them 0; and of a part of one."""
    lengths = st.tuples(st.integers(0, 3), st.integers(0, BLOCK - 1))
    ranges = st.tuples(st.integers(0, 255), st.integers(0, 17), st.sampled_from([0, 0.1, 1]))

    def draw(lengths, bases, seed):
        random = np.random.default_rng(seed)
        for length, (base, span, zeros) in zip(lengths, bases, strict=True):
            block = random.integers(base, min(base + span, 255) + 1, length)
            block[random.random(length) < zeros] = 0
            yield block

    return st.tuples(lengths, st.lists(ranges, min_size=4, max_size=4), st.integers(0, 99)).map(
        lambda drawn: np.concatenate(
            [
                np.zeros(0, np.int64),
                *draw([BLOCK] * drawn[0][0] + [drawn[0][1]], drawn[1][: drawn[0][0] + 1], drawn[2]),
            ]
        )
    )


def same_as_the_twin(words):
    """Encoding, also into too little room; and decoding."""
    whole = twins.encode(words, np.empty(2 * words.nbytes + 64, np.uint8))
    for room in {whole + 9, whole, max(whole - 1, 0), whole // 2, 0}:
        outs = [Guarded(room) for _ in range(2)]
        lengths = [
            form.encode(words, out.memory) for form, out in zip((kernels, twins), outs, strict=True)
        ]
        assert lengths[0] == lengths[1] == (whole if room >= whole else -1)
        outs[0].check()
        if room >= whole:
            assert outs[0].memory[:whole].tobytes() == outs[1].memory[:whole].tobytes()
            same_decoded(outs[0].memory[:whole], words)


def same_decoded(payload, words):
    """Both forms agree on a payload, damaged or not; returns what they say of it."""
    backs = [Guarded(words.nbytes) for _ in range(2)]
    places = [
        form.decode(payload, back.memory.view(words.dtype))
        for form, back in zip((kernels, twins), backs, strict=True)
    ]
    assert places[0] == places[1]
    backs[0].check()
    assert backs[0].memory.tobytes() == backs[1].memory.tobytes()
    return places[0]


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_the_kernels_do_what_their_twins_do(dtype, count):
    for _, source in sources(dtype, count * ITEMSIZE[dtype]):
        same_as_the_twin(source.view(UNSIGNED[dtype]))


@given(exponents=exponents_of_blocks(), dtype=st.sampled_from(sorted(UNSIGNED)))
def test_the_kernels_do_what_their_twins_do_for_any_exponents(exponents, dtype):
    words = with_exponents(exponents, dtype)
    same_as_the_twin(words)
    frame_of(words, dtype)


@given(data=st.data())
def test_the_kernels_judge_a_damaged_payload_as_their_twins_do(data):
    """Nothing outside is touched, and the same place is told."""
    dtype = data.draw(st.sampled_from(sorted(UNSIGNED)))
    words = with_exponents(data.draw(exponents_of_blocks()), dtype)
    room = np.empty(2 * words.nbytes + 64, np.uint8)
    payload = room[: twins.encode(words, room)].copy()
    heads = [0, 1, *range(0, payload.size, PACKED_BYTES[dtype])]
    changes = st.tuples(st.sampled_from(heads) | st.integers(0, 9999), st.integers(0, 255))
    for index, value in data.draw(st.lists(changes, max_size=5)):
        if payload.size:
            payload[index % payload.size] = value
    cut = data.draw(st.sampled_from([0, 0, 1, 2, 3, 500, 5000]))
    same_decoded(payload[: max(payload.size - cut, 0)], words)


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
@pytest.mark.parametrize("greatest", [0, 1, 2, 14, 15, 16, 130, 254, 255])
def test_fifteen_exponents_and_zero_are_packed(dtype, greatest):
    """Zeros and subnormals, infinities and NaNs are nothing special."""
    least = max(greatest - 14, 0)
    exponents = np.resize(np.append(np.arange(least, greatest + 1), 0), 4 * BLOCK)
    frame = frame_of(with_exponents(exponents, dtype), dtype)
    assert frame.size == HEADER_BYTES + 4 * PACKED_BYTES[dtype]


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
def test_a_block_with_a_sixteenth_exponent_is_raw_and_the_others_are_not(dtype):
    exponents = np.full(4 * BLOCK + 10, 100)
    exponents[BLOCK], exponents[2 * BLOCK - 1] = 101, 86
    frame = frame_of(with_exponents(exponents, dtype), dtype)
    raw = (BLOCK + 10) * ITEMSIZE[dtype] + 2
    assert frame.size == HEADER_BYTES + 3 * PACKED_BYTES[dtype] + raw


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
def test_noise_of_one_size_shrinks_as_far_as_its_exponents_allow(dtype):
    values = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32).view(np.uint32)
    words = values if dtype == "float32" else (values >> 16).astype(np.uint16)
    ratio = frame_of(words, dtype).size / words.nbytes
    assert ratio < {"float32": 0.89, "bfloat16": 0.78}[dtype]


def test_golden_frames_have_packed_blocks_and_raw_ones():
    for dtype in UNSIGNED:
        frame = (TestBytePlane.golden / f"{dtype}-blocks.frame").read_bytes()
        kinds = [frame[HEADER_BYTES + index * PACKED_BYTES[dtype]] for index in range(3)]
        assert kinds == [1, 1, 0]


def test_what_has_too_many_exponents_is_stored_raw():
    words = with_exponents(np.tile(np.arange(256), 8), "float32")
    frame = frame_of(words, "float32")
    assert read_header(frame).raw
    assert frame.size == HEADER_BYTES + words.nbytes


@pytest.mark.parametrize(
    ("index", "value"), [(0, 2), (0, 0), (0, 255), (PACKED_BYTES["float32"], 7)]
)
def test_a_damaged_head_is_named(index, value):
    """A kind that there is not, and a packed block that says it is raw."""
    words = with_exponents(np.full(3 * BLOCK, 100), "float32")
    frame = placed(frame_of(words, "float32"))
    frame[HEADER_BYTES + index] = value
    with pytest.raises(CodecError, match=f"damaged at byte {index}"):
        decode(BytePlane(), frame, words.nbytes)
