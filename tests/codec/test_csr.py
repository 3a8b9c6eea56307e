"""The codec csr: conformance, its kernels beside their twin, sizes, and damage of each kind."""

from pathlib import Path

import numpy as np
import pytest

from penstock.codec.base import HEADER_BYTES
from penstock.codec.csr import Csr
from penstock.codec.kernels import csr as kernels
from penstock.codec.twins import csr as twins
from penstock.core.errors import CodecError
from penstock.testing.codec_samples import placed, sources
from penstock.testing.codecs import CodecTests, decode, encode


class TestCsr(CodecTests):
    golden = Path(__file__).parents[1] / "golden/codec/csr"

    def make_codec(self):
        return Csr()


def packed_by(form, words):
    counts = np.zeros(-(-words.size // kernels.ROW), np.uint16)
    kept = form.count(words, counts)
    values, columns = np.zeros(kept, words.dtype), np.zeros(kept, np.uint8)
    form.pack(words, counts, values, columns)
    return counts, values, columns


@pytest.mark.parametrize("word", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_the_kernels_do_what_their_twins_do(word, count):
    dtype = f"int{8 * np.dtype(word).itemsize}"
    for _, source in sources(dtype, count * np.dtype(word).itemsize):
        words = source.view(word)
        for mine, twin in zip(packed_by(kernels, words), packed_by(twins, words), strict=True):
            assert mine.tobytes() == twin.tobytes()
        counts, values, columns = packed_by(kernels, words)
        for form in (kernels, twins):
            assert form.check(counts, columns, count)
            back = np.full_like(words, 7)
            form.unpack(counts, values, columns, back)
            assert np.array_equal(back, words)


def test_both_checks_find_the_same_columns_wrong():
    counts = np.array([2, 3, 1], np.uint16)
    good = [0, 255, 3, 4, 9, 87]
    for index in range(6):
        for value in (0, 3, 4, 5, 87, 88, 255):
            columns = np.array(good, np.uint8)
            columns[index] = value
            verdict = kernels.check(counts, columns, 2 * 256 + 88)
            assert verdict == twins.check(counts, columns, 2 * 256 + 88)
            if value == good[index]:
                assert verdict


def frame_of(values):
    return encode(Csr(), placed(np.asarray(values, np.float32).tobytes()), "float32")


def test_nine_tenths_zeros_take_an_eighth():
    values = np.zeros(10_240, np.float32)
    values[::10] = 1.5
    assert frame_of(values).size == HEADER_BYTES + 40 * 2 + 1024 * 5


def test_with_fewer_zeros_than_columns_cost_it_is_stored_raw():
    values = np.ones(1000, np.float32)
    values[::6] = 0
    assert frame_of(values).size == HEADER_BYTES + values.nbytes


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, 3, "row counts of 4"),
        (0, 1, "row counts of 2"),
        (5, 1, "padding"),
        (8 + 12, 9, "rise"),
        (8 + 13, 4, "rise"),
        (8 + 14, 44, "rise"),
    ],
)
def test_damage_is_named(index, value, message):
    """Row counts, padding; a column that does not rise, or lies behind the last row's end."""
    values = np.zeros(300, np.float32)
    values[[4, 9, 299]] = 1, 2, 3
    frame = placed(frame_of(values))
    assert frame[HEADER_BYTES + 8 + 12 :].tolist() == [4, 9, 43]
    frame[HEADER_BYTES + index] = value
    with pytest.raises(CodecError, match=message):
        decode(Csr(), frame, values.nbytes)


def test_words_that_change_while_they_are_encoded_are_written_nowhere_else():
    """Counted while they were zero, packed when somebody had overwritten them."""
    words, counts = np.ones(kernels.ROW, np.uint32), np.zeros(1, np.uint16)
    values, columns = np.zeros(10, np.uint32), np.zeros(10, np.uint8)
    kernels.pack.py_func(words, counts, values, columns)  # NumPy raises where Numba would write
    assert not values.any()
