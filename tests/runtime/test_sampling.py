"""``penstock.runtime.sampling``: what codecs make of crafted storages; looking changes nothing."""

import threading

import numpy as np
import pytest
import torch

from offload_runs import SLOW_FLASH, same_bits
from penstock.core.units import KIB, MIB
from penstock.observe.recorder import StallCause
from penstock.runtime.sampling import STRETCH_BYTES, Sampler

POSITIVE = "positive"


def sampled(tensor, dtype=None, *, sign_only=False):
    """Samples by the codec's name."""
    dtype = dtype or str(tensor.dtype).removeprefix("torch.")
    samples = Sampler().sample(tensor.untyped_storage(), dtype, sign_only=sign_only)
    return {sample.codec: sample for sample in samples}


def ratios(tensor, **options):
    return {name: sample.ratio for name, sample in sampled(tensor, **options).items()}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- ratios ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [0.0, 0.25, 0.5, 0.9])
def test_of_a_sparse_storage_zero_value_keeps_what_is_not_zero(zeros):
    values = random(512, 1024)
    values[torch.rand(512, 1024, generator=torch.Generator().manual_seed(1)) < zeros] = 0
    found = ratios(values)
    assert found["zero-value"] == pytest.approx(min(1.0, 1 - zeros + 1 / 32), abs=0.01)
    assert found["zero-value+exponent"] < found["zero-value"]


def test_of_dense_floats_the_planes_are_packed():
    found = ratios(random(MIB))
    assert found["exponent"] == pytest.approx(0.88, abs=0.01)
    assert found["zero-value"] == found["narrow"] == 1.0
    assert ratios(random(MIB).bfloat16())["exponent"] == pytest.approx(0.76, abs=0.02)


def test_of_indices_and_masks_the_differences_are_narrow():
    indices = torch.randint(200, (MIB // 8,), generator=torch.Generator().manual_seed(0))
    assert ratios(indices)["narrow"] == pytest.approx(1 / 8, abs=0.01)
    mask = indices % 2 == 0
    assert ratios(mask)["narrow"] == pytest.approx(1 / 8, abs=0.01)
    assert ratios(indices.to(torch.int8) % 2)["narrow"] == pytest.approx(1 / 8, abs=0.01)


def test_signs_are_measured_only_where_they_may_be_enough():
    values = random(MIB)
    assert POSITIVE not in ratios(values)
    assert ratios(values, sign_only=True)[POSITIVE] == pytest.approx(1 / 32, abs=0.001)
    assert POSITIVE not in ratios(torch.ones(4096, dtype=torch.int64), sign_only=True)


def test_only_lossless_codecs_and_no_rows_are_measured():
    assert set(ratios(random(8192))) == {
        "zero-value",
        "narrow",
        "exponent",
        "zero-value+exponent",
    }
    assert set(ratios(random(8192).double())) == {"zero-value", "narrow"}


def test_stretches_are_spread_over_the_whole_storage():
    """Dense in front, zero behind: a sample of the front alone would be wrong by half."""
    values = torch.cat([random(4 * MIB), torch.zeros(4 * MIB)])
    assert ratios(values)["zero-value"] == pytest.approx(0.53, abs=0.02)


def test_speeds_are_of_this_machine_and_without_compilation():
    """The first sample of a type compiles; what it says must not contain that."""
    for sample in sampled(random(2 * MIB), sign_only=True).values():
        assert 3e6 < sample.encode_bytes_per_s < 1e12, sample
        assert 3e6 < sample.decode_bytes_per_s < 1e12, sample


# -- any storage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 5, 8, 31, 33, 4095, 4097, 100_003, STRETCH_BYTES * 4 + 1])
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "float16", "float32", "int64", "float64"]
)
def test_storages_of_any_length_are_sampled(nbytes, dtype):
    """A storage need not be a whole number of the elements that a view of it has."""
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    for name, sample in sampled(memory, dtype, sign_only=True).items():
        assert 0 <= sample.ratio <= 2, name  # a bitmap is of whole words


def test_an_empty_storage_has_no_samples():
    assert sampled(torch.empty(0), "float32") == {}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_a_type_that_no_codec_takes_has_no_samples(dtype):
    assert sampled(torch.zeros(8192, dtype=torch.uint8).view(dtype)) == {}


def test_a_storage_where_no_element_could_begin_is_not_sampled():
    """As when a file with an odd header is mapped: it is not encoded either."""
    memory = np.zeros(64 * KIB + 16, np.uint8)
    odd = torch.from_numpy(memory[1 - memory.ctypes.data % 16 :][: 64 * KIB])
    assert odd.untyped_storage().data_ptr() % 4
    assert sampled(odd, "float32") == {}
    assert sampled(odd, "uint8")


def test_a_sample_changes_nothing():
    for values in (random(300_001), torch.arange(100_000), torch.rand(77_777) < 0.5):
        before = values.clone()
        version = values._version
        sampled(values, sign_only=True)
        assert same_bits(values, before)
        assert values._version == version


def test_threads_sample_at_once_without_getting_into_each_others_way():
    sampler, failed = Sampler(), []
    storages = [random(MIB), torch.zeros(MIB), torch.arange(MIB).float(), random(MIB).relu()]
    expected = [ratios(each) for each in storages]

    def work(index):
        storage = storages[index].untyped_storage()
        for _ in range(10):
            found = sampler.sample(storage, "float32", sign_only=False)
            if {sample.codec: sample.ratio for sample in found} != expected[index]:
                failed.append(index)

    threads = [threading.Thread(target=work, args=[index]) for index in range(len(storages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# -- in a session ----------------------------------------------------------------------------------


def test_training_with_mapped_data_at_an_odd_address(session_for):
    """Linear saves its input, which nobody aligned."""
    memory = bytearray(64 * KIB + 16)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    skip = 1 - address % 4 + 4
    odd = torch.frombuffer(memory, dtype=torch.uint8, offset=skip, count=64 * KIB)
    values = torch.empty(0).set_(odd.untyped_storage(), 0, (64, 256))
    assert values.data_ptr() % 4
    weight = torch.randn(256, requires_grad=True)
    expected = None
    with session_for(device_memory="64MiB", machine=SLOW_FLASH) as session:
        for _ in range(5):
            (values * weight).sum().backward()
            expected = weight.grad if expected is None else expected
            assert same_bits(weight.grad, expected)
            weight.grad = None
        assert session.plan.offloaded_bytes


def test_sampling_is_told_as_a_stall_of_its_own(session_for):
    weight = torch.randn(8192, requires_grad=True)
    with session_for(device_memory="64MiB", machine=SLOW_FLASH) as session:

        def sampled_ns():
            stall = session.recorder.snapshot().stalls.get(StallCause.SAMPLING)
            return stall.total_ns if stall else 0

        def run():
            ((weight * 2) * (weight * 3)).sum().backward()

        run()
        assert sampled_ns() == 0
        run()
        took_ns = sampled_ns()
        assert took_ns > 0
        run()
        assert sampled_ns() == took_ns
