"""Durable steps: a new process goes on after the last completed one."""

import os
import signal
import textwrap

import pytest
import torch
from optim_runs import assert_same, parameters, train

import preloaded
from penstock import ChecksumError, ConfigError
from penstock.optim import FlashAdamW

FORMATS = [("exact", torch.float32), ("exact", torch.bfloat16), ("split", torch.bfloat16),
           ("int8", torch.bfloat16)]  # fmt: skip


@pytest.mark.parametrize(("format_name", "dtype"), FORMATS)
def test_a_run_goes_on_after_its_last_step(format_name, dtype, small):
    settings = {**small, "format": format_name, "durable": True}
    ours, theirs = parameters(dtype), parameters(dtype)
    a = FlashAdamW(ours, **settings)
    assert a.resume() == 0
    train(a, ours, steps=3, skip=lambda step: (1,) if step == 2 else ())
    a.close()
    b = FlashAdamW(theirs, **{**settings, "flash": os.path.join(small["flash"], "..")})
    reference = parameters(dtype)
    b.close()
    again = FlashAdamW(reference, **settings)
    assert again.resume() == 3
    assert_same(reference, ours)
    train(again, reference, steps=3, first=3)
    again.close()
    whole = FlashAdamW(theirs, **{**small, "format": format_name})
    train(whole, theirs, steps=6, skip=lambda step: (1,) if step == 2 else ())
    assert_same(reference, theirs)
    whole.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_step_that_was_under_way_is_known_and_said(overlap, small, caplog):
    def said():
        found, where = [each.getMessage() for each in caplog.records], repr(str(small["flash"]))
        caplog.clear()
        return [each.replace(where, "DIR") for each in found if each.startswith("durable")]

    caplog.set_level("INFO", "penstock.optim")
    settings = {**small, "durable": True, "overlap": overlap}
    params = parameters()
    a = FlashAdamW(params, **settings)
    assert (a.resume(), a.torn_step) == (0, None)
    assert said() == [
        "durable steps of AdamW in DIR: there is no step to resume after; training begins anew"
    ]
    train(a, params, steps=2)
    saved = a.state_dict()
    train(a, params, steps=2, first=2)
    assert a.torn_step is None  # it is about the run before
    a.close()
    b = FlashAdamW(params, **settings)
    assert (b.resume(), b.torn_step) == (4, None)
    assert said() == ["durable steps of AdamW in DIR: resumed after step 4; no later one had begun"]

    def lost(entry):
        raise KeyboardInterrupt

    b._penstock._journal.write = lost
    with pytest.raises(KeyboardInterrupt):
        train(b, params, steps=1, first=4)
    b.close()
    c = FlashAdamW(params, **settings)
    caplog.set_level("WARNING", "penstock.optim")  # what is seen without any setting
    assert (c.resume(), c.torn_step) == (4, 5)
    assert said() == ["durable steps of AdamW in DIR: step 5 was torn; resumed after step 4"]
    c.load_state_dict(saved)  # a later serial number, but an earlier step
    c.close()
    d = FlashAdamW(params, **settings)
    assert (d.resume(), d.torn_step) == (2, None)
    d.close()
    with open(os.path.join(small["flash"], "penstock-states.begun"), "wb") as file:
        file.write(b"7")
    e = FlashAdamW(params, **settings)
    assert e.torn_step is None
    e.close()


def test_what_an_earlier_run_left_is_not_overwritten_by_accident(small):
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=1)
    with pytest.raises(ConfigError, match="is in use by"):
        FlashAdamW(parameters(), durable=True, **small)
    a.close()
    b = FlashAdamW(parameters(), durable=True, **small)
    with pytest.raises(ConfigError, match=r"call resume\(\)"):
        train(b, b.param_groups[0]["params"], steps=1)
    b.close()
    c = FlashAdamW(parameters(sizes=[(11, 3)]), durable=True, **small)
    with pytest.raises(ConfigError, match="another model"):
        c.resume()
    c.close()


def first_bytes(count):
    return lambda data: data[:count]


def another_step(data):
    """Well-formed, but not what was written: only the checksum can tell."""
    assert data.count(b'"step\\": 3') == 1
    return data.replace(b'"step\\": 3', b'"step\\": 7')


@pytest.mark.parametrize(
    "torn", [first_bytes(0), first_bytes(10), another_step], ids=["empty", "short", "other"]
)
def test_a_torn_journal_leaves_the_step_before(torn, small):
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=2)
    before = [p.detach().clone() for p in params]
    train(a, params, steps=1, first=2)
    a.close()
    newest = max(small["flash"].glob("*.journal"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(torn(newest.read_bytes()))
    after = parameters()
    b = FlashAdamW(after, durable=True, **small)
    assert b.resume() == 2
    assert_same(after, before)
    b.close()


def test_a_record_that_changed_between_two_runs_is_found(small, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", "full")
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=2)
    a.close()
    (slab,) = small["flash"].glob("*.slab")
    found = bytearray(slab.read_bytes())
    found[5::4096] = bytes(byte ^ 1 for byte in found[5::4096])
    slab.write_bytes(found)
    b = FlashAdamW(parameters(), durable=True, **small)
    with pytest.raises(
        ChecksumError, match=r"tile \d+ \(parameters .*offset \d+ of .*durable step"
    ):
        b.resume()
    b.close()


PROGRAM = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
from optim_runs import parameters, train
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.optim import FlashAdamW, journal
from penstock.store.engine import replace_shared_engine

left = int(sys.argv[2])
def tick():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

class Deadly(Syscalls):
    def write(self, file, address, nbytes, offset):
        tick()
        return super().write(file, address, nbytes, offset)

replace_shared_engine(ThreadEngine(syscalls=Deadly()))
for name in ("ftruncate", "pwrite", "fsync", "fdatasync"):
    def wrapped(*args, _call=getattr(os, name)):
        tick()
        return _call(*args)
    setattr(os, name, wrapped)
torch.set_num_threads(1)
params = parameters()
a = FlashAdamW(params, flash=sys.argv[1], tile=4096, durable=True)
for step in range(4):
    train(a, params, steps=1, first=step)
    print(step + 1, flush=True)
"""


_LATER = [pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 6, 7, 9, 13, 16)]


@pytest.mark.parametrize("when", [8, *_LATER])
def test_a_run_that_is_killed_anywhere_goes_on_after_its_last_completed_step(when, small):
    program = textwrap.dedent(PROGRAM).format(tests=os.path.dirname(__file__))
    done = preloaded.run(["-c", program, small["flash"], str(when)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    completed = len(done.stdout.split())
    theirs, ours = parameters(), parameters()
    train(torch.optim.AdamW(theirs, fused=True), theirs, steps=5)
    a = FlashAdamW(ours, **{**small, "tile": 4096}, durable=True)
    resumed = a.resume()
    assert resumed in (completed, completed + 1)
    train(a, ours, steps=5 - resumed, first=resumed)
    assert_same(ours, theirs)
    a.close()
