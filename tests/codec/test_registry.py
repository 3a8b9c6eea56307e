"""The table of codecs: names, numbers, and frames that find their codec."""

import numpy as np
import pytest

from penstock.codec import registry
from penstock.codec.base import DTYPES, Fidelity, read_header
from penstock.core.errors import CodecError, ConfigError
from penstock.testing.codec_samples import Guarded, check_decoded, placed, sources
from penstock.testing.codecs import encode

NUMBERS = {
    "zero-value": 1,
    "positive": 3,
    "narrow": 4,
    "bfloat16": 7,
    "int8": 9,
    "exponent": 11,
}
"""On disks already. Add; never change or reuse. Codecs that are gone had 2, 5, 6 and 8."""


def test_names_and_numbers_never_change():
    assert {name: registry.get(name).id for name in registry.names()} == NUMBERS
    assert registry.names() == tuple(NUMBERS)
    assert registry.get("zero-value+bfloat16").id == 10


def test_a_name_and_its_number_are_one_codec():
    for name in registry.names():
        codec = registry.get(name)
        assert codec.name == name
        assert registry.by_id(codec.id) is codec


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match="zero-value, positive") as caught:
        registry.get("zerovalue")
    assert all(name in str(caught.value) for name in registry.names())


def test_an_unknown_number_is_a_damaged_frame():
    with pytest.raises(CodecError, match=r"number 99.*1 zero-value"):
        registry.by_id(99)


def test_every_dtype_has_a_lossless_codec():
    for dtype in DTYPES:
        codecs = registry.lossless_for(dtype)
        assert registry.get("zero-value") in codecs
        for codec in codecs:
            assert codec.fidelity is Fidelity.EXACT
            assert codec.accepts(dtype)
    assert registry.lossless_for("complex64") == ()


def test_chains_go_by_the_names_of_their_members():
    assert registry.get("zero-value+bfloat16").name == "zero-value+bfloat16"
    with pytest.raises(ConfigError, match="nonsense"):
        registry.get("zero-value+nonsense")
    with pytest.raises(CodecError, match=r"codec_of\(frame\)"):
        registry.by_id(10)


@pytest.mark.parametrize("name", [*registry.names(), "zero-value+bfloat16", "zero-value+int8"])
def test_a_frame_finds_its_codec(name):
    codec = registry.get(name)
    for dtype in sorted(codec.dtypes):
        for _, source in sources(dtype, 803):
            frame, out = encode(codec, source, dtype), Guarded(803)
            assert registry.codec_of(frame).name == name
            registry.decode(frame, out.memory)
            out.check()
            check_decoded(codec, dtype, source, out.memory)


def test_a_frame_of_no_known_codec_is_refused():
    frame = placed(encode(registry.get("narrow"), placed(bytes(800)), "float32"))
    frame[5] = 77
    with pytest.raises(CodecError, match="number 77"):
        registry.decode(frame, placed(bytes(800)))
    with pytest.raises(CodecError, match="shorter than its header"):
        registry.decode(frame[:63], placed(bytes(800)))


def test_a_chain_that_gave_up_is_decoded_by_its_frame_alone():
    codec = registry.get("zero-value+exponent")
    source = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)  # nothing makes that shorter
    out = np.empty(codec.spec("float32", source.size).bound_bytes, np.uint8)
    frame = out[: codec.encode(source, out, dtype="float32")]
    assert read_header(frame).raw
    found = np.empty_like(source)
    registry.decode(frame, found)
    assert np.array_equal(found, source)
