"""``penstock.runtime.digests``: of a device too, whose memory the host does not read.

Streams of the CPU's device module are there in name only, so that they can be counted; what they are
for is tested on devices that have some.
"""

import pytest
import torch

from penstock.runtime import digests
from penstock.runtime.digests import Comparison, DeviceDigest, digest, digest_of_storage

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (4096, 17)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int32, torch.complex64]


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Digests of host memory by the host; and of the same memory as a device would make them."""
    if request.param == "device":
        monkeypatch.setattr(digests, "is_behind", lambda device: True)
    return request.param


def made(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul(100).to(dtype)


def differ(one, other):
    return Comparison(digest(one), digest(other)).differ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_have_the_same_digest_and_one_other_bit_another(where, shape, dtype):
    one = made(shape, dtype)
    assert not differ(one, one.clone())
    other = one.clone()
    bits = other.view(-1).view(torch.uint8)
    bits[bits.numel() // 2] ^= 1
    assert differ(one, other)


def test_signs_of_zeros_and_payloads_of_nans_are_bits(where):
    assert differ(torch.zeros(8), -torch.zeros(8))
    nan = torch.full((8,), float("nan"))
    assert not differ(nan, nan.clone())
    assert differ(nan, -nan)


@pytest.mark.parametrize("layout", ["transposed", "channels last", "strided", "odd offset"])
def test_elements_count_and_not_what_lies_between_them(where, layout):
    whole = made((6, 8, 4, 5), torch.float32)

    def view_of(whole):
        return {
            "transposed": lambda: whole.transpose(0, 2),
            "channels last": lambda: whole.contiguous(memory_format=torch.channels_last),
            "strided": lambda: whole[:, 1::2],
            "odd offset": lambda: whole.view(-1)[1:],
        }[layout]()

    again = whole.clone()
    again.view(-1)[0] += 1 if layout in ("strided", "odd offset") else 0  # in no view of these
    assert not differ(view_of(whole), view_of(again))
    again[-1, -1, -1, -1] += 1
    assert differ(view_of(whole), view_of(again))


def test_no_other_layout_than_the_usual_one_is_copied_on_a_device(monkeypatch):
    monkeypatch.setattr(digests, "is_behind", lambda device: True)
    seen = []
    monkeypatch.setattr(digests, "digest_of", lambda data: seen.append(data.data_ptr()) or data)
    tensor = made((6, 8, 4, 5), torch.float32).contiguous(memory_format=torch.channels_last)
    for view in (tensor, tensor.transpose(0, 3)):
        digest(view)
    assert seen == [tensor.data_ptr()] * 2


def test_a_storage_is_all_of_its_bytes(where):
    one = made((64,), torch.float32)
    other = one.clone()
    first = digest_of_storage(one[:3].untyped_storage())
    assert not Comparison(first, digest_of_storage(other.untyped_storage())).differ()
    other[-1] += 1
    assert Comparison(first, digest_of_storage(other.untyped_storage())).differ()


def test_workspaces_have_none(where):
    assert digest(torch.zeros(8, dtype=torch.uint8)) is None


def test_digests_need_no_gradients(where):
    tensor = made((8, 8), torch.float32).requires_grad_()
    digest(tensor * 2)
    assert Comparison(digest(tensor), digest(tensor.detach())).differ() is False


def test_on_the_host_the_answer_is_at_hand_and_on_a_device_it_is_asked_for(where):
    comparison = Comparison(digest(torch.ones(9)), digest(torch.ones(9)))
    assert comparison.at_hand == (where == "host")
    assert comparison.differ() is False
    assert comparison.at_hand


class Streams:
    """Stands for the module of a device; it notes who waits for whom."""

    def __init__(self):
        self.current = "main"
        self.waits = []

    def current_stream(self, device):
        streams = self

        class Stream(str):
            def wait_stream(self, other):
                streams.waits.append((str(self), str(other)))

        return Stream(self.current)

    def stream(self, stream):
        streams = self

        class Within:
            def __enter__(self):
                self.before, streams.current = streams.current, str(stream)

            def __exit__(self, *error):
                streams.current = self.before

        return Within()


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    monkeypatch.setattr(digests, "is_behind", lambda device: True)
    return streams


def test_trap_15_who_compares_comes_after_both_digests_and_who_reads_after_that(
    streams, monkeypatch
):
    streams.current = "side"
    first = digest(torch.ones(9))
    assert isinstance(first, DeviceDigest)
    assert str(first.stream) == "side"
    streams.current = "main"
    second = digest(torch.ones(9))
    assert streams.waits == []
    comparison = Comparison(first, second)
    assert streams.waits == [("main", "side")]
    streams.current = "third"
    read = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: bool(read.append(streams.current)))
    assert comparison.differ() is False
    assert read == ["main"]
    assert streams.current == "third"


def test_what_is_expanded_is_digested_once_and_not_made_whole(monkeypatch):
    monkeypatch.setattr(digests, "is_behind", lambda device: True)
    seen = []
    monkeypatch.setattr(digests, "digest_of", lambda data: seen.append(data.numel()) or data)
    bias = made((1, 4, 16, 16), torch.float32)
    digest(bias.expand(64, 4, 16, 16))
    assert seen == [bias.nbytes]
