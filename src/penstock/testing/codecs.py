"""Conformance suite of codecs. A subclass defines how to build one, and the folder of golden files.

::

    class TestMine(CodecTests):
        golden = Path(__file__).parent / "golden" / "mine"

        def make_codec(self):
            return MyCodec()

Golden files are written once, by ``python -m penstock.testing.golden`` or ``golden.write_golden``.
"""

from __future__ import annotations

import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.codec.base import DTYPES, HEADER_BYTES, ITEMSIZE, Bytes, Codec, Fidelity
from penstock.core.errors import CodecError, ConfigError
from penstock.core.units import KIB, MIB
from penstock.testing.codec_samples import Guarded, check_decoded, placed, sources, untouched
from penstock.testing.golden import check_golden

__all__ = ["CodecTests", "decode", "encode", "roundtrip"]

_COUNTS = (0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 500, 4096, 4097)
_LENGTH_FIELD = slice(16, 24)
_PLAY = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


def encode(codec: Codec, source: Bytes, dtype: str, *, skew: int = 0, spare: int = 40) -> Bytes:
    """Return the frame of ``source``, and check that nothing else was written."""
    before = source.tobytes()
    spec = codec.spec(dtype, source.size)
    out = Guarded(spec.bound_bytes + spare, skew=skew)
    length = codec.encode(source, out.memory, dtype=dtype)
    out.check()
    assert HEADER_BYTES <= length <= spec.bound_bytes
    assert untouched(out.memory[spec.bound_bytes :]), "written behind the bound"
    assert source.tobytes() == before, "the source was written to"
    return out.memory[:length]


def decode(codec: Codec, frame: Bytes, nbytes: int, *, skew: int = 0) -> Bytes:
    """Return the decoded ``frame``, and check that nothing else is written, even after an error."""
    before = frame.tobytes()
    out = Guarded(nbytes, skew=skew)
    try:
        codec.decode(frame, out.memory)
    finally:
        out.check()
        assert frame.tobytes() == before, "the frame was written to"
    return out.memory


def roundtrip(codec: Codec, source: Bytes, dtype: str) -> Bytes:
    """Encode, decode, and check the result; return the frame."""
    frame = encode(codec, source, dtype)
    check_decoded(codec, dtype, source, decode(codec, frame, source.size))
    return frame


class CodecTests:
    """Roundtrips, special values, bounds, buffers, threads, damaged frames, golden files."""

    golden: ClassVar[Path]
    """Folder of the golden files."""

    def make_codec(self) -> Codec:
        """Build a codec. To be overridden."""
        raise NotImplementedError

    @pytest.fixture
    def codec(self) -> Codec:
        """The codec."""
        return self.make_codec()

    # -- roundtrips -------------------------------------------------------------------------------

    def test_it_says_what_it_is(self, codec: Codec) -> None:
        """Capabilities are data."""
        assert codec.name
        assert codec.name in repr(codec)
        assert 1 <= codec.id <= 255
        assert codec.dtypes
        assert codec.dtypes <= set(DTYPES)
        for dtype in codec.dtypes:
            spec = codec.spec(dtype, 1000)
            assert spec == codec.spec(dtype, 1000)
            assert spec.fidelity is codec.fidelity
            assert (spec.error_bound is not None) == (codec.fidelity is Fidelity.BOUNDED)

    def test_every_length_near_a_border(self, codec: Codec) -> None:
        """Roundtrips of no element, of one, around blocks, and of incomplete last elements."""
        for dtype in sorted(codec.dtypes):
            size = ITEMSIZE[dtype]
            for count in _COUNTS:
                for tail in {0, 1, size - 1} if size > 1 else {0}:
                    for _, source in sources(dtype, count * size + tail, seed=count):
                        roundtrip(codec, source, dtype)

    def test_a_mebibyte(self, codec: Codec) -> None:
        """Roundtrips of every kind of content, with an odd number of elements."""
        for dtype in sorted(codec.dtypes):
            for _, source in sources(dtype, MIB - 7 * ITEMSIZE[dtype]):
                roundtrip(codec, source, dtype)

    @_PLAY
    @given(data=st.data())
    def test_any_bytes(self, codec: Codec, data: st.DataObject) -> None:
        """Hypothesis chooses the dtype, words and gaps of zeros between them."""
        dtype = data.draw(st.sampled_from(sorted(codec.dtypes)))
        size = ITEMSIZE[dtype]
        word = st.one_of(st.just(bytes(size)), st.binary(min_size=size, max_size=size))
        piece = st.tuples(word, st.sampled_from([1, 1, 1, 3, 63, 64, 200]))
        drawn = data.draw(st.lists(piece, max_size=40))
        tail = data.draw(st.binary(max_size=size - 1))
        source = placed(b"".join(each * times for each, times in drawn) + tail)
        roundtrip(codec, source, dtype)

    def test_the_same_bytes_every_time(self, codec: Codec) -> None:
        """The frame does not depend on the content or place of ``out``, or on the instance."""
        for dtype in sorted(codec.dtypes):
            for _, source in sources(dtype, 999 * ITEMSIZE[dtype] + ITEMSIZE[dtype] - 1):
                frame = encode(codec, source, dtype).tobytes()
                out = placed(bytes(codec.spec(dtype, source.size).bound_bytes))
                length = self.make_codec().encode(source, out, dtype=dtype)
                assert out[:length].tobytes() == frame
                assert encode(codec, source, dtype, skew=1).tobytes() == frame

    def test_it_allocates_no_more_than_it_says(self, codec: Codec) -> None:
        """NumPy's allocations for a mebibyte in each direction stay within ``scratch_bytes``."""
        for dtype in sorted(codec.dtypes):
            for _, source in sources(dtype, MIB):
                frame, back = roundtrip(codec, source, dtype), np.empty_like(source)
                spec = codec.spec(dtype, source.size)
                out = np.empty(spec.bound_bytes, np.uint8)
                most = spec.scratch_bytes + 64 * KIB
                tracemalloc.start()
                try:
                    codec.encode(source, out, dtype=dtype)
                    assert tracemalloc.get_traced_memory()[1] <= most
                    tracemalloc.reset_peak()
                    codec.decode(frame, back)
                    assert tracemalloc.get_traced_memory()[1] <= most
                finally:
                    tracemalloc.stop()

    def test_threads_share_one_instance(self, codec: Codec) -> None:
        """Each thread gets its own data back."""

        def work(seed: int) -> int:
            done = 0
            for dtype in sorted(codec.dtypes):
                for _, source in sources(dtype, 64 * KIB, seed=seed):
                    roundtrip(codec, source, dtype)
                    done += 1
            return done

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))

    # -- buffers ----------------------------------------------------------------------------------

    def test_any_place_that_suits_the_elements(self, codec: Codec) -> None:
        """Sources aligned to no more than their elements, read-only ones; frames anywhere."""
        for dtype in sorted(codec.dtypes):
            size = ITEMSIZE[dtype]
            for _, source in sources(dtype, 300 * size):
                moved = placed(source, skew=size)
                moved.flags.writeable = False
                for skew in (0, 1, 7):
                    frame = encode(codec, moved, dtype, skew=skew)
                    frame.flags.writeable = False
                    check_decoded(
                        codec, dtype, source, decode(codec, frame, source.size, skew=size)
                    )

    def test_bytes_behind_a_frame_are_ignored(self, codec: Codec) -> None:
        """A tier may return more bytes than the frame."""
        for dtype in sorted(codec.dtypes):
            for _, source in sources(dtype, 100 * ITEMSIZE[dtype]):
                frame = encode(codec, source, dtype)
                longer = placed(frame.tobytes() + b"\xff" * 99)
                check_decoded(codec, dtype, source, decode(codec, longer, source.size))

    def test_buffers_that_cannot_be(self, codec: Codec) -> None:
        """Buffers of a wrong type, shape, stride, alignment or length, or read-only, are refused."""
        dtype = max(codec.dtypes, key=lambda each: (ITEMSIZE[each], each))
        size, source = ITEMSIZE[dtype], placed(bytes(800))
        out = placed(bytes(codec.spec(dtype, 800).bound_bytes))
        frame, back = encode(codec, source, dtype), placed(bytes(800))
        sealed = back.copy()
        sealed.flags.writeable = False
        wrong: list[Any] = [source.view(np.int8), source.reshape(2, -1), placed(bytes(1600))[::2]]
        for each in wrong:
            with pytest.raises(ConfigError, match="source"):
                codec.encode(each, out, dtype=dtype)
            with pytest.raises(ConfigError, match="frame"):
                codec.decode(each, back)
            with pytest.raises(ConfigError, match="out"):
                codec.decode(frame, each)
        short: list[Any] = [out[:-1], out.view(np.int8), placed(bytes(2 * out.size))[::2]]
        for each in short:
            with pytest.raises(ConfigError, match="out"):
                codec.encode(source, each, dtype=dtype)
        with pytest.raises(ConfigError, match="written"):
            codec.decode(frame, sealed)
        if size > 1:
            with pytest.raises(ConfigError, match=dtype):
                codec.encode(placed(bytes(800), skew=1), out, dtype=dtype)
            with pytest.raises(ConfigError, match=dtype):
                codec.decode(frame, placed(bytes(800), skew=1), dtype=dtype)
            with pytest.raises(CodecError, match=dtype):  # the frame may be damaged
                codec.decode(frame, placed(bytes(800), skew=1))

    def test_dtypes_that_it_does_not_encode(self, codec: Codec) -> None:
        """Other dtypes are refused before anything is done; the error lists the supported ones."""
        memory = placed(bytes(1000))
        for dtype in {*DTYPES, "complex64", ""} - codec.dtypes:
            assert not codec.accepts(dtype)
            with pytest.raises(ConfigError, match=min(codec.dtypes)):
                codec.spec(dtype, 16)
            with pytest.raises(ConfigError, match=re.escape(codec.name)):
                codec.encode(memory[:16], memory[64:], dtype=dtype)
        with pytest.raises(ConfigError, match="-1"):
            codec.spec(min(codec.dtypes), -1)

    # -- damage -----------------------------------------------------------------------------------

    def test_a_frame_for_memory_of_another_length(self, codec: Codec) -> None:
        """A frame for memory of another length is refused."""
        dtype = min(codec.dtypes)
        frame = encode(codec, placed(bytes(64)), dtype)
        for nbytes in (0, 56, 72):
            with pytest.raises(CodecError, match="64"):
                decode(codec, frame, nbytes)

    def test_truncation_at_every_length(self, codec: Codec) -> None:
        """Truncation is found; if the header has the shorter length, nothing outside is touched."""
        for dtype in sorted(codec.dtypes):
            for _, source in sources(dtype, 75 * ITEMSIZE[dtype] + ITEMSIZE[dtype] - 1):
                frame = encode(codec, source, dtype)
                for length in range(frame.size):
                    with pytest.raises(CodecError):
                        decode(codec, placed(frame[:length]), source.size)
                for length in range(HEADER_BYTES, frame.size):
                    shorter = placed(frame[:length])
                    shorter[_LENGTH_FIELD].view("<u8")[0] = length - HEADER_BYTES
                    _decode_if_it_can(codec, shorter, source.size)

    def test_every_byte_of_the_header_flipped(self, codec: Codec) -> None:
        """Identification, length and padding are checked; changes of other fields are harmless."""
        harmless = {6, 7, *range(16, 24)}  # dtype, flags, length of the payload
        for dtype in sorted(codec.dtypes):
            for _, source in sources(dtype, 75 * ITEMSIZE[dtype]):
                frame = encode(codec, source, dtype)
                for index in range(HEADER_BYTES):
                    for mask in (0x01, 0x10, 0xFF):
                        damaged = placed(frame)
                        damaged[index] ^= mask
                        skew = ITEMSIZE[dtype]  # where elements of a wider type could not lie
                        decoded = _decode_if_it_can(codec, damaged, source.size, skew=skew)
                        assert index in harmless or not decoded

    @_PLAY
    @given(data=st.data())
    def test_a_damaged_payload(self, codec: Codec, data: st.DataObject) -> None:
        """Raises CodecError or gives some values; nothing outside is read or written."""
        dtype = data.draw(st.sampled_from(sorted(codec.dtypes)))
        count = data.draw(st.sampled_from([1, 5, 64, 130, 300]))
        kinds = list(sources(dtype, count * ITEMSIZE[dtype]))
        _, source = data.draw(st.sampled_from(kinds))
        frame = placed(encode(codec, source, dtype))
        if frame.size == HEADER_BYTES:
            return
        place = st.integers(HEADER_BYTES, frame.size - 1)
        changes = st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=20)
        for index, value in data.draw(changes):
            frame[index] = value
        _decode_if_it_can(codec, frame, source.size)

    @_PLAY
    @given(data=st.data())
    def test_a_made_up_payload(self, codec: Codec, data: st.DataObject) -> None:
        """A valid header before arbitrary bytes causes no other error than CodecError."""
        dtype = data.draw(st.sampled_from(sorted(codec.dtypes)))
        nbytes = data.draw(st.integers(0, 200)) * ITEMSIZE[dtype]
        header = encode(codec, placed(bytes(nbytes)), dtype)[:HEADER_BYTES]
        frame = placed(header.tobytes() + data.draw(st.binary(max_size=600)))
        frame[7] = data.draw(st.sampled_from([0, 0, 0, 1]))
        frame[_LENGTH_FIELD].view("<u8")[0] = frame.size - HEADER_BYTES
        _decode_if_it_can(codec, frame, nbytes)

    # -- versions ---------------------------------------------------------------------------------

    def test_golden_files(self, codec: Codec) -> None:
        """Frames of earlier versions decode to the same bytes."""
        check_golden(codec, self.golden)


def _decode_if_it_can(codec: Codec, frame: Bytes, nbytes: int, *, skew: int = 0) -> bool:
    """Return whether a damaged frame can be decoded; any error but CodecError is a failure."""
    try:
        decode(codec, frame, nbytes, skew=skew)
    except CodecError:
        return False
    return True
