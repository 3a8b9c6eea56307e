"""What goes wrong says where, and leaves either nothing touched or a step completed in memory."""

import copy
import errno
import os
import time

import numpy as np
import pytest
import torch
from optim_runs import assert_same, give_gradients, parameters, train
from torch import nn

from penstock import (
    ChecksumError,
    ClosedError,
    ConfigError,
    NoSpaceError,
    PenstockWarning,
    TransferError,
)
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.optim import FlashAdamW, on_flash
from penstock.optim.config import StatesConfig
from penstock.store import FaultyTier, LoggedTier
from penstock.testing.faults import Fail, FaultySyscalls
from penstock.testing.shared_engine import shared_engine_replaced


@pytest.fixture
def faulty():
    """System calls of the engine of the next optimizer; a test sets ``_every`` or ``_faults``."""
    calls = FaultySyscalls()
    with shared_engine_replaced(ThreadEngine(syscalls=calls)):
        yield calls


def test_a_full_disk_at_construction_says_what_would_fit(small, monkeypatch):
    monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda path: 65536)
    params = parameters()
    with pytest.raises(
        NoSpaceError,
        match=r"(?s)65536 bytes\).* are needed there, .*are free; .*what is free would do for",
    ):
        FlashAdamW(params, **small)
    monkeypatch.undo()
    FlashAdamW(params, **small).close()


def test_a_full_disk_in_mid_step_is_completed_in_memory(small, faulty):
    ours, theirs = parameters(), parameters()
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
    faulty._every = Fail(errno.ENOSPC)
    give_gradients(ours, 0)
    with pytest.warns(PenstockWarning, match="stay in memory"):
        a.step()
    faulty._every = None
    train(b, theirs, steps=1)
    train(a, ours, steps=3, first=1)
    train(b, theirs, steps=3, first=1)
    assert_same(ours, theirs)
    a.close()


def test_a_step_that_cannot_be_made_durable_says_so_and_the_next_one_is(small, faulty):
    ours, theirs = parameters(), parameters()
    a = FlashAdamW(ours, durable=True, host_memory="1GiB", **small)  # nothing is read
    b = torch.optim.AdamW(theirs, fused=True)
    train(a, ours, steps=1)
    faulty._every = Fail(errno.EIO)
    give_gradients(ours, 1)
    with pytest.raises(TransferError, match="write of"):
        a.step()
    faulty._every = None
    train(a, ours, steps=1, first=2)
    train(b, theirs, steps=3)
    assert_same(ours, theirs)
    a.close()
    again = parameters()
    c = FlashAdamW(again, durable=True, **small)
    assert c.resume() == 3
    assert_same(again, theirs)
    c.close()


def test_a_record_that_cannot_be_read_stops_the_optimizer_until_states_are_loaded(small, faulty):
    ours, theirs = parameters(), parameters()
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
    train(a, ours, steps=2)
    train(b, theirs, steps=2)
    weights = [p.detach().clone() for p in ours]
    saved = a.state_dict()
    faulty._every = Fail(errno.EIO)
    give_gradients(ours, 2)
    with pytest.raises(TransferError, match="read of"):
        a.step()
    faulty._every = None
    with pytest.raises(ClosedError, match="load weights and a state dict"):
        a.step()
    with torch.no_grad():
        for p, w in zip(ours, weights, strict=True):
            p.copy_(w)
    a.load_state_dict(saved)
    train(a, ours, steps=2, first=2)
    train(b, theirs, steps=2, first=2)
    assert_same(ours, theirs)
    a.close()


def test_bytes_that_changed_on_flash_are_found(small, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", "full")
    params = parameters(sizes=[(20, 1024)])
    a = FlashAdamW(params, **small)
    train(a, params, steps=2)
    files = next(iter(a._penstock.store._places.values())).files
    descriptor = os.open(f"/proc/self/fd/{files[0].fd}", os.O_WRONLY)
    for offset in range(0, 20 * 8192, 8192):
        os.pwrite(descriptor, b"?", offset + 5)
    os.close(descriptor)
    give_gradients(params, 2)
    with pytest.raises(ChecksumError, match=r"tile \d+ \(parameters 0 of group 0 .*offset \d+ of"):
        a.step()
    a.close()


def with_wrapper(small, wrap):
    """An optimizer whose records go through a wrapper of tiers, and its parameters."""
    params = parameters()
    optimizer = FlashAdamW(params, **small)
    records = optimizer._penstock.store
    records.tier = wrap(records.tier)
    return optimizer, params


def test_a_wrapper_of_tiers_sees_every_record_and_changes_no_bit(small):
    log = []
    a, ours = with_wrapper(small, lambda tier: LoggedTier(tier, log))
    theirs = parameters()
    train(a, ours)
    train(torch.optim.AdamW(theirs, fused=True), theirs)
    assert_same(ours, theirs)
    records = a._penstock.store
    for what, moved in (("write", records.written), ("read", records.read)):
        assert moved == sum(entry.nbytes for entry in log if entry.what == what) > 0
    a.close()
    assert log[-1].what == "close"


def test_a_tier_that_returns_other_bytes_is_found_out(small, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", "full")
    a, params = with_wrapper(
        small, lambda tier: FaultyTier(tier, fail_at=3, mode="corrupt", times=None)
    )
    with pytest.raises(ChecksumError, match=r"tile \d+ \(parameters "):
        train(a, params)
    a.close()


def test_a_tier_that_refuses_a_write_leaves_the_record_in_memory(small):
    a, ours = with_wrapper(small, lambda tier: FaultyTier(tier, fail_at={"write": 2}, mode="raise"))
    theirs = parameters()
    give_gradients(ours, 0)
    with pytest.warns(PenstockWarning, match="stay in memory"):
        a.step()
    train(a, ours, steps=3, first=1)
    train(torch.optim.AdamW(theirs, fused=True), theirs, steps=4)
    assert_same(ours, theirs)
    a.close()


def test_a_parameter_that_is_not_what_it_was_is_refused_before_anything_is_touched(small):
    params = parameters()
    a = FlashAdamW(params, **small)
    train(a, params, steps=1)
    before = [p.detach().clone() for p in params]
    params[2].grad = None
    params[2].data = torch.zeros(300)
    with pytest.raises(ConfigError, match=r"was shape \(257,\).*now \(300,\)"):
        a.step()
    params[2].data = before[2].clone()
    assert_same(params, before)
    give_gradients(params, 1)
    a.step()
    a.close()


def test_a_visitor_waits_for_a_slow_read(small):
    """All records are on flash and none is being written: nothing else wakes it."""

    class Slow(Syscalls):
        def read(self, file, address, nbytes, offset):
            time.sleep(0.02)
            return super().read(file, address, nbytes, offset)

    ours, theirs = parameters(), parameters()
    with shared_engine_replaced(ThreadEngine(syscalls=Slow())):
        a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
        for step in range(2):
            train(a, ours, steps=1, first=step)
            train(b, theirs, steps=1, first=step)
            a.rest()
        assert_same(ours, theirs)
        a.close()


def test_frozen_and_thawed_parameters(small):
    ours, theirs = parameters(), parameters()
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
    for optimizer, params in ((a, ours), (b, theirs)):
        for step in range(4):
            params[1].requires_grad_(step % 2 == 1)
            give_gradients(params, step, skip=() if step % 2 else (1,))
            optimizer.step()
    assert_same(ours, theirs)
    a.close()


def test_what_cannot_be_on_flash_is_refused_with_the_reason(small):
    class Lamb(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * p.norm() / p.grad.norm())

    with pytest.raises(ConfigError, match="Lamb is not element-wise"):
        on_flash(Lamb(parameters()), **small)
    with pytest.raises(ConfigError, match="not element-wise"):
        on_flash(torch.optim.Adafactor(parameters()), **small)
    with pytest.raises(ConfigError, match="LBFGS"):
        on_flash(torch.optim.LBFGS(parameters()), **small)
    with pytest.raises(ConfigError, match="capturable"):
        on_flash(torch.optim.Adam(parameters(), capturable=True), **small)
    with pytest.raises(ConfigError, match="gaps or overlaps"):
        FlashAdamW([nn.Parameter(torch.zeros(8, 8)[:, :4])], **small)
    with pytest.raises(ConfigError, match="real floats"):
        FlashAdamW([nn.Parameter(torch.zeros(8, dtype=torch.complex64))], **small)
    scheduled = torch.optim.AdamW(parameters())
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    with pytest.raises(ConfigError, match="before making the scheduler"):
        on_flash(scheduled, **small)


@pytest.mark.parametrize("more", [{}, {"gradient_memory": 0}])
def test_sparse_gradients_are_refused(small, more):
    table = nn.Embedding(10, 4, sparse=True)
    a = FlashAdamW(table.parameters(), **small, **more)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        a.step()
    a.close()


def test_it_is_closed_once_and_not_copied(small):
    params = parameters()
    a = FlashAdamW(params, **small)
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(a)
    a.close()
    a.close()
    give_gradients(params, 0)
    with pytest.raises(ClosedError):
        a.step()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"flash": ()}, "needs a directory"),
        ({"flash": "/does/not/exist"}, "create it"),
        ({"flash": "/dev/shm"}, "in memory"),
        ({"tile": 1000}, "multiple of 256"),
        ({"tile": "1MiB"}, "tile='1MiB' must be an integer, 1 or more"),
        ({"tile": None}, "tile=None must be an integer, 1 or more"),
        ({"accumulation": True}, "accumulation=True must be an integer, 1 or more"),
        ({"threads": 1.5}, r"threads=1\.5 must be an integer, 1 or more"),
        ({"format": "int4"}, "none of"),
        ({"accumulation": 2}, "only with overlap"),
        ({"clip_norm": 0.0}, "more than 0"),
        ({"host_memory": "2G"}, "ambiguous"),
    ],
)
def test_settings_that_make_no_sense(settings, words, small):
    with pytest.raises(ConfigError, match=words):
        FlashAdamW(parameters(), **{**small, **settings})


def test_integers_of_numpy_are_integers(small):
    given = {"tile": np.int64(1 << 20), "accumulation": np.int64(2), "overlap": True}
    found = StatesConfig(**{**small, **given})
    assert (found.tile, found.accumulation) == (1 << 20, 2)
    assert type(found.tile) is int


def test_several_directories_hold_a_record_together(small):
    ours, theirs = parameters(), parameters()
    folders = [small["flash"] / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    a = FlashAdamW(ours, **{**small, "flash": tuple(folders)})
    b = torch.optim.AdamW(theirs, fused=True)
    train(a, ours)
    train(b, theirs)
    assert_same(ours, theirs)
    a.close()


def test_wear_is_told_and_warned_of(small, caplog):
    params = parameters(sizes=[(64, 1024)])
    a = FlashAdamW(params, tbw="1GB", planned_steps=10**6, **small)
    wear = a.wear()
    assert wear.bytes_per_step == (64 - a._penstock.pipeline.count) * 8192
    assert wear.steps_until_tbw == 10**9 // wear.bytes_per_step
    give_gradients(params, 0)
    with caplog.at_level("INFO", "penstock.optim"), pytest.warns(PenstockWarning, match="planned"):
        a.step()
    assert "steps until the 0.001 TB rated" in caplog.text
    train(a, params, steps=3, first=1)
    written = a._penstock.store.written
    train(a, params, steps=4, first=4)
    written = a._penstock.store.written - written
    a.close()  # also if the next line fails: others look at the memory of the process
    # of two threads that ask at once, one may find no buffer and have a record written for it
    assert abs(written - 4 * wear.bytes_per_step) <= 4 * 8192
