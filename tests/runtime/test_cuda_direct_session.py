"""Whole sessions whose flash is GPU-direct, in simulation, and what decides that they are."""

import ctypes

import pytest
import torch
from cuda_training import BUDGET, HOST, MORE_HOST, trained

from cufile_in_python import PythonLibrary
from offload_runs import session_in, wait_for_writes
from penstock.core.errors import (
    ChecksumError,
    ConfigError,
    PenstockWarning,
    RestoreError,
)
from penstock.core.units import MIB
from penstock.io import cufile
from penstock.runtime import stores
from penstock.runtime.cuda import gpu_direct
from penstock.store.wrappers import FaultyTier

TRIAL_BYTES = 2 * MIB + 4096 + 1001


@pytest.fixture
def library(link, monkeypatch, tmp_path):
    """libcufile. The link's device memory is host memory, so its addresses do."""
    library = PythonLibrary()
    module = tmp_path / "nvidia-fs"
    module.touch()
    monkeypatch.setattr(cufile, "_MODULE", str(module))
    monkeypatch.setattr(cufile, "_load", lambda: library)
    monkeypatch.setattr(gpu_direct, "TRIAL_BYTES", TRIAL_BYTES)
    yield library
    assert not library.files


def corrupt(address, nbytes):
    ctypes.memset(address + min(99, nbytes - 1), 0, 2 if nbytes > 100 else 1)


def direct_mark(session):
    marks = [
        event for event in session.recorder.events() if getattr(event, "name", "") == "gpu_direct"
    ]
    return dict(marks[-1].fields) if marks else None


@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("host_memory", [0, MORE_HOST])
def test_gpu_direct_gradients_are_the_same_to_the_last_bit(
    link, library, disk_path, policy, host_memory
):
    settings = {"policy": policy, "host_memory": host_memory, "device_memory": BUDGET}
    with_us, session = trained(session_of=lambda m, o: session_in(disk_path, m, o, **settings))
    with_us.assert_same_bits(trained()[0])
    assert session.budget.peak_bytes <= 4 * MIB
    assert list(session.inspect().tiers) == (["flash", "host"] if host_memory else ["flash"])
    assert direct_mark(session) == {"used": True, "reason": "libcufile over nvidia-fs 2.20"}
    shared = policy == "auto" and bool(host_memory)  # how much goes where is for the plan to say
    least = 0 if shared else 2 * MIB
    assert library.moved_bytes("read") - 2 * TRIAL_BYTES > least
    if not host_memory:
        assert link.copied_bytes["out"] == 2 * TRIAL_BYTES


def test_gpu_direct_is_measured_through_device_memory(link, library, disk_path):
    with session_in(disk_path) as session:
        library.calls.clear()
        machine = session._stores.measure()
    assert library.moved_bytes("write") == library.moved_bytes("read") > 2 * MIB
    assert machine.flash_read_bytes_per_s > 0


@pytest.mark.filterwarnings("ignore:the device budget is exceeded")
@pytest.mark.parametrize(
    ("host_memory", "message"),
    [(0, "cannot be spilled, it goes to another tier or stays"), (MORE_HOST, "stays in pinned")],
)
def test_gpu_direct_with_flash_that_fails_is_the_same(
    link, library, disk_path, host_memory, message
):
    def faulty(tier):
        fails = {"fail_at": {"write": 3}, "times": None}
        return FaultyTier(tier, **fails) if tier.spec.name == "flash" else tier

    settings = {"host_memory": host_memory, "device_memory": BUDGET, "wrap_tier": faulty}
    with pytest.warns(PenstockWarning, match=message):
        with_us, session = trained(session_of=lambda m, o: session_in(disk_path, m, o, **settings))
    with_us.assert_same_bits(trained()[0])
    assert session.recorder.snapshot().counted("spill.failed.flash") > 0


def test_gpu_direct_wrong_bytes_are_never_a_gradient(library, disk_path):
    with session_in(disk_path) as session:
        library.after_read = corrupt
        x = torch.randn(64, 4096, requires_grad=True)
        loss = torch.tanh(torch.tanh(x)).sum()
        wait_for_writes(session)
        with pytest.raises(RestoreError) as caught:
            loss.backward()
    assert x.grad is None
    assert isinstance(caught.value.__cause__, ChecksumError)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"refusal": -5008}, "cuFile error 5008: the file system or its device is not supported"),
        ({"after_read": corrupt}, f"of {TRIAL_BYTES} bytes came back wrong"),
        ({"mapping_bytes": MIB}, "cuFile error 5014"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_gpu_direct_that_does_not_work_is_not_in_the_way(
    library, disk_path, monkeypatch, broken, reason
):
    for name, value in broken.items():
        setattr(library, name, value)
    with_us, session = trained(
        session_of=lambda m, o: session_in(disk_path, m, o, host_memory=HOST)
    )
    with_us.assert_same_bits(trained()[0])
    assert direct_mark(session)["used"] is False
    assert reason in direct_mark(session)["reason"]
    assert not session._stores.tiers["flash"].spec.gpu_direct
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "on")
    with (
        pytest.raises(ConfigError, match=f"PENSTOCK_GPU_DIRECT=on, but.*{reason}"),
        session_in(disk_path, host_memory=HOST),
    ):
        pass


def test_gpu_direct_without_the_kernel_module_is_asked_for_only_if_it_must_be(
    library, disk_path, monkeypatch
):
    """libcufile may know another way past the host, but opening it leaves a file of its own behind."""
    monkeypatch.setattr(cufile, "_MODULE", "/proc/driver/none")
    with session_in(disk_path, host_memory=HOST) as session:
        assert "nvidia-fs is not loaded" in direct_mark(session)["reason"]
    assert not library.opened
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "on")
    with session_in(disk_path, host_memory=HOST) as session:
        assert direct_mark(session)["used"]


def test_gpu_direct_is_never_used_if_it_is_switched_off(library, disk_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "off")
    with session_in(disk_path, host_memory=HOST) as session:
        assert not session._stores.tiers["flash"].spec.gpu_direct
    assert direct_mark(session) is None
    assert not library.opened


def test_gpu_direct_on_a_device_that_is_no_gpu(library, disk_path, monkeypatch):
    monkeypatch.setattr(stores, "_runs_behind", lambda device: False)
    with session_in(disk_path) as session:
        assert direct_mark(session) is None
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "on")
    with pytest.raises(ConfigError, match="'cpu' is no GPU"), session_in(disk_path):
        pass
    with session_in(disk_path, flash=(), flash_capacity=None, host_memory=HOST):
        pass  # nothing goes to flash, so nothing is missing


def test_frames_of_a_codec_go_straight_to_flash(library, link, disk_path):
    """They are device memory as any other; pieces are encoded and decoded there."""
    settings = {"codec": "exponent", "host_memory": 0, "device_memory": "32MiB"}

    def session_of(model, optimizer):
        return session_in(disk_path, model, optimizer, **settings)

    with_us, session = trained(session_of=session_of)
    with_us.assert_same_bits(trained()[0])
    counted = session.recorder.snapshot().counted
    written = library.moved_bytes("write") - 2 * TRIAL_BYTES
    assert 0 < counted("encoded.frame_bytes") < counted("encoded.source_bytes")
    assert written <= counted("encoded.frame_bytes") + 9 * MIB  # what exponent does not take
    assert link.copied_bytes["out"] == 2 * TRIAL_BYTES  # and nothing else
