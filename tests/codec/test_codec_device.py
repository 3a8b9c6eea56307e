"""Codecs in torch operations: the same bytes as on the host, on every device, in both directions."""

import numpy as np
import pytest
import torch
from float_words import words_of
from held_memory import Held, taken_inside
from hypothesis import given
from hypothesis import strategies as st

from grids import grid, pairwise
from penstock.codec.base import HEADER_BYTES, ITEMSIZE, read_header
from penstock.codec.device import FORMS, exponent, kernels
from penstock.codec.device.base import decode_tensor, encode_tensor, scratch_bytes
from penstock.core.errors import CodecError, ConfigError
from penstock.testing.codec_samples import placed, sources
from tries import IS_RANDOM

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [kind for kind, _ in sources("uint8", 0)]
COUNTS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 256, 257, 1000, 4099)
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def on_host(codec, source, dtype):
    out = np.empty(codec.spec(dtype, source.size).bound_bytes, np.uint8)
    return out[: codec.encode(source, out, dtype=dtype)]


def same_both_ways(name, source, dtype, device):
    """Encode here and there, compare; decode each other's frame, compare."""
    codec = FORMS[name].CODEC
    wanted = on_host(codec, source, dtype)
    frame = encode_tensor(name, torch.from_numpy(source).to(device), dtype)
    assert frame.device.type == device
    assert frame.cpu().numpy().tobytes() == wanted.tobytes()
    decoded = np.empty_like(source)
    codec.decode(wanted, decoded)
    found = decode_tensor(frame, source.size)
    assert found.device.type == device
    assert found.cpu().numpy().tobytes() == decoded.tobytes()
    behind = torch.cat([frame, frame.new_full((5,), 7)])
    known = decode_tensor(behind, source.size, header=read_header(wanted))
    assert torch.equal(known, found)


def emulated():
    """Return whether the device has the CPU's operators."""
    return torch.cuda.get_device_properties(0).total_memory < 12 << 30


def tried(rows, device):
    """Return the rows of a grid that a device is given.

    An emulated one has the CPU's operators, which do all of it in the test for the CPU. What is left to
    show there is their order: by every pair of values, and by all if more is tried.
    """
    is_less = device == "cuda" and emulated() and not IS_RANDOM
    return pairwise(rows) if is_less else rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMS)
def test_the_same_bytes_as_on_the_host(name, device):
    """Every dtype, lengths around blocks, storages that are no whole number of elements."""
    choices = {"dtype": sorted(FORMS[name].CODEC.dtypes), "count": COUNTS, "kind": KINDS}
    rows = tried(grid(choices), device)
    wanted = {tuple(row.values()) for row in rows}
    for dtype, count in dict.fromkeys((row["dtype"], row["count"]) for row in rows):
        size = ITEMSIZE[dtype]
        nbytes = count * size + (count % 3 and size - 1)
        for kind, source in sources(dtype, nbytes, seed=count):
            if (dtype, count, kind) in wanted:
                same_both_ways(name, source, dtype, device)


@pytest.mark.parametrize("name", [name for name in FORMS if "float32" in FORMS[name].CODEC.dtypes])
@given(data=st.data())
def test_the_same_bytes_for_any_floats(name, data):
    """Edges, subnormals and what is not finite."""
    dtype = data.draw(
        st.sampled_from(sorted({"float32", "float16", "bfloat16"} & FORMS[name].CODEC.dtypes))
    )
    source = placed(data.draw(words_of(dtype)).tobytes())
    same_both_ways(name, source, dtype, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bytes_for_a_large_tensor(device):
    dtypes = ("bfloat16", "float32", "int64")
    rows = grid(
        {"name": FORMS, "dtype": dtypes, "kind": KINDS},
        lambda name, dtype, kind: dtype in FORMS[name].CODEC.dtypes,
    )
    made = {dtype: dict(sources(dtype, (1 << 20) + 3 * ITEMSIZE[dtype])) for dtype in dtypes}
    for row in tried(rows, device):
        dtype = row["dtype"]
        same_both_ways(row["name"], made[dtype][row["kind"]], dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_a_damaged_payload_is_judged_as_on_the_host(name, device, data):
    """CodecError there if and only if here; else the same bytes."""
    codec = FORMS[name].CODEC
    dtype = data.draw(st.sampled_from(sorted(codec.dtypes)))
    count = data.draw(st.sampled_from([1, 5, 64, 130, 300]))
    _, source = data.draw(st.sampled_from(list(sources(dtype, count * ITEMSIZE[dtype]))))
    frame = placed(on_host(codec, source, dtype))
    place = st.integers(HEADER_BYTES, frame.size - 1)
    for index, value in data.draw(st.lists(st.tuples(place, st.integers(0, 255)), max_size=9)):
        frame[index] = value
    cut = data.draw(st.integers(0, 3))
    frame[16:24].view("<u8")[0] -= min(cut, frame.size - HEADER_BYTES)
    decoded = np.empty_like(source)
    there = torch.from_numpy(frame).to(device)
    try:
        codec.decode(frame, decoded)
    except CodecError:
        with pytest.raises(CodecError):
            decode_tensor(there, source.size)
    else:
        assert decode_tensor(there, source.size).cpu().numpy().tobytes() == decoded.tobytes()


def test_a_damaged_header():
    """Every byte of it is checked, or does no harm."""
    source = torch.zeros(400, dtype=torch.uint8)
    frame = encode_tensor("zero-value", source, "float32")
    for index in range(HEADER_BYTES):
        damaged = frame.clone()
        damaged[index] ^= 0xFF
        with pytest.raises(CodecError):
            decode_tensor(damaged, 400)
    for length in range(frame.numel()):
        with pytest.raises(CodecError):
            decode_tensor(frame[:length], 400)
    with pytest.raises(CodecError, match="400 bytes, not 404"):
        decode_tensor(frame, 404)


def test_frames_and_memory_that_lie_anywhere():
    """What is not aligned to its elements is copied first."""
    source = torch.randn(100).relu().view(torch.uint8)
    wanted = encode_tensor("zero-value", source, "float32")
    moved = torch.cat([source.new_zeros(1), source])[1:]
    assert torch.equal(encode_tensor("zero-value", moved, "float32"), wanted)
    frame = torch.cat([wanted.new_zeros(3), wanted])[3:]
    assert torch.equal(decode_tensor(frame, 400), source)


def test_what_cannot_be_encoded_is_refused():
    row = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="no device form"):
        encode_tensor("nothing", row, "float32")
    with pytest.raises(ConfigError, match="int64"):
        encode_tensor("bfloat16", row, "int64")
    for wrong in (row.view(2, 4), row.view(torch.int32), torch.zeros(16, dtype=torch.uint8)[::2]):
        with pytest.raises(ConfigError, match="row of bytes"):
            encode_tensor("bfloat16", wrong, "float32")
        with pytest.raises(ConfigError, match="row of bytes"):
            decode_tensor(wrong, 8)


def test_a_frame_that_another_codec_made_or_of_another_type_is_damaged():
    source = torch.randn(100).relu().view(torch.uint8)
    frame = encode_tensor("zero-value", source, "float32")
    known = decode_tensor(frame, 400, codec_name="zero-value", dtype="float32")
    assert torch.equal(known, source)
    with pytest.raises(CodecError, match="expected narrow"):
        decode_tensor(frame, 400, codec_name="narrow")
    with pytest.raises(CodecError, match="and int32"):
        decode_tensor(frame, 400, dtype="int32")


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_no_more_memory_is_taken_than_said(name):
    for dtype in sorted(FORMS[name].CODEC.dtypes):
        size = ITEMSIZE[dtype]
        for _, source in sources(dtype, (1 << 16) * size + size - 1):
            most = scratch_bytes(name, dtype, source.size)
            memory = torch.from_numpy(source)
            with Held(memory) as held:
                frame = encode_tensor(name, memory, dtype)
            assert frame.numel() <= held.peak_bytes <= most
            with Held(frame) as held:
                decode_tensor(frame, source.size)
            assert source.size <= held.peak_bytes <= most


def test_memory_that_the_allocator_leaves_unused_is_counted():
    """What an H100 took for 2 MiB, which is 2 % more than the tensors themselves."""
    assert scratch_bytes("bfloat16", "float32", 2 << 20) >= 17_300_992


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_no_more_memory_is_taken_than_said_on_the_device(name):
    """Torch's own count, so with what its operators take for themselves."""
    dtypes = sorted({"float32", "bfloat16", "int64", "uint8"} & FORMS[name].CODEC.dtypes)
    choices = {"nbytes": (1 << 18, 1 << 21, 1 << 22, 12_000_000), "dtype": dtypes, "kind": KINDS}
    rows = tried(grid(choices), "cuda")
    wanted = {tuple(row.values()) for row in rows}
    for nbytes, dtype in dict.fromkeys((row["nbytes"], row["dtype"]) for row in rows):
        for kind, source in sources(dtype, nbytes):
            if (nbytes, dtype, kind) not in wanted:
                continue
            memory = torch.from_numpy(source).cuda()
            frame = encode_tensor(name, memory, dtype)
            most = scratch_bytes(
                name, dtype, source.size, memory.device
            )  # by kernels, if they work
            for action in (
                lambda memory=memory, dtype=dtype: encode_tensor(name, memory, dtype),
                lambda frame=frame, nbytes=source.size: decode_tensor(frame, nbytes),
            ):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                action()
                assert torch.cuda.max_memory_allocated() - before <= most


@pytest.mark.gpu
def test_operators_take_no_more_inside_than_assumed():
    """The caching allocator may leave up to 1 MiB of each large block unused, and counts it."""
    if emulated():
        pytest.skip("an emulated device has the operators of the CPU")
    aten, slack = torch.ops.aten, 4 << 20
    values = torch.ones(1 << 12, 1 << 10, dtype=torch.uint8, device="cuda")
    mask, row = values != 0, values.view(-1)
    for operator, args, kwargs in (
        (aten.index, (values, [mask]), {}),
        (aten.index, (row, [mask.view(-1)]), {}),
        (aten.masked_select, (values, mask), {}),
        (aten.masked_scatter, (values, mask, row), {}),
        (aten.nonzero, (mask.t(),), {}),
        (aten.sum, (mask, [1]), {"dtype": torch.int32}),
        (aten.cumsum, (row, 0), {}),
    ):
        assumed = taken_inside(operator, args, kwargs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = operator(*args, **kwargs)
        held = torch.cuda.max_memory_allocated() - before
        assert held <= assumed + result.nbytes + slack, operator
        del result


def test_kernels_that_had_no_memory_for_their_trial_are_tried_again(monkeypatch):
    trials = []

    def agrees(kernels, device, word):
        trials.append(device)
        if len(trials) == 1:
            raise torch.OutOfMemoryError("full at the moment")
        return True

    module, device = object(), torch.device("cuda", 7)
    monkeypatch.setattr(kernels, "_found", {})
    monkeypatch.setattr(kernels.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(exponent, "agrees", agrees)
    operators = scratch_bytes("exponent", "float32", 1 << 20, device)
    assert exponent.kernels_for(device, torch.int32) is None
    assert scratch_bytes("exponent", "float32", 1 << 20, device) == operators
    assert exponent.kernels_for(device, torch.int32) is module
    assert exponent.kernels_for(device, torch.int32) is module
    assert len(trials) == 2
    assert scratch_bytes("exponent", "float32", 1 << 20, device) < operators / 3
    assert scratch_bytes("exponent", "bfloat16", 1 << 20, device) > operators
