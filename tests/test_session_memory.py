"""What a session remembers does not grow with the number of steps."""

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from offload_runs import gradients, same_bits
from penstock.core.units import MIB
from penstock.observe.timeline import MAX_BURSTS
from penstock.runtime import planner

STEPS = MAX_BURSTS
"""Busy times forget half of their bursts at a time: after so many steps they hold as many as before."""


def train(model, optimizer, steps):
    batch = torch.ones(4, 8)
    for _ in range(steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def blocks():
    """Blocks of memory that the interpreter has allocated: exact, whatever the allocator keeps."""
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.parametrize("logged", [False, True])
def test_steps_leave_nothing_behind(session_for, tmp_path, monkeypatch, logged):
    monkeypatch.setenv("PENSTOCK_EVENT_MEMORY", "64KiB")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    log = tmp_path / "events.jsonl" if logged else None
    with session_for(
        model, optimizer, policy="auto", event_log=log, event_log_size="64KiB", event_log_files=2
    ) as session:
        train(model, optimizer, STEPS + 100)  # by now all that is bounded is full
        assert log is None or session.recorder.log.flush()
        before = blocks()
        train(model, optimizer, STEPS)
        assert log is None or session.recorder.log.flush()
        grown = blocks() - before
        assert session.summary().steps == 2 * STEPS + 100
    assert grown < STEPS / 4  # one object a step would be all of them
    if log is not None:
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 256 << 10


def test_forwards_before_any_backward_leave_nothing_behind(session_for):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    batch = torch.ones(4, 8)

    def forwards(count):
        with torch.no_grad():
            for _ in range(count):
                model(batch)

    with session_for(model, policy="auto"):
        forwards(20)
        before = blocks()
        forwards(200)
        grown = blocks() - before
        assert grown < 100  # one object a forward would be 200


def test_sizes_that_change_with_each_step_are_not_remembered_for_ever(session_for, monkeypatch):
    monkeypatch.setattr(planner, "MAX_KEPT_KEYS", 40)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with session_for(model, policy="auto", device_memory="8MiB") as session:
        for rows in range(100, 300):
            batch = torch.ones(rows, 64)
            with session.paused():
                expected = gradients(model(batch).square().mean(), model.parameters())
            found = gradients(model(batch).square().mean(), model.parameters())
            assert all(map(same_bits, found, expected))
            assert len(session.executor.orders.kept) <= 40
    assert session.planner.replans < 20


LONG = """
import sys, torch, penstock
from torch import nn

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def train(steps):
    for _ in range(steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

torch.set_num_threads(1)
model, batch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.ones(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
settings = {"device_memory": "16MiB", "flash": sys.argv[1], "flash_capacity": "64MiB"}
with penstock.offload(model, optimizer, **settings):
    train(1_000)
    before = resident_bytes()
    train(99_000)
    print(resident_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_100_000_steps_end_within_5_mib_of_where_step_1_000_was(disk_path):
    done = subprocess.run(
        [sys.executable, "-c", LONG, str(disk_path)],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 5 * MIB
