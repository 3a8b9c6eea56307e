"""The summary's account of flash: everything that was written in the session, by what wrote it."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from offload_runs import wait_for_writes, written_bytes
from penstock import checkpoint
from penstock.data import FlashDataset
from penstock.observe.clients import ON_FLASH
from penstock.optim import FlashAdamW

ROWS = 256


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(128, 128), nn.GELU())))


def step(net, optimizer, between=lambda: None):
    net(torch.randn(ROWS, 128)).square().mean().backward()
    between()
    optimizer.step()
    optimizer.zero_grad()


def by_client(summary):
    return {line.client: line.nbytes for line in summary.ssd_written}


def test_the_account_has_every_client_and_its_bytes(session_for, disk_path, monkeypatch):
    monkeypatch.setattr("penstock.optim.gradients.LEAST_BYTES", 4096)
    np.save(disk_path / "rows.npy", np.zeros((64, 32), np.float32))
    net = network()
    net.register_buffer("large", torch.zeros(1 << 20))  # so that there is something to suspend
    optimizer = FlashAdamW(
        net.parameters(), flash=disk_path, tile=1024, threads=1, gradient_memory=0, squeeze=False
    )

    def wait_for_gradients():
        """Those that ``zero_grad`` finds on their way are not written."""
        writes = optimizer._penstock.gradients._writes
        while writes:
            writes.pop().wait()

    options = {"tbw": "1TB", "weights": "flash", "weights_memory": "4MiB"}
    with session_for(net, machine=None, **options) as session:
        for _ in range(3):
            step(net, optimizer, wait_for_gradients)
        wait_for_writes(session)
        before = session.summary()
        saved = checkpoint.save(disk_path / "ours", {"model": net, "optimizer": optimizer})
        FlashDataset(disk_path / "rows.npy", rebuild=True).close()
        asleep = penstock.suspend(session)
        suspended_bytes = asleep.written_bytes
        penstock.resume(session)
        summary = session.summary()
        states = optimizer._penstock
        found = by_client(summary)
        assert found["activations"] == written_bytes(session) > 0
        assert found["gradients"] == 3 * optimizer.wear().gradient_bytes_per_step > 0
        assert found["bandwidth measurement"] > 0
        assert found["checkpoints"] >= saved.nbytes > 0
        assert found["data sets"] > 0
        assert found["weights"] > 0
        assert found["suspended jobs"] >= suspended_bytes > 0
    assert found["optimizer states"] >= states.store.written > 0
    assert by_client(before)["optimizer states"] <= states.store.written
    assert "checkpoints" not in by_client(before)
    assert set(found) == set(ON_FLASH.values())
    assert summary.ssd_written_bytes == sum(found.values())
    assert summary.tbw_share == summary.ssd_written_bytes / 1e12
    per_step = sum(line.nbytes for line in summary.ssd_written if line.is_per_step)
    assert summary.steps_to_wear_out == 3 * 10**12 // per_step
    assert per_step < summary.ssd_written_bytes
    text = str(summary)
    for client in found:
        assert client in text
    document = json.loads(json.dumps(summary.to_json()))
    assert {line["client"]: line["nbytes"] for line in document["ssd_written"]} == found
    optimizer.close()


def test_what_is_written_outside_of_the_session_is_not_its(session_for, disk_path):
    net = network()
    optimizer = FlashAdamW(net.parameters(), flash=disk_path, tile=1024, threads=1)
    step(net, optimizer)
    with session_for(net) as session:
        pass
    step(net, optimizer)
    assert optimizer._penstock.store.written > 0
    assert session.summary().ssd_written_bytes == 0
    optimizer.close()


@pytest.mark.parametrize("accumulated", [1, 3])
def test_per_step_is_an_optimizer_step_in_every_table(session_for, accumulated):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with session_for(net) as session:
        for _ in range(6):
            for _ in range(accumulated):
                net(torch.randn(ROWS, 128)).square().mean().backward()
            optimizer.step()
        wait_for_writes(session)
        summary = session.summary()
    assert summary.steps == 6
    lines = {line.what: line for line in summary.prediction.lines}
    foreseen = session.planner.foreseen
    assert foreseen.passes == 1
    assert lines["flash written"].predicted == accumulated * foreseen.flash_written_bytes
    assert lines["forward and backward"].predicted == pytest.approx(
        accumulated * foreseen.step_ns / 1e9
    )
    text = str(summary)
    assert text.count("per step") == 0
    assert "per optimizer step" in text
