"""The codec exponent: conformance, its kernels beside their reference, sizes, and damage of each kind."""

from pathlib import Path

import numpy as np
import pytest
from codec_reference import exponent as reference
from exponent_words import UNSIGNED, with_exponents
from hypothesis import given
from hypothesis import strategies as st
from read_only import read_only

from penstock.codec.base import HEADER_BYTES, ITEMSIZE, read_header
from penstock.codec.exponent import Exponent
from penstock.codec.kernels import exponent as kernels
from penstock.core.errors import CodecError
from penstock.testing.codec_samples import Guarded, placed, sources
from penstock.testing.codecs import CodecTests, decode, roundtrip

BLOCK = kernels.BLOCK
FOUR_BYTES = {"bfloat16": 4 + BLOCK * 3 // 2, "float32": 4 + BLOCK * 7 // 2}
"""Of a block with codes of four bits."""
THREE_BYTES = {dtype: nbytes - BLOCK // 8 for dtype, nbytes in FOUR_BYTES.items()}


class TestExponent(CodecTests):
    golden = Path(__file__).parents[1] / "golden/codec/exponent"

    def make_codec(self):
        return Exponent()


def frame_of(words, dtype):
    """Encoded, decoded again and compared."""
    return roundtrip(Exponent(), placed(words.tobytes()), dtype)


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


def same_as_the_reference(words):
    """Encoding in both ways, also into too little room, at odd addresses and in place; and decoding."""
    for is_small in (False, True):
        whole = reference.encode(words, np.empty(2 * words.nbytes + 64, np.uint8), is_small)
        for room in {whole + 9, whole, max(whole - 1, 0), whole // 2, 0}:
            outs = [Guarded(room, skew=room % 2 * index) for index in range(2)]
            lengths = [
                form.encode(read_only(words), out.memory, is_small)
                for form, out in zip((kernels, reference), outs, strict=True)
            ]
            assert lengths[0] == lengths[1] == (whole if room >= whole else -1)
            outs[0].check()
            if room >= whole:
                assert outs[0].memory[:whole].tobytes() == outs[1].memory[:whole].tobytes()
                same_decoded(outs[0].memory[:whole], words)
    blocks = words[: words.size - words.size % BLOCK]
    payload = np.empty(2 * blocks.nbytes + 64, np.uint8)
    same_in_place(blocks, payload[: reference.encode(blocks, payload, True)])


def same_in_place(words, payload):
    """Whole blocks in memory that is longer by their heads become the payload at its end, and return."""
    memory = Guarded(words.nbytes + kernels.HEAD_BYTES * (words.size // BLOCK))
    mine = memory.memory[: words.nbytes].view(words.dtype)
    mine[:] = words
    place = kernels.encode_back(mine, memory.memory, memory.memory.size)
    memory.check()
    assert memory.memory[place:].tobytes() == payload.tobytes()
    memory.memory[:place] = 0x5A
    assert kernels.decode_ahead(memory.memory, place, mine) == memory.memory.size
    memory.check()
    np.testing.assert_array_equal(mine, words)


def same_decoded(payload, words):
    """Both forms agree on a payload, damaged or not; returns what they say of it."""
    backs = [Guarded(words.nbytes) for _ in range(3)]
    odd = placed(payload, skew=1)
    places = [
        form.decode(read_only(source), back.memory.view(words.dtype))
        for form, source, back in zip(
            (kernels, kernels, reference), (payload, odd, payload), backs, strict=True
        )
    ]
    assert places[0] == places[1] == places[2]
    for back in backs:
        back.check()
    assert backs[0].memory.tobytes() == backs[1].memory.tobytes() == backs[2].memory.tobytes()
    return places[0]


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_the_kernels_do_what_their_reference_does(dtype, count):
    for _, source in sources(dtype, count * ITEMSIZE[dtype]):
        same_as_the_reference(source.view(UNSIGNED[dtype]))


@given(exponents=exponents_of_blocks(), dtype=st.sampled_from(sorted(UNSIGNED)))
def test_the_kernels_do_what_their_reference_does_for_any_exponents(exponents, dtype):
    words = with_exponents(exponents, dtype)
    same_as_the_reference(words)
    frame_of(words, dtype)


@given(data=st.data())
def test_the_kernels_judge_a_damaged_payload_as_their_reference_does(data):
    """Nothing outside is touched, and the same place is told; in place the same blocks are refused."""
    dtype = data.draw(st.sampled_from(sorted(UNSIGNED)))
    words = with_exponents(data.draw(exponents_of_blocks()), dtype)
    room = np.empty(2 * words.nbytes + 64, np.uint8)
    payload = room[: reference.encode(words, room, data.draw(st.booleans()))].copy()
    heads = st.integers(0, max(kernels.HEAD_BYTES * (words.size // BLOCK) - 1, 0))
    changes = st.tuples(heads | st.integers(0, 9999), st.integers(0, 7) | st.integers(0, 255))
    for index, value in data.draw(st.lists(changes, max_size=5)):
        if payload.size:
            payload[index % payload.size] = value
    cut = data.draw(st.sampled_from([0, 0, 1, 2, 3, 500, 5000]))
    place = same_decoded(payload[: max(payload.size - cut, 0)], words)
    blocks = words.size // BLOCK * BLOCK
    payload = payload[: max(payload.size - words[blocks:].nbytes - cut, 0)]
    memory = Guarded(max(payload.size, words.nbytes + kernels.HEAD_BYTES * (blocks // BLOCK)))
    memory.memory[memory.memory.size - payload.size :] = payload
    mine = memory.memory[: blocks * words.itemsize].view(words.dtype)
    end = kernels.decode_ahead(memory.memory, memory.memory.size - payload.size, mine)
    memory.check()
    assert end <= memory.memory.size
    if place == -1 and not cut:
        assert end == memory.memory.size


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
@pytest.mark.parametrize("greatest", [0, 1, 2, 14, 15, 16, 130, 254, 255])
def test_fifteen_exponents_and_zero_have_codes_of_four_bits(dtype, greatest):
    """Zeros and subnormals, infinities and NaNs are nothing special."""
    least = max(greatest - 14, 0)
    exponents = np.resize(np.append(np.arange(least, greatest + 1), 0), 4 * BLOCK)
    frame = frame_of(with_exponents(exponents, dtype), dtype)
    assert frame.size == HEADER_BYTES + 4 * FOUR_BYTES[dtype]


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
def test_a_sixteenth_exponent_is_an_exception_behind_codes_of_three_bits(dtype):
    exponents = np.full(4 * BLOCK + 10, 100)
    exponents[BLOCK], exponents[2 * BLOCK - 1] = 101, 86
    frame = frame_of(with_exponents(exponents, dtype), dtype)
    rest = 10 * ITEMSIZE[dtype]
    assert frame.size == HEADER_BYTES + 3 * FOUR_BYTES[dtype] + THREE_BYTES[dtype] + 2 + rest


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
def test_a_block_with_too_many_exceptions_is_raw_and_the_others_are_not(dtype):
    exponents = np.full(3 * BLOCK, 100)
    exponents[BLOCK : 2 * BLOCK] = np.arange(BLOCK) % 256
    frame = frame_of(with_exponents(exponents, dtype), dtype)
    raw = BLOCK * ITEMSIZE[dtype] + 4
    assert frame.size == HEADER_BYTES + 2 * FOUR_BYTES[dtype] + raw


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
@pytest.mark.parametrize(("exceptions", "kind"), [(0, 2), (63, 2), (64, 4), (318, 4), (511, 4)])
def test_in_records_three_bits_are_taken_where_that_is_fewer_bytes(dtype, exceptions, kind):
    exponents = np.full(BLOCK, 100)
    exponents[:exceptions] = 0
    out = np.empty(2 * BLOCK * ITEMSIZE[dtype], np.uint8)
    kernels.encode(read_only(with_exponents(exponents, dtype)), out, True)
    assert out[0] == kind


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
@pytest.mark.parametrize(("exceptions", "kind"), [(318, 2), (319, 0)])
def test_where_four_bits_do_not_suffice_three_do_while_that_is_shorter(dtype, exceptions, kind):
    exponents = np.full(BLOCK, 100)
    exponents[:exceptions] = 50
    words = with_exponents(exponents, dtype)
    for is_small in (False, True):
        out = np.empty(2 * words.nbytes, np.uint8)
        kernels.encode(read_only(words), out, is_small)
        assert out[0] == kind


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
def test_a_block_of_zeros_is_its_head_and_negative_zeros_are_not_zeros(dtype):
    words = np.zeros(3 * BLOCK, UNSIGNED[dtype])
    assert frame_of(words, dtype).size == HEADER_BYTES + 3 * kernels.HEAD_BYTES
    words[BLOCK] = 1 << (8 * words.itemsize - 1)
    frame = frame_of(words, dtype)
    assert frame.size == HEADER_BYTES + 2 * kernels.HEAD_BYTES + FOUR_BYTES[dtype]


@pytest.mark.parametrize("dtype", sorted(UNSIGNED))
@pytest.mark.parametrize(("is_small", "shares"), [(False, (0.89, 0.78)), (True, (0.86, 0.73))])
def test_noise_of_one_size_shrinks_as_far_as_its_exponents_allow(dtype, is_small, shares):
    values = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    for each in (values, np.square(values)):
        bits = each.view(np.uint32)
        words = bits if dtype == "float32" else (bits >> 16).astype(np.uint16)
        out = np.empty(words.nbytes, np.uint8)
        share = kernels.encode(read_only(words), out, is_small) / words.nbytes
        assert share < dict(zip(["float32", "bfloat16"], shares, strict=True))[dtype]


def test_golden_frames_have_blocks_of_every_kind():
    for dtype in UNSIGNED:
        frame = (TestExponent.golden / f"{dtype}-blocks.frame").read_bytes()
        kinds = frame[HEADER_BYTES :: kernels.HEAD_BYTES]
        assert list(kinds[:6]) == [0, 1, 2, 3, 4, 5]


def test_what_has_too_many_exponents_is_stored_raw():
    words = with_exponents(np.tile(np.arange(256), 8), "float32")
    frame = frame_of(words, "float32")
    assert read_header(frame).raw
    assert frame.size == HEADER_BYTES + words.nbytes


@pytest.mark.parametrize(
    ("index", "value", "place"), [(0, 6, 0), (0, 0, 0), (4, 255, 4), (6, 1, 4), (8, 2, None)]
)
def test_a_damaged_head_is_named(index, value, place):
    """A kind that there is not; a raw block with a greatest top; exceptions of a block without any."""
    words = with_exponents(np.full(3 * BLOCK, 100), "float32")
    frame = placed(frame_of(words, "float32"))
    frame[HEADER_BYTES + index] = value
    with pytest.raises(
        CodecError, match="damaged at byte " + ("" if place is None else str(place))
    ):
        decode(Exponent(), frame, words.nbytes)
