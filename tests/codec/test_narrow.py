"""The codec narrow: conformance, its kernels beside their reference, each width, and heads that lie."""

from pathlib import Path

import numpy as np
import pytest
import torch
from codec_reference import narrow as reference
from hypothesis import given
from hypothesis import strategies as st
from read_only import read_only

from penstock.codec.base import HEADER_BYTES, ITEMSIZE, read_header
from penstock.codec.device.base import decode_tensor, encode_tensor
from penstock.codec.kernels import narrow as kernels
from penstock.codec.narrow import HEAD_BYTES, Narrow
from penstock.core.errors import CodecError
from penstock.testing.codec_samples import placed
from penstock.testing.codecs import CodecTests, decode, encode, roundtrip

SIGNED = {"int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64}
NUMPY = {**SIGNED, "uint8": np.uint8}
PACKED = {8: np.uint8, 16: np.uint16, 32: np.uint32}
FRONT = HEADER_BYTES + HEAD_BYTES


class TestNarrow(CodecTests):
    golden = Path(__file__).parents[1] / "golden/codec/narrow"

    def make_codec(self):
        return Narrow()


def frame_of(values, dtype):
    """Encoded, decoded again and compared."""
    return roundtrip(Narrow(), placed(np.ascontiguousarray(values).tobytes()), dtype)


def integers_near(dtype):
    """Few values, near each other, near the ends of the type, or any."""
    low, high = np.iinfo(NUMPY[dtype]).min, np.iinfo(NUMPY[dtype]).max
    ends = st.sampled_from([low, low + 1, low + 255, 0, 1, high - 255, high - 1, high])
    spans = st.sampled_from([0, 1, 2, 255, 256, 65535, 65536, 2**32 - 1, 2**32])

    def block(start, span):
        last = min(start + span, high)
        return st.lists(st.sampled_from([start, last]) | st.integers(start, last), min_size=1)

    return st.tuples(ends | st.integers(low, high), spans).flatmap(lambda drawn: block(*drawn))


@given(data=st.data())
def test_the_kernels_do_what_their_reference_does(data):
    dtype = data.draw(st.sampled_from(sorted(NUMPY)))
    drawn = data.draw(integers_near(dtype)) * data.draw(st.sampled_from([1, 3, 70]))
    ordered = read_only(np.array(drawn, NUMPY[dtype]))
    words = ordered.view(f"u{ordered.itemsize}")
    low, high, only_two = kernels.survey(ordered, np.uint64(2**64 - 1))
    assert (int(low), int(high), bool(only_two)) == reference.survey(ordered)
    same_differences(words, words.dtype.type(int(low) % (1 << 8 * words.itemsize)))
    same_masks(words, words[0], words[-1])


def same_differences(words, least):
    for bits, packed_type in PACKED.items():
        if bits >= 8 * words.itemsize:
            continue
        here, there = (np.empty(words.size, packed_type) for _ in range(2))
        kernels.subtract(words, least, here)
        reference.subtract(words, least, there)
        assert here.tobytes() == there.tobytes()
        here_back, there_back = np.empty_like(words), np.empty_like(words)
        kernels.add(read_only(here), least, here_back)
        reference.add(there, least, there_back)
        assert here_back.tobytes() == there_back.tobytes()


def same_masks(words, least, other):
    here, there = (np.full(8 * -(-words.size // 64), 0xA5, np.uint8) for _ in range(2))
    kernels.pack_two(words, other, here)
    reference.pack_two(words, other, there)
    assert here.tobytes() == there.tobytes()
    here_back, there_back = np.empty_like(words), np.empty_like(words)
    kernels.unpack_two(read_only(here), least, other, here_back)
    reference.unpack_two(there, least, other, there_back)
    assert here_back.tobytes() == there_back.tobytes()


@given(data=st.data())
def test_integers_near_each_other_and_far_apart(data):
    """Over the whole range of each type: the most that two int64 differ by does not fit an int64."""
    dtype = data.draw(st.sampled_from(sorted(NUMPY)))
    frame_of(np.array(data.draw(integers_near(dtype)) * 20, NUMPY[dtype]), dtype)


@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 4097, 8191, 8192, 12287])
@pytest.mark.parametrize("third", [-1, 3, 6])
def test_a_third_value_is_seen_wherever_it_is(place, third):
    """Below, between and above the two, in any chunk of the survey; and a change of both at a border."""
    values = np.full(12288, 5, np.int64)
    values[4096:] = np.tile([5, 2], 4096)
    assert frame_of(values, "int64").size == FRONT + 12288 // 8
    values[place] = third
    assert frame_of(values, "int64").size == FRONT + 12288
    changing = np.repeat(np.array([1, 2, 3], np.int64), 4096)
    assert frame_of(changing, "int64").size == FRONT + 12288


@pytest.mark.parametrize(
    ("dtype", "span", "nbytes"),
    [
        *(("int64", span, 2) for span in (256, 65535)),
        *(("int64", span, 4) for span in (65536, 2**32 - 1)),
        ("int64", 2**32, 8),
        ("int64", 2**64 - 1, 8),
        ("int64", 255, 1),
        ("int32", 255, 1),
        ("int32", 65535, 2),
        ("int32", 65536, 4),
        ("int32", 2**32 - 1, 4),
        ("int16", 255, 1),
        ("int16", 256, 2),
        ("uint8", 2, 1),
        ("int8", 255, 1),
    ],
)
def test_the_width_is_the_least_that_holds_the_span(dtype, span, nbytes):
    low = np.iinfo(NUMPY[dtype]).min
    values = np.full(1000, low, NUMPY[dtype])
    values[3], values[500] = low + span // 2, low + span
    frame = frame_of(values, dtype)
    assert read_header(frame).raw == (nbytes == ITEMSIZE[dtype])
    assert frame.size == HEADER_BYTES + 1000 * nbytes + (nbytes < ITEMSIZE[dtype]) * HEAD_BYTES


def test_one_value_is_the_head_alone():
    for dtype in ("float32", "bool", "int64"):
        assert frame_of(np.ones(1000, dtype), dtype).size == FRONT


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64"])
def test_two_values_are_one_bit_each(dtype):
    """Masks of any type, such as what a dropout on the CPU saves."""
    mask = np.random.default_rng(0).random(1000) < 0.9
    values = (mask / 0.9).astype(dtype)
    assert frame_of(values, dtype).size == FRONT + 8 * 16


def test_golden_frames_have_every_width():
    heads = [path.read_bytes()[7 : HEADER_BYTES + 1] for path in TestNarrow.golden.glob("*.frame")]
    assert {head[-1] for head in heads if head[0] == 0} == {0, 1, 8, 16, 32}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@given(data=st.data())
def test_the_device_form_makes_the_same_bytes_for_every_width(device, data):
    dtype = data.draw(st.sampled_from(sorted(NUMPY)))
    source = np.array(data.draw(integers_near(dtype)) * 20, NUMPY[dtype]).view(np.uint8)
    frame = encode_tensor("narrow", torch.from_numpy(source).to(device), dtype)
    wanted = encode(Narrow(), placed(source), dtype)
    assert frame.cpu().numpy().tobytes() == wanted.tobytes()
    assert decode_tensor(frame, source.size).cpu().numpy().tobytes() == source.tobytes()


def test_a_bool_that_is_neither_0_nor_1_comes_back():
    """A view of other bytes as bool is legal; what it holds is kept."""
    values = np.tile(np.array([0, 1, 7], np.uint8), 100)
    assert read_header(frame_of(values, "bool")).raw
    assert frame_of(values[values != 1], "bool").size == FRONT + 8 * 4


def test_indices_of_a_max_pooling():
    """They are below the height times the width of a plane: 16 bits here."""
    images = torch.randn(2, 8, 56, 56, generator=torch.Generator().manual_seed(0))
    _, indices = torch.nn.functional.max_pool2d(images, 2, return_indices=True)
    assert frame_of(indices.numpy(), "int64").size == FRONT + 2 * indices.numel()


DAMAGES = {
    "bits": (0, 7),
    "bits that are as many as the element's": (0, 32),
    "bits of another width": (0, 8),
    "padding": (1, 1),
    "least beyond the word": (8 + 4, 1),
    "other beyond the word": (16 + 4, 1),
    "other without a bitmap": (16, 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_refused(damage):
    index, value = DAMAGES[damage]
    values = np.arange(1000, dtype=np.int32)
    frame = placed(frame_of(values, "int32"))
    frame[HEADER_BYTES + index] = value
    with pytest.raises(CodecError, match=r"head|bytes"):
        decode(Narrow(), frame, values.nbytes)


def test_bits_beyond_the_elements_are_refused():
    frame = placed(frame_of(np.arange(100, dtype=np.int64) % 2, "int64"))
    frame[-1] = 0x80
    with pytest.raises(CodecError, match="beyond its 100"):
        decode(Narrow(), frame, 800)
