"""Chains: conformance of every kind of link, bounds, which members may follow which, damage."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codec import chain
from penstock.codec.base import HEADER_BYTES, Fidelity, read_header
from penstock.codec.casts import BFloat16
from penstock.codec.zero_value import ZeroValue
from penstock.core.errors import CodecError, ConfigError
from penstock.testing.codec_samples import placed
from penstock.testing.codecs import CodecTests, decode, encode, roundtrip

GOLDEN = Path(__file__).parents[1] / "golden/codec"

ALL = ("zero-value+exponent", "zero-value+bfloat16", "zero-value+int8")


class ChainTests(CodecTests):
    members: str

    @property
    def golden(self):
        return GOLDEN / self.members

    def make_codec(self):
        return chain.parse(self.members)


class TestZeroValueBFloat16(ChainTests):
    members = "zero-value+bfloat16"


class TestZeroValueInt8(ChainTests):
    members = "zero-value+int8"


class TestZeroValueExponent(ChainTests):
    members = "zero-value+exponent"


def _half_zeros(count, dtype=np.float32):
    values = np.random.default_rng(3).standard_normal(count).astype(dtype)
    values[values < 0] = 0
    return placed(values.tobytes())


@pytest.mark.parametrize("name", ALL)
def test_every_chain_comes_back(name):
    """Through a fresh instance too, which is made from nothing but the frame."""
    codec = chain.parse(name)
    assert codec.name == name
    for dtype in sorted(codec.dtypes):
        for nbytes in (0, 1, 64, 4096 + 3):
            frame = roundtrip(codec, _half_zeros(2048)[:nbytes], dtype)
            if not read_header(frame).raw:
                again = chain.of(frame)
                assert again.name == name
                assert (
                    decode(again, frame, nbytes).tobytes() == decode(codec, frame, nbytes).tobytes()
                )


@given(st.sampled_from(ALL), st.data())
def test_any_words(name, data):
    """Any bits: subnormals, infinities and NaN on both sides of every link."""
    codec = chain.parse(name)
    dtype = data.draw(st.sampled_from(sorted(codec.dtypes)))
    words = data.draw(
        st.lists(
            st.sampled_from([0, 0, 1, 0x7F800000, 0x3F8CCCCD, 0xFF7FFFFF])
            | st.integers(0, 2**32 - 1),
            max_size=300,
        )
    )
    roundtrip(codec, placed(np.array(words, np.uint32).tobytes()), dtype)


def test_only_the_values_that_are_kept_are_cast():
    """FlashNeuron's form: a bitmap, and half of the bytes of half of the elements."""
    count = 1 << 16
    source = _half_zeros(count)
    kept = int(np.count_nonzero(source.view(np.float32)))
    frame = encode(chain.parse("zero-value+bfloat16"), source, "float32")
    assert frame.size == HEADER_BYTES + 8 + HEADER_BYTES + 2 * kept + count // 8


def test_a_source_without_zeros_is_cast_all_the_same():
    """The sparse member is left out; the frame is no longer than the cast's, but for the prefixes."""
    source = placed(np.arange(1, 10_001, dtype=np.float32).tobytes())
    frame = encode(chain.parse("zero-value+bfloat16"), source, "float32")
    assert frame.size == 2 * HEADER_BYTES + 8 + source.size // 2
    exact = chain.parse("zero-value+exponent")
    assert (
        roundtrip(exact, source, "float32").size <= exact.spec("float32", source.size).bound_bytes
    )


def test_fidelity_and_bound_are_those_of_the_weakest():
    nbytes = 4000
    assert chain.parse("zero-value+exponent").fidelity is Fidelity.EXACT
    half = chain.parse("zero-value+bfloat16")
    assert half.fidelity is Fidelity.BOUNDED
    bound = BFloat16().spec("float32", nbytes).error_bound
    assert half.spec("float32", nbytes).error_bound == bound
    blocks = chain.parse("zero-value+int8").spec("float32", nbytes).error_bound
    assert blocks.block == nbytes // 4  # a block of kept values has come from anywhere


@pytest.mark.parametrize(
    "name",
    [
        "zero-value",
        "zero-value+",
        "zero-value+positive",
        "zero-value+zero-value",
        "bfloat16+zero-value",
        "zero-value+bfloat16+exponent",
    ],
)
def test_chains_that_there_are_not(name):
    """The error lists those that there are."""
    with pytest.raises(
        ConfigError, match=re.escape(f"there is no chain {name!r}; there are zero-value+exponent")
    ):
        chain.parse(name)


def test_a_frame_of_other_members_is_refused():
    """Each says whose it is; a chain decodes only its own."""
    source = _half_zeros(1000)
    frame = encode(chain.parse("zero-value+bfloat16"), source, "float32")
    with pytest.raises(CodecError, match="another"):
        decode(chain.parse("zero-value+exponent"), frame, source.size)
    for place, value in ((0, 9), (0, 1), (0, 200), (2, 77), (3, 1)):
        damaged = placed(frame)
        damaged[HEADER_BYTES + place] = value
        with pytest.raises(CodecError, match=r"chain|members"):
            chain.of(damaged)
    with pytest.raises(CodecError, match="members"):
        chain.of(encode(ZeroValue(), source, "float32"))


def test_a_stream_that_claims_to_be_huge_takes_no_memory():
    """The length is checked against what the source could have made, before memory is asked for."""
    source = _half_zeros(1000)
    frame = placed(encode(chain.parse("zero-value+bfloat16"), source, "float32"))
    inner = frame[HEADER_BYTES + 8 :]
    inner[16:24].view("<u8")[0] = 1 << 60
    with pytest.raises(CodecError, match=str(1 << 60)):
        decode(chain.parse("zero-value+bfloat16"), frame, source.size)
