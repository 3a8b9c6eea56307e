"""Casts: conformance, kernels beside their reference, torch's own casts, and the edges of each format."""

from pathlib import Path

import numpy as np
import pytest
import torch
from codec_reference import casts as reference
from float_words import around_every_half, bytes_of, words_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.codec.base import HEADER_BYTES
from penstock.codec.casts import LARGEST, BFloat16
from penstock.codec.int8 import Int8
from penstock.codec.kernels import casts as kernels
from penstock.testing.codecs import CodecTests, decode, encode, roundtrip

GOLDEN = Path(__file__).parents[1] / "golden/codec"
LOSSY = (BFloat16(), Int8())
HALVES = ("float16", "bfloat16")


class TestBFloat16(CodecTests):
    golden = GOLDEN / "bfloat16"

    def make_codec(self):
        return BFloat16()


# -- kernels and their reference ------------------------------------------------------------------


def _both(name, source, *outs):
    """What kernel and reference of that name make of it, as bytes; they must not differ."""
    pairs = [[np.full(size, 0x55, dtype) for size, dtype in outs] for _ in range(2)]
    for module, made in zip((kernels, reference), pairs, strict=True):
        source(getattr(module, name), made)
    for fast, slow in zip(*pairs, strict=True):
        assert fast.tobytes() == slow.tobytes()
    return pairs[0]


@given(words_of("float32"))
def test_narrowing_equals_its_reference(words):
    for name in ("to_float16", "to_bfloat16"):
        _both(name, lambda run, made: run(words, made[0]), (words.size, np.uint16))


def test_narrowing_equals_its_reference_around_every_value():
    """All 65536 values of the narrow type, all midpoints, and the float32s next to them."""
    for name in HALVES:
        words = around_every_half(name)
        _both(f"to_{name}", lambda run, made, w=words: run(w, made[0]), (words.size, np.uint16))


def test_widening_equals_its_reference_for_every_value():
    every = np.arange(1 << 16).astype(np.uint16)
    for name in HALVES:
        _both(f"from_{name}", lambda run, made: run(every, made[0]), (every.size, np.uint32))


# -- bounds ---------------------------------------------------------------------------------------


@given(st.sampled_from(LOSSY), st.data())
def test_the_bound_holds_for_any_bits(codec, data):
    """Also those that hypothesis likes best: edges, subnormals, non-finite neighbours."""
    dtype = data.draw(st.sampled_from(sorted(codec.dtypes)))
    roundtrip(codec, bytes_of(data.draw(words_of(dtype))), dtype)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_the_bound_holds_around_every_value(codec):
    for dtype in HALVES:
        words = around_every_half(dtype)
        roundtrip(codec, bytes_of(words), "float32")
        roundtrip(codec, bytes_of(np.random.default_rng(0).permutation(words)), "float32")


def test_the_bound_holds_for_every_half():
    every = np.arange(1 << 16).astype(np.uint16)
    for dtype in HALVES:
        roundtrip(Int8(), bytes_of(every), dtype)
        roundtrip(Int8(), bytes_of(np.random.default_rng(0).permutation(every)), dtype)


def test_the_bound_is_tight():
    """A smaller one would be wrong: midpoints reach (nearly) all of it."""
    source = bytes_of(np.array([0x3F808000, 0x00008000], np.uint32))
    found = decode(BFloat16(), encode(BFloat16(), source, "float32"), 8)
    error = np.abs(found.view("f4").astype("f8") - source.view("f4"))
    bound = BFloat16().spec("float32", 8).error_bound
    assert error[0] > 0.99 * bound.relative
    assert error[1] == bound.absolute


def test_what_is_encoded_again_stays():
    """A decoded value is one that the format has."""
    source = bytes_of(
        np.random.default_rng(1).standard_normal(1000).astype(np.float32).view(np.uint32)
    )
    once = decode(BFloat16(), encode(BFloat16(), source, "float32"), source.size)
    again = decode(BFloat16(), encode(BFloat16(), once, "float32"), source.size)
    assert again.tobytes() == once.tobytes()


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_a_thread_that_flushes_subnormals_makes_the_same_bytes(codec):
    """``torch.set_flush_denormal`` changes what the processor does with them."""
    tiny = np.arange(1, 1 << 23, 4099, np.uint32)
    frames = []
    words = np.concatenate([tiny, tiny | 0x80000000, tiny + 0x3800000])
    words = np.concatenate([words, np.random.default_rng(0).permutation(words)])
    source = bytes_of(words)
    wanted = decode(codec, encode(codec, source, "float32"), source.size).tobytes()
    for flush in (False, True):
        if not torch.set_flush_denormal(flush):
            pytest.skip("this processor cannot flush subnormals")
        try:
            frame = encode(codec, source, "float32")
            frames.append(frame.tobytes())
            assert decode(codec, frame, source.size).tobytes() == wanted
        finally:
            torch.set_flush_denormal(False)
    assert frames[0] == frames[1]


# -- torch ----------------------------------------------------------------------------------------


def test_halves_are_torchs_own():
    """To the bit, for all values in range and for infinities; beyond, torch has infinity."""
    words = around_every_half("bfloat16")
    values = words.view(np.float32)
    with np.errstate(invalid="ignore"):
        words = words[(np.abs(values) <= LARGEST["bfloat16"]) | np.isinf(values)]
    frame = encode(BFloat16(), bytes_of(words), "float32")
    wanted = torch.from_numpy(words.view(np.float32)).to(torch.bfloat16)
    assert frame[HEADER_BYTES:].tobytes() == wanted.view(torch.uint8).numpy().tobytes()
    back = decode(BFloat16(), frame, words.nbytes)
    assert back.tobytes() == wanted.to(torch.float32).numpy().tobytes()


# -- what is not finite ---------------------------------------------------------------------------


def test_infinity_and_nan_cost_their_neighbours_nothing():
    """A block's scale is that of its finite elements."""
    values = np.linspace(-3, 3, 256, dtype=np.float32)
    spoilt = values.copy()
    spoilt[[5, 6, 7]] = np.inf, -np.inf, np.nan
    for codec in LOSSY:
        clean, found = (
            decode(codec, encode(codec, bytes_of(each), "float32"), 1024).view(np.float32)
            for each in (values, spoilt)
        )
        assert np.array_equal(found[5:8], spoilt[5:8], equal_nan=True)
        assert np.array_equal(np.delete(found, [5, 6, 7]), np.delete(clean, [5, 6, 7]))


def test_what_is_too_large_becomes_the_largest():
    values = np.array([3.4e38, -3.4e38, np.inf], np.float32)
    found = decode(BFloat16(), encode(BFloat16(), bytes_of(values), "float32"), 12)
    assert found.view(np.float32).tolist() == [LARGEST["bfloat16"], -LARGEST["bfloat16"], np.inf]
