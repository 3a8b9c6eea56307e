"""Metrics are floats under names that stay, of the last step, and cost no plan."""

import pytest
import torch

from offload_runs import session_in
from penstock.core.errors import ClosedError

NAMES = {
    "penstock/step_s",
    "penstock/stall_s",
    "penstock/copied_out_bytes",
    "penstock/copied_in_bytes",
    "penstock/flash_written_bytes",
    "penstock/flash_read_bytes",
    "penstock/flash_written_total_bytes",
    "penstock/device_peak_bytes",
}


def test_metrics_are_those_of_the_last_step(disk_path, small_knobs):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    session = session_in(disk_path, model, device_memory="300KiB", floor="8KiB")
    with pytest.raises(ClosedError):
        session.metrics()
    with session:
        seen = [session.metrics()]
        for _ in range(3):
            model(torch.randn(64, 256)).square().mean().backward()
            session.step()
            seen.append(session.metrics())
    assert all(set(each) >= NAMES for each in seen[1:])
    assert all(type(value) is float for each in seen for value in each.values())
    steps = [each.totals for each in session.recorder.steps()]
    for found, totals in zip(seen[1:], steps, strict=True):
        assert found["penstock/step_s"] == totals.elapsed_ns / 1e9
    written = [each["penstock/flash_written_total_bytes"] for each in seen]
    for k in (2, 3):
        assert seen[k]["penstock/flash_written_bytes"] == written[k] - written[k - 1] > 0
    assert 0 < seen[-1]["penstock/device_peak_bytes"] <= 300 * 1024
