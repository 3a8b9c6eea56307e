"""The codec positive: conformance, its kernels beside their reference, and what torch's ReLU says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from codec_reference import positive as reference
from hypothesis import given
from hypothesis import strategies as st

from penstock.codec.base import HEADER_BYTES, ITEMSIZE
from penstock.codec.kernels import positive as kernels
from penstock.codec.positive import NEGATIVE_INFINITY, ONE, Positive
from penstock.core.errors import CodecError
from penstock.testing.codec_samples import placed, sources, special_words
from penstock.testing.codecs import CodecTests, decode, encode

DTYPES = sorted(ONE)
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


class TestPositive(CodecTests):
    golden = Path(__file__).parents[1] / "golden/codec/positive"

    def make_codec(self):
        return Positive()


def packed_by(form, words, dtype):
    bitmap = np.full(8 * -(-words.size // 64), 0xA5, np.uint8)
    form.pack(words, words.dtype.type(NEGATIVE_INFINITY[dtype]), bitmap)
    return bitmap


def same_as_the_reference(words, dtype):
    bitmap = packed_by(kernels, words, dtype)
    assert bitmap.tobytes() == packed_by(reference, words, dtype).tobytes()
    one = words.dtype.type(ONE[dtype])
    here, there = np.full_like(words, 7), np.full_like(words, 9)
    kernels.unpack(bitmap, one, here)
    reference.unpack(bitmap, one, there)
    assert here.tobytes() == there.tobytes()
    for count in {words.size, max(words.size - 1, 0), words.size // 2}:
        assert kernels.beyond(bitmap, count) == reference.beyond(bitmap, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 4095, 4096, 4097, 9000])
def test_the_kernels_do_what_their_reference_does(dtype, count):
    for _, source in sources(dtype, count * ITEMSIZE[dtype]):
        same_as_the_reference(source.view(UNSIGNED[ITEMSIZE[dtype]]), dtype)


@given(data=st.data())
def test_the_kernels_do_what_their_reference_does_for_any_words(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    bits = 8 * ITEMSIZE[dtype]
    border = NEGATIVE_INFINITY[dtype]
    near = st.sampled_from([0, 1, border - 1, border, border + 1, 1 << (bits - 1), (1 << bits) - 1])
    drawn = data.draw(st.lists(near | st.integers(0, (1 << bits) - 1), max_size=200))
    same_as_the_reference(np.array(drawn, UNSIGNED[ITEMSIZE[dtype]]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_passes_where_torch_lets_it_pass(dtype):
    """For both zeros, infinities, subnormals and NaNs of both signs: those let it pass."""
    words = np.tile(special_words(dtype), 40)
    kind = getattr(torch, dtype)
    saved = torch.from_numpy(words.view(np.uint8).copy()).view(kind)
    gradient = torch.ones_like(saved)
    wanted = torch.ops.aten.threshold_backward(gradient, saved, 0)
    source = placed(words.tobytes())
    decoded = decode(Positive(), encode(Positive(), source, dtype), source.size)
    kept = torch.from_numpy(decoded).view(kind)
    assert torch.equal(kept, wanted)
    assert torch.equal(torch.ops.aten.threshold_backward(gradient, kept, 0), wanted)
    assert kept[saved.isnan()].eq(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_relu_trains_the_same_with_what_comes_back(dtype):
    """The whole of autograd: the result that ReLU saves goes through the codec."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(1000, generator=generator).to(kind)
    inputs[::7], inputs[1::50], inputs[2::50] = 0, float("nan"), float("inf")
    gradients = []
    for pack in (lambda each: each, through_the_codec):
        leaf = inputs.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            outputs = torch.relu(leaf)
        outputs.backward(torch.full_like(outputs, 3))
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert (gradients[0] == 3).sum() > 300


def through_the_codec(saved):
    dtype = str(saved.dtype).removeprefix("torch.")
    source = placed(saved.detach().contiguous().view(torch.uint8).numpy())
    decoded = decode(Positive(), encode(Positive(), source, dtype), source.size)
    assert decoded.tobytes() != source.tobytes()
    return torch.from_numpy(decoded).view(saved.dtype)


def test_one_bit_each():
    source = placed(np.linspace(-1, 1, 1000).astype(np.float32).tobytes())
    assert encode(Positive(), source, "float32").size == HEADER_BYTES + 8 * 16
    assert Positive().spec("float32", 4000).bound_bytes == HEADER_BYTES + 8 * 16


def test_damage_is_named():
    frame = placed(encode(Positive(), placed(bytes(400)), "float32"))
    frame[HEADER_BYTES + 12] = 0x10  # of bits 96 to 103 that of element 100; the last one is 99
    with pytest.raises(CodecError, match="beyond its 100"):
        decode(Positive(), frame, 400)
    frame[HEADER_BYTES + 12] = 0
    frame[16:24].view("<u8")[0] = 15
    with pytest.raises(CodecError, match=r"15 bytes; .* 100 float32 takes 16"):
        decode(Positive(), frame, 400)
