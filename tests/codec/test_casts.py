"""Casts: conformance, kernels beside their twins, torch's own casts, and the edges of each format."""

from pathlib import Path

import numpy as np
import pytest
import torch
from float_words import around_every_half, bytes_of, words_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.codec.base import HEADER_BYTES
from penstock.codec.casts import LARGEST, BFloat16, Float8, Float16, least_scale
from penstock.codec.int8 import Int8
from penstock.codec.kernels import casts as kernels
from penstock.codec.twins import casts as twins
from penstock.core.errors import CodecError
from penstock.testing.codecs import CodecTests, decode, encode, roundtrip

GOLDEN = Path(__file__).parents[1] / "golden/codec"
LOSSY = (Float16(), BFloat16(), Float8(), Int8())
HALVES = {"float16": Float16(), "bfloat16": BFloat16()}


class TestFloat16(CodecTests):
    golden = GOLDEN / "float16"

    def make_codec(self):
        return Float16()


class TestBFloat16(CodecTests):
    golden = GOLDEN / "bfloat16"

    def make_codec(self):
        return BFloat16()


class TestFloat8(CodecTests):
    golden = GOLDEN / "float8"

    def make_codec(self):
        return Float8()


# -- kernels and twins ----------------------------------------------------------------------------


def _both(name, source, *outs):
    """What kernel and twin of that name make of it, as bytes; they must not differ."""
    pairs = [[np.full(size, 0x55, dtype) for size, dtype in outs] for _ in range(2)]
    for module, made in zip((kernels, twins), pairs, strict=True):
        source(getattr(module, name), made)
    for fast, slow in zip(*pairs, strict=True):
        assert fast.tobytes() == slow.tobytes()
    return pairs[0]


@given(words_of("float32"))
def test_narrowing_equals_its_twin(words):
    for name in ("to_float16", "to_bfloat16"):
        _both(name, lambda run, made: run(words, made[0]), (words.size, np.uint16))


def test_narrowing_equals_its_twin_around_every_value():
    """All 65536 values of the narrow type, all midpoints, and the float32s next to them."""
    for name in HALVES:
        words = around_every_half(name)
        _both(f"to_{name}", lambda run, made, w=words: run(w, made[0]), (words.size, np.uint16))


def test_widening_equals_its_twin_for_every_value():
    every = np.arange(1 << 16).astype(np.uint16)
    for name in HALVES:
        _both(f"from_{name}", lambda run, made: run(every, made[0]), (every.size, np.uint32))


@given(words_of("float32"), st.sampled_from(["float32", "float16"]))
def test_float8_equals_its_twin(words, dtype):
    blocks, least = -(-words.size // 128), least_scale(dtype)
    if dtype == "float16":
        halves, words = np.empty(words.size, np.uint16), words.copy()
        kernels.to_float16(words, halves)
        kernels.from_float16(halves, words)
    shapes = (blocks, np.uint8), (words.size, np.uint8)
    scales, codes = _both("to_float8", lambda run, made: run(words, *made, least), *shapes)
    _both("from_float8", lambda run, made: run(scales, codes, made[0]), (words.size, np.uint32))


@given(st.lists(st.integers(20, 255), min_size=1, max_size=4), st.randoms())
def test_every_float8_code_widens_as_the_twin_says(scales, random):
    codes = np.array([random.randrange(256) for _ in range(128 * len(scales) - 3)], np.uint8)
    table = np.array(scales, np.uint8)
    _both("from_float8", lambda run, made: run(table, codes, made[0]), (codes.size, np.uint32))


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


@pytest.mark.parametrize("codec", LOSSY[2:], ids=lambda codec: codec.name)
def test_the_bound_holds_for_every_half(codec):
    every = np.arange(1 << 16).astype(np.uint16)
    for dtype in HALVES:
        roundtrip(codec, bytes_of(every), dtype)
        roundtrip(codec, bytes_of(np.random.default_rng(0).permutation(every)), dtype)


def test_the_bounds_are_tight():
    """A smaller one would be wrong: midpoints reach (nearly) all of it."""
    for codec, words in (
        (Float16(), [0x3F801000, 0x33000000]),
        (BFloat16(), [0x3F808000, 0x00008000]),
    ):
        source = bytes_of(np.array(words, np.uint32))
        found = decode(codec, encode(codec, source, "float32"), 8)
        error = np.abs(found.view("f4").astype("f8") - source.view("f4"))
        bound = codec.spec("float32", 8).error_bound
        assert error[0] > 0.99 * bound.relative
        assert error[1] == bound.absolute


def test_what_is_encoded_again_stays():
    """A decoded value is one that the format has, and a float8 block keeps its scale."""
    source = bytes_of(
        np.random.default_rng(1).standard_normal(1000).astype(np.float32).view(np.uint32)
    )
    for codec in LOSSY[:3]:
        once = decode(codec, encode(codec, source, "float32"), source.size)
        again = decode(codec, encode(codec, once, "float32"), source.size)
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


@pytest.mark.parametrize("name", HALVES)
def test_halves_are_torchs_own(name):
    """To the bit, for all values in range and for infinities; beyond, torch has infinity."""
    words = around_every_half(name)
    values = words.view(np.float32)
    with np.errstate(invalid="ignore"):
        words = words[(np.abs(values) <= LARGEST[name]) | np.isinf(values)]
    frame = encode(HALVES[name], bytes_of(words), "float32")
    wanted = torch.from_numpy(words.view(np.float32)).to(getattr(torch, name))
    assert frame[HEADER_BYTES:].tobytes() == wanted.view(torch.uint8).numpy().tobytes()
    back = decode(HALVES[name], frame, words.nbytes)
    assert back.tobytes() == wanted.to(torch.float32).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float8_codes_are_torchs_own(dtype):
    """Once a block is scaled, by a power of two."""
    values = torch.randn(128 * 64, generator=torch.Generator().manual_seed(0)).to(
        getattr(torch, dtype)
    )
    values *= 2.0 ** torch.linspace(-5, 4, 64).round().repeat_interleave(128).to(values.dtype)
    source = bytes_of(values.view(torch.uint8).numpy())
    payload = torch.from_numpy(encode(Float8(), source, dtype)[HEADER_BYTES:].copy())
    scale = payload[:64].double().repeat_interleave(128)
    scaled = values.double() * 2.0 ** (135 - scale)
    assert scaled.abs().max() <= 416
    assert scaled.view(64, 128).abs().amax(1).min() > 208
    wanted = scaled.to(torch.float8_e4m3fn)
    assert torch.equal(payload[64:], wanted.view(torch.uint8))


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
    for codec in LOSSY[:2]:
        values = np.array([3.4e38, -3.4e38, np.inf], np.float32)
        found = decode(codec, encode(codec, bytes_of(values), "float32"), 12).view(np.float32)
        assert found.tolist() == [LARGEST[codec.name], -LARGEST[codec.name], np.inf]


def test_a_scale_that_no_encoder_makes_is_refused():
    frame = encode(Float8(), bytes_of(np.zeros(200, np.uint16)), "float16")
    frame[HEADER_BYTES + 1] = 119
    with pytest.raises(CodecError, match="scale of 119"):
        decode(Float8(), frame, 400)
