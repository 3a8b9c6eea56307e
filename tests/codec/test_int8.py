"""Blockwise int8: conformance, its kernels beside their reference, steps, and what is not finite."""

from pathlib import Path

import numpy as np
import pytest
from codec_reference import int8 as reference
from float_words import bytes_of, words_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.codec.base import HEADER_BYTES
from penstock.codec.int8 import LEAST_STEP, Int8
from penstock.codec.kernels import int8 as kernels
from penstock.core.errors import CodecError
from penstock.testing.codecs import CodecTests, decode, encode


class TestInt8(CodecTests):
    golden = Path(__file__).parents[1] / "golden/codec/int8"

    def make_codec(self):
        return Int8()


@given(words_of("float32"))
def test_the_kernels_equal_their_reference(words):
    blocks = -(-words.size // 256)
    made = []
    for module in (kernels, reference):
        steps, codes = np.empty(blocks, np.float32), np.empty(words.size, np.int8)
        module.to_int8(words, steps, codes, LEAST_STEP)
        back = np.empty(words.size, np.float32)
        module.from_int8(steps, codes, back)
        made.append((steps.tobytes(), codes.tobytes(), back.tobytes()))
    assert made[0] == made[1]


@given(
    st.lists(st.floats(2.0**-120, width=32, allow_infinity=False), min_size=1, max_size=3),
    st.randoms(),
)
def test_every_code_is_decoded_as_by_the_reference(steps, random):
    codes = np.array([random.randrange(-128, 128) for _ in range(256 * len(steps) - 5)], np.int8)
    table = np.array(steps, np.float32)
    fast, slow = np.empty(codes.size, np.float32), np.empty(codes.size, np.float32)
    kernels.from_int8(table, codes, fast)
    reference.from_int8(table, codes, slow)
    assert fast.tobytes() == slow.tobytes()


def test_a_step_is_a_126th_of_the_largest_in_the_block():
    """And a block knows nothing of the next one; the largest itself comes back."""
    values = np.concatenate([np.linspace(-63, 63, 256), np.linspace(-126e6, 0, 256)]).astype(
        np.float32
    )
    frame = encode(Int8(), bytes_of(values), "float32")
    assert frame.size == HEADER_BYTES + 2 * 4 + 512
    assert frame[HEADER_BYTES : HEADER_BYTES + 8].view("<f4").tolist() == [0.5, 1e6]
    found = decode(Int8(), frame, values.nbytes).view(np.float32)
    assert np.abs(found[:256] - values[:256]).max() <= 0.25
    assert found[[0, 255, 256, 511]].tolist() == [-63, 63, -126e6, 0]


def test_non_finite_elements_have_codes_of_their_own():
    values = np.full(256, 2.0, np.float32)
    values[:3] = np.inf, -np.inf, np.nan
    frame = encode(Int8(), bytes_of(values), "float32")
    codes = frame[HEADER_BYTES + 4 :].view(np.int8)
    assert codes[:4].tolist() == [127, -127, -128, 126]


def test_a_block_with_nothing_finite():
    values = np.array([np.nan, np.inf, -np.inf] * 9, np.float32)
    found = decode(Int8(), encode(Int8(), bytes_of(values), "float32"), values.nbytes)
    assert np.array_equal(found.view(np.float32), values, equal_nan=True)


@pytest.mark.parametrize("step", [0.0, -1.0, 2.0**-121, np.inf, np.nan])
def test_a_step_that_no_encoder_makes_is_refused(step):
    frame = encode(Int8(), bytes_of(np.ones(300, np.float32)), "float32")
    frame[HEADER_BYTES + 4 : HEADER_BYTES + 8] = np.float32(step).reshape(1).view(np.uint8)
    with pytest.raises(CodecError, match="step"):
        decode(Int8(), frame, 1200)
