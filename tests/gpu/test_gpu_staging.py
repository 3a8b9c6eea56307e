"""What optimizers, checkpoints and suspended jobs copy between a device and the host."""

import ctypes

import pytest
import torch
from gpu_runs import DEVICE, settings_for
from torch import nn

import penstock
from offload_runs import session_in
from penstock import checkpoint, staging
from penstock.checkpoint.regions import region_of
from penstock.core.units import KIB, MIB
from penstock.optim import FlashAdamW
from penstock.staging import PIECE_BYTES, copy_across, ready_event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*takes more memory than in memory"),
]

LONG = 500_000_000
"""Cycles of the device that take about a quarter of a second."""
LEAST = 64 * KIB
"""Shorter copies (a loss, a norm) are nobody's business."""


@pytest.fixture
def pageable(monkeypatch):
    """Copies between a device and memory that is not pinned: which call, and how long."""
    found = []

    def watch(owner, name, other_of):
        original = getattr(owner, name)

        def copied(self, *args, **kwargs):
            other = other_of(self, *args)
            if other is not None and (self.device.type == "cuda") != (other.type == "cuda"):
                host = self if self.device.type == "cpu" else args[0]
                is_pinned = isinstance(host, torch.Tensor) and host.is_pinned()
                if self.nbytes_ >= LEAST and not is_pinned:
                    found.append((name, self.nbytes_))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, copied)

    def device_of(self, *args):
        other = args[0] if args else None
        if isinstance(other, torch.Tensor | torch.UntypedStorage):
            return other.device
        return other if isinstance(other, torch.device) else None

    monkeypatch.setattr(torch.Tensor, "nbytes_", property(lambda t: t.nbytes), raising=False)
    monkeypatch.setattr(
        torch.UntypedStorage, "nbytes_", property(lambda s: s.nbytes()), raising=False
    )
    watch(torch.Tensor, "copy_", device_of)
    watch(torch.Tensor, "to", device_of)
    watch(torch.UntypedStorage, "copy_", device_of)
    return found


def values(count, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(-1000, 1000, (count,), generator=generator)
    return words.to(torch.float32).div_(7).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("more_bytes", [-8, 0, 8, 4 * PIECE_BYTES + 24])
def test_elements_come_across_both_ways(dtype, more_bytes):
    count = (PIECE_BYTES + more_bytes) // dtype.itemsize
    expected = values(count, dtype)
    there = torch.empty(count, dtype=dtype, device=DEVICE)
    copy_across(expected, there, ready_event(there.device))
    assert torch.equal(there.cpu(), expected)
    back = copy_across(there, torch.empty_like(expected), ready_event(there.device))
    assert torch.equal(back, expected)


def test_the_host_makes_the_type_of_the_target():
    narrow, wide = values(300_000, torch.bfloat16), values(300_000, torch.float32)
    source, there = narrow.to(DEVICE), torch.empty_like(narrow, device=DEVICE)
    after = ready_event(source.device)
    found = copy_across(source, torch.empty(300_000), after)
    assert torch.equal(found, narrow.float())
    there = copy_across(wide, there, after)
    assert torch.equal(there.cpu(), wide.bfloat16())


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_copy_comes_after_its_event_and_ends_before_it_returns(is_pinned):
    count = 5 * PIECE_BYTES // 4 + 1
    stream = torch.cuda.Stream()
    there = torch.zeros(count, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        there.fill_(1)
        after = ready_event(there.device)
    target = torch.zeros(count, pin_memory=is_pinned)
    copy_across(there, target, after)
    assert bool((target == 1).all())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        seen = there.clone()
        copy_across(torch.full((count,), 2.0), there, ready_event(there.device))
    assert bool((there == 2).all())
    assert bool((seen == 1).all())


def test_nothing_that_an_optimizer_copies_is_pageable(disk_path, pageable):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]).to(DEVICE)
    optimizer = FlashAdamW(model.parameters(), flash=disk_path, tile=102_400, gradient_memory=0)
    x = torch.randn(64, 512, device=DEVICE)
    pageable.clear()
    for micro in range(4):
        model(x).square().mean().backward()  # the second adds to gradients that are on flash
        if micro % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    assert pageable == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_an_optimizer_takes_over_is_copied_pageable(disk_path, pageable, dtype):
    """A state dict is loaded, and a durable step restored."""

    def optimizer(path):
        path.mkdir(exist_ok=True)
        torch.manual_seed(0)
        model = nn.Linear(600, 512, bias=False).to(DEVICE, dtype)
        model.weight.data = model.weight.detach().t().contiguous().t()
        made = FlashAdamW(model.parameters(), flash=path, tile=102_400, durable=True)
        return model, made

    model, first = optimizer(disk_path / "a")
    for _ in range(2):
        first.zero_grad()
        model(torch.randn(64, 600, device=DEVICE, dtype=dtype)).square().mean().backward()
        first.step()
    expected, saved = model.weight.detach().cpu(), first.state_dict()
    first.close()
    _, second = optimizer(disk_path / "b")
    again, third = optimizer(disk_path / "a")
    on_device = {
        key: {name: to_device(value) for name, value in state.items()}
        for key, state in saved["state"].items()
    }
    pageable.clear()
    second.load_state_dict(saved)
    second.load_state_dict(saved | {"state": on_device})
    second.close()
    third.resume()
    assert pageable == []
    assert torch.equal(again.weight.detach().cpu(), expected)
    third.close()


def to_device(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) and value.dim() else value


def test_nothing_that_a_checkpoint_copies_is_pageable_and_all_orders_survive(disk_path, pageable):
    rows = torch.arange(3_000_000.0, device=DEVICE).view(1500, 2000)
    saved = {
        "rows": rows,
        "columns": rows.t()[:700],
        "gaps": rows[:, ::2],
        "odd": torch.arange(777_777, device=DEVICE).to(torch.complex64),
        "scalar": torch.tensor(3.5, device=DEVICE),
    }
    checkpoint.save(disk_path / "a", saved)
    loaded = {name: torch.zeros_like(each) for name, each in saved.items()}
    checkpoint.load(disk_path / "a", loaded)
    assert pageable == []
    for name, each in saved.items():
        assert torch.equal(loaded[name].cpu(), each.cpu()), name


@pytest.mark.parametrize("order", ["in a row", "transposed"])
def test_bytes_that_begin_and_end_within_elements_come_and_go(order):
    tensor = torch.arange(600_000, device=DEVICE, dtype=torch.float64).view(600, 1000)
    tensor = tensor.t() if order == "transposed" else tensor
    expected = bytearray(tensor.contiguous().cpu().numpy().tobytes())
    start, stop = 5, 2 * PIECE_BYTES + 13
    found = (ctypes.c_ubyte * (stop - start))()
    region_of(tensor).copy_out(start, stop, ctypes.addressof(found))
    assert bytes(found) == expected[start:stop]
    other = bytes((byte + 1) % 251 for byte in expected[start:stop])
    expected[start:stop] = other
    there = ctypes.create_string_buffer(other)
    region_of(tensor).copy_in(start, stop, ctypes.addressof(there))
    assert tensor.contiguous().cpu().numpy().tobytes() == expected


def test_a_load_comes_after_what_the_stream_was_told_before(disk_path):
    saved = torch.arange(2_000_000.0, device=DEVICE)
    checkpoint.save(disk_path / "a", {"x": saved})
    target = torch.zeros_like(saved)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        seen = target.clone()
        checkpoint.load(disk_path / "a", {"x": target})
    torch.cuda.synchronize()
    assert torch.equal(target, saved)
    assert not bool(seen.any())


def test_nothing_that_a_suspended_job_copies_is_pageable(disk_path, pageable):
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 1024, device=DEVICE)).sum().backward()
    before = model.weight.detach().cpu()
    pageable.clear()
    with session_in(disk_path, model, optimizer, **settings_for("flash")) as session:
        suspended = penstock.suspend(session)
        assert suspended.nbytes >= 4 * MIB
        penstock.resume(session)
    assert pageable == []
    assert torch.equal(model.weight.detach().cpu(), before)


def test_idle_pinned_memory_goes_when_it_is_asked_for(disk_path):
    source = torch.ones(PIECE_BYTES, dtype=torch.uint8, device=DEVICE)
    copy_across(source, torch.empty_like(source, device="cpu"), ready_event(source.device))
    assert staging._idle
    staging.free_idle()
    assert not staging._idle
    found = copy_across(source, torch.empty_like(source, device="cpu"), ready_event(source.device))
    assert bool((found == 1).all())
