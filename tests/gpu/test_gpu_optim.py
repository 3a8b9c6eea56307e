"""An optimizer on flash, and what else works with the weights and gradients of its device meanwhile."""

import pytest
import torch
from gpu_runs import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from penstock.optim import FlashAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*takes more memory than in memory"),
]

LONG = 500_000_000
"""Cycles of the device that take about a quarter of a second."""
WIDTH = 256


def network(device=DEVICE):
    """Weights alone: whoever copies a bias first waits for what the others came after."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    return nn.Sequential(*layers).to(device)


def batch(device=DEVICE):
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("gradient_memory", [None, 0])
@pytest.mark.parametrize("evaluated_on", ["the stream of step", "a stream that step waits for"])
def test_trap_37_an_evaluation_before_step_reads_the_weights_before_the_step(
    disk_path, gradient_memory, evaluated_on
):
    model, x = network(), batch()
    settings = {"flash": disk_path, "tile": 102_400, "gradient_memory": gradient_memory}
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **settings)
    model(x).square().mean().backward()
    optimizer.step()  # the first one reads the weights, and so waits for what made them
    expected = model(x).detach().cpu()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    torch.cuda.synchronize()  # all gradients are where they rest
    mine = torch.cuda.Stream()
    reader = mine if evaluated_on == "the stream of step" else torch.cuda.Stream()
    with torch.cuda.stream(reader), torch.no_grad():
        torch.cuda._sleep(LONG)
        seen = model(x)
    mine.wait_stream(reader)
    with torch.cuda.stream(mine):
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.close()
    assert torch.equal(seen.cpu(), expected)
    assert not torch.equal(model(x).cpu(), expected)


@pytest.mark.parametrize("backward_on", ["the stream of the evaluation", "one that waits for it"])
def test_trap_37_with_overlap_an_evaluation_before_backward_reads_the_weights_before_the_step(
    disk_path, backward_on
):
    model, x = network(), batch()
    settings = {"flash": disk_path, "tile": 102_400, "overlap": True}
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **settings)
    reader = torch.cuda.Stream()
    mine = reader if backward_on == "the stream of the evaluation" else torch.cuda.Stream()
    for _ in range(2):  # in the first one copies wait for each other by chance
        expected = model(x).detach().cpu()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        with torch.cuda.stream(reader), torch.no_grad():
            torch.cuda._sleep(LONG)
            seen = model(x)
        mine.wait_stream(reader)
        with torch.cuda.stream(mine):
            model(x).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        assert torch.equal(seen.cpu(), expected)
    assert not torch.equal(model(x).cpu(), expected)
    optimizer.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_threads_that_update_have_the_device_of_the_weights_current(disk_path, overlap):
    """Device 0 is nobody's business that trains on another: there each process would take memory."""
    device = torch.device(DEVICE, torch.cuda.device_count() - 1)
    with torch.cuda.device(device):  # in this thread: what others find current is not changed
        model, x = network(device), batch(device)
        optimizer = FlashAdamW(
            model.parameters(), lr=1e-2, flash=disk_path, tile=102_400, overlap=overlap
        )
        model(x).square().mean().backward()
        optimizer.step()
    pool = optimizer._penstock.pool
    found = {pool.submit(torch.cuda.current_device).result() for _ in range(8)}
    optimizer.close()
    assert found == {device.index}


@pytest.mark.parametrize("settings", [{"overlap": True}, {"gradient_memory": 0}], ids=str)
def test_a_shard_s_gradient_is_used_when_it_has_come_from_the_device(disk_path, settings):
    """FSDP2 on torch 2.8 calls the hooks of a shard in memory with its gradient still on the way."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{disk_path / 'meet'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        shard = nn.Parameter(DTensor.from_local(torch.zeros(WIDTH * WIDTH), mesh, [Shard(0)]))
        optimizer = FlashAdamW([shard], lr=1e-2, flash=disk_path, tile=102_400, **settings)
        values = torch.randn(WIDTH * WIDTH, device=DEVICE)
        landing = torch.zeros(WIDTH * WIDTH, pin_memory=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG)
            landing.copy_(values, non_blocking=True)
            shard.grad = DTensor.from_local(landing, mesh, [Shard(0)])
            for hook in shard._post_accumulate_grad_hooks.values():
                hook(shard)
        torch.cuda.synchronize()
        optimizer.step()
        optimizer.close()
    finally:
        torch.distributed.destroy_process_group()
    expected = nn.Parameter(torch.zeros(WIDTH * WIDTH))
    expected.grad = values.cpu()
    torch.optim.AdamW([expected], lr=1e-2, fused=True).step()
    assert torch.equal(shard.to_local(), expected)
