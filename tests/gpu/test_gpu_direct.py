"""Flash to device memory without the host, on a machine whose cuFile can do that; skipped on others."""

import pytest
import torch
from gpu_runs import copied_bytes, settings_for
from torch import nn

from cuda_runs import assert_nothing_held
from offload_runs import Trace, session_in
from penstock.core.units import MIB
from penstock.io import cufile
from penstock.observe.recorder import Stage
from penstock.runtime.cuda.digest import DIGEST_BYTES, digest_of
from penstock.runtime.cuda.link import CudaLink

pytestmark = pytest.mark.gpu

BUDGET = "48MiB"
"""Of 67 MiB that forward saves: what is to be written must be, before there is room for the rest."""


@pytest.fixture
def direct(monkeypatch):
    """A session that cannot use it is an error."""
    found = cufile.available(ask_library=True)
    if not found:
        pytest.skip(f"GPU-direct I/O does not work here: {found.reason}")
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "on")


@pytest.fixture
def expandable():
    """Device memory is mapped 20 MiB at a time."""
    older = torch.cuda.memory._set_allocator_settings
    set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", older)
    set_allocator("expandable_segments:True")
    torch.cuda.empty_cache()  # or memory that an earlier test has left shows nothing
    try:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        yield
    except RuntimeError as error:
        pytest.skip(f"there are no expandable segments here: {error}")
    finally:
        set_allocator("expandable_segments:False")


def trained(devices=("cuda",)):
    """Losses and gradients of some steps; lengths of what is saved are no multiples of 4096."""
    torch.manual_seed(0)
    parts = [nn.Sequential() for _ in devices]
    for index in range(8):
        parts[index * len(parts) // 8].extend([nn.Linear(255, 255), nn.Tanh()])
    model, trace = nn.ModuleList(parts), Trace()
    for part, device in zip(parts, devices, strict=True):
        part.to(device)
    for step in range(3):
        model.zero_grad()
        x = torch.randn(8209, 255, device=devices[0])
        for part, device in zip(parts, devices, strict=True):
            x = part(x.to(device))
        loss = x.square().mean()
        loss.backward()
        trace.note(f"step {step}, loss", loss)
        trace.note_gradients(step, model)
    for device in devices:
        torch.cuda.synchronize(device)
    return trace


def direct_mark(session):
    """Whether GPU-direct I/O is used, and how or why not."""
    (mark,) = (
        each for each in session.recorder.events() if getattr(each, "name", "") == "gpu_direct"
    )
    return dict(mark.fields)


@pytest.mark.usefixtures("direct", "small_knobs")
@pytest.mark.parametrize("verify", ["full", "off"])
def test_it_trains_bit_for_bit_and_the_host_sees_nothing_of_it(disk_path, monkeypatch, verify):
    monkeypatch.setenv("PENSTOCK_VERIFY", verify)
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "4MiB")
    expected = trained()
    with session_in(
        disk_path, **settings_for("flash", host_memory=0, device_memory=BUDGET)
    ) as session:
        found = trained()
        assert_nothing_held(session)
    found.assert_same_bits(expected)
    assert copied_bytes(session) == (0, 0)
    totals = session.recorder.snapshot()
    assert min(totals.flow(stage, "flash").nbytes for stage in (Stage.WRITE, Stage.READ)) > 0


@pytest.mark.usefixtures("direct", "small_knobs")
def test_memory_of_two_devices_is_moved_in_the_context_of_each(disk_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device only")
    devices = ("cuda:0", "cuda:1")
    expected = trained(devices)
    with session_in(
        disk_path, **settings_for("flash", host_memory=0, device_memory=BUDGET)
    ) as session:
        trained(devices).assert_same_bits(expected)
    assert copied_bytes(session) == (0, 0)
    assert direct_mark(session)["used"]


@pytest.mark.usefixtures("direct", "expandable", "small_knobs")
def test_memory_of_several_mappings_is_moved_or_it_is_said_why_not(disk_path, monkeypatch):
    """Whichever of the two the trial decides, gradients are the same."""
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "auto")
    monkeypatch.setattr(cufile, "_MODULE", "/proc")  # libcufile is asked in any case
    expected = trained()
    with session_in(disk_path, **settings_for("flash", device_memory=BUDGET)) as session:
        trained().assert_same_bits(expected)
    mark = direct_mark(session)
    assert mark["used"] or "cuFile" in mark["reason"] or "came back wrong" in mark["reason"]


@pytest.mark.parametrize("nbytes", [1, 32 * 1024 + 3, (64 << 20) + 5])
def test_a_device_makes_the_same_digest_as_a_host(nbytes):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    found = torch.zeros(DIGEST_BYTES, dtype=torch.uint8)
    link, device = CudaLink(), torch.device("cuda", torch.cuda.current_device())
    on_device = data.to(device)
    torch.cuda.synchronize()
    link.digest(link.copy_stream(device), on_device.untyped_storage(), found.data_ptr())
    assert torch.equal(found, digest_of(data))
