"""Whole sessions whose flash is GPU-direct, in simulation, and what decides that they are."""

import ctypes
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from cuda_training import BUDGET, HOST, MORE_HOST, trained

from offload_runs import session_in, wait_for_writes
from penstock.core.errors import (
    ChecksumError,
    ConfigError,
    PenstockWarning,
    RestoreError,
    TransferError,
)
from penstock.core.units import MIB
from penstock.io import cufile
from penstock.io.threads import ThreadEngine
from penstock.runtime import stores
from penstock.tier.wrappers import FaultyTier


class DeviceEngine(ThreadEngine):
    """In place of cuFile: the link's device memory is host memory, so its addresses do.

    Attributes:
        moved: (op, address, bytes) of every request.
        broken: What becomes of requests: ``""``, ``"refused"`` or ``"corrupt"``.
    """

    broken = ""
    moved: ClassVar[list] = []

    @property
    def spec(self):
        return replace(super().spec, name="simulated", gpu_direct=True)

    def submit(self, request):
        self.moved.append((request.op, request.address, request.nbytes))
        if self.broken == "refused":
            raise TransferError(errno=95, op=request.op, path="sim", offset_bytes=0, nbytes=1)
        transfer = super().submit(request)
        if self.broken == "corrupt" and request.op == "read":
            transfer.wait(10)
            ctypes.memset(request.address + 99, 0, 2)
        return transfer


@pytest.fixture
def engine(link, monkeypatch):
    """GPU-direct I/O works."""
    monkeypatch.setattr(cufile, "available", lambda: cufile.Availability(True, "simulated"))
    monkeypatch.setattr(cufile, "KvikioEngine", DeviceEngine)
    monkeypatch.setattr(DeviceEngine, "broken", "")
    monkeypatch.setattr(DeviceEngine, "moved", [])
    return DeviceEngine


def direct_mark(session):
    marks = [
        event for event in session.recorder.events() if getattr(event, "name", "") == "gpu_direct"
    ]
    return dict(marks[-1].fields) if marks else None


@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("host_memory", [0, MORE_HOST])
def test_gpu_direct_gradients_are_the_same_to_the_last_bit(
    link, engine, disk_path, policy, host_memory
):
    settings = {"policy": policy, "host_memory": host_memory, "device_memory": BUDGET}
    with_us, session = trained(session_of=lambda m, o: session_in(disk_path, m, o, **settings))
    with_us.assert_same_bits(trained()[0])
    assert session.budget.peak_bytes <= 4 * MIB
    assert list(session._stores.tiers) == (["flash", "host"] if host_memory else ["flash"])
    assert direct_mark(session) == {"used": True, "reason": "simulated"}
    shared = policy == "auto" and bool(host_memory)  # how much goes where is for the plan to say
    least = 0 if shared else 4 * MIB
    assert sum(nbytes for op, _, nbytes in engine.moved if op == "read") > least
    if not host_memory:
        assert link.copied_bytes["out"] < 4 * MIB  # those of the trial


def test_gpu_direct_is_measured_through_device_memory(link, engine, disk_path):
    with session_in(disk_path) as session:
        engine.moved.clear()
        machine = session._stores.measure()
    assert len(engine.moved) == 8
    assert machine.flash_read_bytes_per_s > 0


@pytest.mark.filterwarnings("ignore:the device budget is exceeded")
@pytest.mark.parametrize(
    ("host_memory", "message"),
    [(0, "cannot be spilled, it goes to another tier or stays"), (MORE_HOST, "stays in pinned")],
)
def test_gpu_direct_with_flash_that_fails_is_the_same(
    link, engine, disk_path, host_memory, message
):
    def faulty(tier):
        fails = {"fail_at": {"write": 3}, "times": None}
        return FaultyTier(tier, **fails) if tier.spec.name == "flash" else tier

    settings = {"host_memory": host_memory, "device_memory": BUDGET, "wrap_tier": faulty}
    with pytest.warns(PenstockWarning, match=message):
        with_us, session = trained(session_of=lambda m, o: session_in(disk_path, m, o, **settings))
    with_us.assert_same_bits(trained()[0])
    assert session.recorder.snapshot().counted("spill.failed.flash") > 0


def test_gpu_direct_wrong_bytes_are_never_a_gradient(link, engine, disk_path):
    with session_in(disk_path) as session:
        engine.broken = "corrupt"
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
        ("refused", "Operation not supported"),
        ("corrupt", "of 2102249 bytes came back wrong"),
        ("absent", "no nvidia-fs"),
    ],
)
@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("link")
def test_gpu_direct_that_does_not_work_is_not_in_the_way(
    engine, disk_path, monkeypatch, broken, reason
):
    if broken == "absent":
        monkeypatch.setattr(cufile, "available", lambda: cufile.Availability(False, "no nvidia-fs"))
    engine.broken = broken
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


def test_gpu_direct_is_never_used_if_it_is_switched_off(link, engine, disk_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "off")
    with session_in(disk_path, host_memory=HOST) as session:
        assert not session._stores.tiers["flash"].spec.gpu_direct
    assert direct_mark(session) is None
    assert not engine.moved


def test_gpu_direct_on_a_device_that_is_no_gpu(engine, disk_path, monkeypatch):
    monkeypatch.setattr(stores, "_runs_behind", lambda device: False)
    with session_in(disk_path) as session:
        assert direct_mark(session) is None
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "on")
    with pytest.raises(ConfigError, match="'cpu' is no GPU"), session_in(disk_path):
        pass
    with session_in(disk_path, flash=(), flash_capacity=None, host_memory=HOST):
        pass  # nothing goes to flash, so nothing is missing
