"""Flash to device memory without the host, on a machine whose cuFile can do that; skipped on others."""

import pytest
import torch
from gpu_runs import copied_bytes, settings_for
from torch import nn

from cuda_runs import assert_nothing_held
from offload_runs import Trace, session_in
from penstock.io import cufile
from penstock.observe.recorder import Stage
from penstock.runtime.cuda.digest import DIGEST_BYTES, digest_of
from penstock.runtime.cuda.link import CudaLink

pytestmark = pytest.mark.gpu


@pytest.fixture
def direct(monkeypatch):
    """A session that cannot use it is an error."""
    found = cufile.available()
    if not found:
        pytest.skip(f"GPU-direct I/O does not work here: {found.reason}")
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "on")


def trained():
    """Losses and gradients of some steps; lengths of what is saved are no multiples of 4096."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1023, 1023), nn.Tanh()) for _ in range(8)]
    model, trace = nn.Sequential(*layers).to("cuda"), Trace()
    for step in range(3):
        model.zero_grad()
        loss = model(torch.randn(2049, 1023, device="cuda")).square().mean()
        loss.backward()
        trace.note(f"step {step}, loss", loss)
        trace.note_gradients(step, model)
    torch.cuda.synchronize()
    return trace


@pytest.mark.usefixtures("direct", "small_knobs")
@pytest.mark.parametrize("verify", ["full", "off"])
def test_it_trains_bit_for_bit_and_the_host_sees_nothing_of_it(disk_path, monkeypatch, verify):
    monkeypatch.setenv("PENSTOCK_VERIFY", verify)
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "4MiB")
    expected = trained()
    with session_in(disk_path, **settings_for("flash", host_memory=0)) as session:
        found = trained()
        assert_nothing_held(session)
    found.assert_same_bits(expected)
    assert copied_bytes(session) == (0, 0)
    totals = session.recorder.snapshot()
    assert min(totals.flow(stage, "flash").nbytes for stage in (Stage.WRITE, Stage.READ)) > 0


@pytest.mark.parametrize("nbytes", [1, 32 * 1024 + 3, (64 << 20) + 5])
def test_a_device_makes_the_same_digest_as_a_host(nbytes):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    found = torch.zeros(DIGEST_BYTES, dtype=torch.uint8)
    link, device = CudaLink(), torch.device("cuda", torch.cuda.current_device())
    on_device = data.to(device)
    torch.cuda.synchronize()
    link.digest(link.copy_stream(device), on_device.untyped_storage(), found.data_ptr())
    assert torch.equal(found, digest_of(data))
