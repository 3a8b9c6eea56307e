"""Codec zero-value: conformance, its kernels beside their reference, sizes, and damage of each kind."""

from pathlib import Path

import numpy as np
import pytest
from codec_reference import zero_value as reference

from penstock.codec.base import HEADER_BYTES, read_header
from penstock.codec.kernels import zero_value as kernels
from penstock.codec.zero_value import ZeroValue
from penstock.core.errors import CodecError
from penstock.testing.codec_samples import placed, sources
from penstock.testing.codecs import CodecTests, decode, encode


class TestZeroValue(CodecTests):
    golden = Path(__file__).parents[1] / "golden/codec/zero-value"

    def make_codec(self):
        return ZeroValue()


WORDS = [np.uint8, np.uint16, np.uint32, np.uint64]


def packed_by(form, words, room):
    bitmap = np.full(-(-words.size // 64), 2**64 - 1, np.uint64)
    packed = np.zeros(room, words.dtype)
    kept = form.pack(words, bitmap, packed)
    return kept, bitmap.tobytes() if kept >= 0 else None, packed[: max(kept, 0)].tobytes()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_the_kernels_do_what_their_reference_does(word, count):
    dtype = f"int{8 * np.dtype(word).itemsize}"
    for _, source in sources(dtype, count * np.dtype(word).itemsize):
        words = source.view(word)
        kept = np.count_nonzero(words)
        for room in {kept, kept + 1, kept + 70}:
            assert packed_by(kernels, words, room) == packed_by(reference, words, room)
        kept, bitmap, packed = packed_by(kernels, words, kept)
        bits = np.frombuffer(bitmap, np.uint64)
        for form in (kernels, reference):
            assert form.count(bits, count) == kept
            back = np.full_like(words, 7)
            form.unpack(bits, np.frombuffer(packed, word), back)
            assert np.array_equal(back, words)


@pytest.mark.parametrize("form", [kernels, reference])
def test_too_little_room_is_said_and_not_overrun(form):
    words = np.ones(200, np.uint32)
    for room in (0, 1, 63, 64, 65, 199):
        guarded = np.zeros(room + 1, np.uint32)
        assert form.pack(words, np.zeros(4, np.uint64), guarded[:room]) == -1
        assert guarded[room] == 0


def frame_of(values):
    return encode(ZeroValue(), placed(np.asarray(values, np.float32).tobytes()), "float32")


def test_the_frame_is_as_long_as_the_format_says():
    values = np.zeros(1000, np.float32)
    values[::3] = -0.0  # kept: it has a bit set
    assert frame_of(values).size == HEADER_BYTES + 16 * 8 + 334 * 4
    assert frame_of(np.zeros(1000)).size == HEADER_BYTES + 16 * 8


def test_without_zeros_it_is_stored_raw():
    values = np.ones(1000, np.float32)
    frame = frame_of(values)
    assert read_header(frame).raw
    assert frame.size == HEADER_BYTES + values.nbytes


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [(0, 0b101, "counts 2"), (0, 0b1111, "counts 4"), (15, 0x80, "beyond"), (12, 0x10, "beyond")],
)
def test_damage_is_named(index, value, message):
    """A bit less, a bit more, bits behind the hundredth element."""
    values = np.zeros(100, np.float32)
    values[:3] = 1
    frame = placed(frame_of(values))
    frame[HEADER_BYTES + index] = value
    with pytest.raises(CodecError, match=message):
        decode(ZeroValue(), frame, values.nbytes)


def test_a_payload_shorter_than_the_bitmap_is_refused():
    frame = placed(frame_of(np.zeros(1000)))
    frame[16:24].view("<u8")[0] = 127
    with pytest.raises(CodecError, match="bitmap takes 128"):
        decode(ZeroValue(), frame, 4000)


class Overwritten:
    """Words that are zero when they are first read, and one ever after: somebody overwrites them."""

    def __init__(self, size):
        self.size, self.reads = size, 0

    def __getitem__(self, index):
        self.reads += 1
        return np.uint32(self.reads > self.size)


def test_words_that_change_while_they_are_encoded_are_written_nowhere_else():
    bitmap, packed = np.zeros(1, np.uint64), np.zeros(10, np.uint32)
    kernels.pack.py_func(Overwritten(64), bitmap, packed)  # NumPy raises where Numba would write
    assert not packed.any()
