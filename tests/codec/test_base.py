"""The seam itself: headers, raw storage, bounds; with the simplest codecs there can be."""

import struct

import numpy as np
import pytest

from penstock.codec.base import (
    DTYPES,
    HEADER_BYTES,
    ITEMSIZE,
    Codec,
    Fidelity,
    Header,
    read_header,
)
from penstock.core.errors import CodecError, ConfigError
from penstock.testing.codec_samples import Guarded, placed, sources
from penstock.testing.codecs import CodecTests, decode, encode, roundtrip
from penstock.testing.golden import check_golden, write_golden


class Keep(Codec):
    """As it is; ``gives_up`` and ``spare`` say how it encodes, ``bound`` what it claims."""

    name = "keep"
    id = 200
    dtypes = frozenset(DTYPES)
    fidelity = Fidelity.EXACT
    gives_up = False
    spare = 0

    def _spec(self, dtype, count):
        return count * ITEMSIZE[dtype] - self.spare, 0, None

    def _encode(self, words, payload, dtype):
        if self.gives_up or words.nbytes > payload.size:
            return None
        payload[: words.nbytes] = words.view(np.uint8)
        return words.nbytes

    def _decode(self, payload, words, dtype):
        if words.size:
            raise CodecError("keep: a payload as long as its source is stored raw")


class Flagged(Keep):
    """Notes what kinds of memory it reads."""

    def __init__(self):
        self.read = []

    def _encode(self, words, payload, dtype):
        self.read.append(words.flags.writeable)
        payload[:] = words.view(np.uint8)
        return words.nbytes - 1

    def _decode(self, payload, words, dtype):
        self.read.append(payload.flags.writeable)


def test_what_a_codec_reads_is_read_only_whatever_it_is_given():
    """A kernel is compiled for each kind of memory, which takes seconds: here for one kind."""
    codec, source = Flagged(), placed(bytes(64))
    out, back = (np.empty(HEADER_BYTES + 64, np.uint8) for _ in range(2))
    for writeable in (True, False):
        source.flags.writeable = writeable
        frame = out[: codec.encode(source, out, dtype="float32")]
        frame.flags.writeable = writeable
        codec.decode(frame, back[:64])
    assert codec.read == [False] * 4
    assert out.flags.writeable
    assert back.flags.writeable


class Halve(Keep):
    """Keeps every second byte's value, twice: lossy in no stated way, but shorter."""

    name = "halve"
    id = 201
    dtypes = frozenset({"uint8"})

    def _encode(self, words, payload, dtype):
        pairs = words[: words.size // 2 * 2].reshape(-1, 2)
        if words.size % 2 or (pairs[:, 0] != pairs[:, 1]).any():
            return None
        payload[: len(pairs)] = pairs[:, 0]
        return len(pairs)

    def _decode(self, payload, words, dtype):
        if payload.size * 2 != words.size:
            raise CodecError("halve: not half as long")
        words[:] = np.repeat(payload, 2)


class TestKeep(CodecTests):
    """A codec that never makes anything shorter passes: all is stored raw."""

    @pytest.fixture(autouse=True)
    def golden_made_now(self, tmp_path):
        write_golden(Keep(), tmp_path / "keep")
        type(self).golden = tmp_path / "keep"

    def make_codec(self):
        return Keep()


class TestKeepThatGivesUp(TestKeep):
    def make_codec(self):
        codec = Keep()
        codec.gives_up = True
        return codec


def test_the_header_is_laid_out_as_its_note_says():
    frame = encode(Halve(), placed(b"aabbcc"), "uint8")
    fields = struct.unpack_from("<4sBBBBQQ", frame.tobytes())
    assert fields == (b"PNSC", 1, 201, DTYPES.index("uint8"), 0, 6, 3)
    assert frame[24:64].tobytes() == bytes(40)
    assert frame[64:].tobytes() == b"abc"
    assert read_header(frame) == Header(201, "uint8", False, 6, 3)


def test_the_codes_of_dtypes_never_change():
    """A frame's header has a dtype's position in this tuple; add at the end only."""
    integers = ["bool", "uint8", "int8", "int16", "int32", "int64"]
    assert list(DTYPES) == [*integers, "float16", "bfloat16", "float32", "float64"]


def test_what_does_not_become_shorter_is_stored_raw():
    frame = encode(Halve(), placed(b"abcdef"), "uint8")
    header = read_header(frame)
    assert header.raw
    assert frame[HEADER_BYTES:].tobytes() == b"abcdef"
    assert decode(Halve(), frame, 6).tobytes() == b"abcdef"


def test_the_tail_is_kept_behind_the_payload():
    source = placed(bytes(8) + b"xyz")
    frame = encode(Keep(), source, "int64")
    assert frame[HEADER_BYTES:].tobytes() == source.tobytes()
    assert decode(Keep(), frame, 11).tobytes() == source.tobytes()


def test_an_exact_codec_always_has_room_to_store_raw():
    """Also one that claims it never needs so much: raw storage was once cut off at its claim."""
    codec = Keep()
    codec.spare = 8
    assert codec.spec("float32", 102).bound_bytes == HEADER_BYTES + 102
    for _, source in sources("float32", 102):
        roundtrip(codec, source, "float32")


def test_a_raw_frame_of_a_lossy_codec_is_refused():
    class Lossy(Halve):
        fidelity = Fidelity.POSITIVE

    frame = placed(encode(Halve(), placed(b"abcdef"), "uint8"))
    with pytest.raises(CodecError, match="damaged"):
        decode(Lossy(), frame, 6)


def test_another_codecs_frame_is_refused():
    frame = encode(Halve(), placed(b"aa"), "uint8")
    with pytest.raises(CodecError, match=r"keep \(id 200\) cannot decode a frame of codec 201"):
        decode(Keep(), frame, 2)


def test_a_dtype_the_codec_never_encodes_is_refused():
    frame = placed(encode(Halve(), placed(b"aabb"), "uint8"))
    frame[6] = DTYPES.index("int8")
    with pytest.raises(CodecError, match="int8"):
        decode(Halve(), frame, 4)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, ord("Q"), "begins with b'QNSC'"),
        (4, 3, "format 3; this Penstock reads format 1"),
        (6, len(DTYPES), "dtype 10"),
        (7, 2, "flags 0x2"),
        (63, 1, "padding"),
        (16, 200, "payload has 200 bytes, 2 are there"),
    ],
)
def test_errors_of_headers_say_what_is_wrong(index, value, message):
    frame = placed(encode(Halve(), placed(b"aabb"), "uint8"))
    frame[index] = value
    with pytest.raises(CodecError, match=message):
        read_header(frame)


def test_a_damaged_dtype_is_a_damaged_frame_wherever_it_is_decoded_to():
    """It was a ConfigError, about the memory, where elements of that type could not lie."""
    frame = placed(encode(Keep(), placed(bytes(40)), "int32"))
    frame[6] = DTYPES.index("int64")
    with pytest.raises(CodecError, match=r"int64: corrupted frame"):
        decode(Keep(), frame, 40, skew=4)
    with pytest.raises(CodecError, match="the frame is of int64, expected int32"):
        Keep().decode(frame, placed(bytes(40), skew=4), dtype="int32")
    good = placed(encode(Keep(), placed(bytes(40)), "int32"))
    with pytest.raises(ConfigError, match="misaligned for int32"):
        Keep().decode(good, placed(bytes(40), skew=1), dtype="int32")


def test_a_payload_shorter_than_the_tail_is_refused():
    frame = placed(encode(Keep(), placed(b"xyz"), "int64"))
    frame[16] = 2
    with pytest.raises(CodecError, match="too short"):
        decode(Keep(), frame, 3)


# -- the suite finds what it is for ---------------------------------------------------------------


class Careless(Keep):
    """Writes behind its bound, or forgets a byte."""

    fault = ""

    def _encode(self, words, payload, dtype):
        if self.fault == "source" and words.size:
            words.flags.writeable = True
            words[0] = 1
        if self.fault == "bound":
            np.lib.stride_tricks.as_strided(payload, (payload.size + 1,))[-1] = 0

    def decode(self, frame, out, *, dtype=None):
        super().decode(frame, out, dtype=dtype)
        if self.fault == "value" and out.size:
            out[-1] ^= 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [("source", "the source was written to"), ("bound", "behind the bound"), ("value", None)],
)
def test_the_suite_finds_careless_codecs(fault, message):
    codec, source = Careless(), placed(bytes(40))
    roundtrip(codec, source, "int32")
    codec.fault = fault
    with pytest.raises(AssertionError, match=message):
        roundtrip(codec, source, "int32")


def test_guards_notice_a_byte_on_either_side():
    for index in (-1, 10):
        guarded = Guarded(10)
        guarded.check()
        place = guarded.memory.ctypes.data - guarded._room.ctypes.data + index
        guarded._room[place] = 0
        with pytest.raises(AssertionError, match="before" if index < 0 else "behind"):
            guarded.check()


def test_golden_files_are_written_once_and_missing_ones_tell_how(tmp_path):
    folder = tmp_path / "keep"
    with pytest.raises(AssertionError, match=r"python -m penstock\.testing\.golden keep"):
        check_golden(Keep(), folder)
    write_golden(Keep(), folder)
    check_golden(Keep(), folder)
    with pytest.raises(ConfigError, match="written only once"):
        write_golden(Keep(), folder)
    wrong = (folder / "int8.decoded").read_bytes()[:-1] + b"?"
    (folder / "int8.decoded").write_bytes(wrong)
    with pytest.raises(AssertionError, match=r"int8\.frame decodes to different bytes"):
        check_golden(Keep(), folder)
