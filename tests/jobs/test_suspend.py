"""A job is suspended between two steps: its memory goes to flash, and comes back to the last bit."""

import contextlib
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
import preloaded
from offload_runs import GatedTier, assert_nothing_held, same_bits, session_in, wait_until
from pages_resident import resident_bytes
from penstock import checkpoint
from penstock.checkpoint.api import CheckpointStore
from penstock.core.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    NoSpaceError,
    SuspendError,
    TransferError,
)
from penstock.core.units import MIB
from penstock.io import pages
from penstock.io.pages import (
    PageRange,
    PrivateMemory,
    around,
    huge_pages_within,
    whole_pages,
)
from penstock.io.threads import ThreadEngine
from penstock.optim import FlashAdamW
from penstock.store.base import Tier
from penstock.store.wrappers import FaultyTier, LoggedTier
from penstock.swap import suspend, swap_in, swap_out
from penstock.swap.recall import Recall, _Range
from penstock.swap.space import SwapSpace
from penstock.swap.state import LEAST_BYTES, SuspendableStorage, storages_of, tensors_of
from penstock.swap.write_batch import BUFFER_BYTES, BUFFERS, packed
from penstock.testing.faults import GatedSyscalls

WIDTH = 512
"""A layer's weights take 1 MiB."""


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.BatchNorm1d(WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
    )


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(64, WIDTH, generator=generator)).square().mean().backward()
    optimizer.step()


def state_of(model, optimizer):
    found = [each.detach().clone() for each in model.state_dict().values()]
    found += [each.grad.clone() for each in model.parameters()]
    for state in optimizer.state.values():
        found += [each.clone() for each in state.values() if isinstance(each, torch.Tensor)]
    return found


def assert_same(left, right):
    assert len(left) == len(right)
    assert all(same_bits(mine, theirs) for mine, theirs in zip(left, right, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda params: torch.optim.AdamW(params, fused=True, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ],
    ids=["adamw", "fused", "momentum"],
)
def test_training_goes_on_to_the_same_bits(disk_path, make):
    model = network()
    optimizer = make(model.parameters())
    for number in range(4):
        step(model, optimizer, number)
    expected = state_of(model, optimizer)

    model = network()
    optimizer = make(model.parameters())
    with session_in(disk_path, model, optimizer, device_memory=8 * MIB) as session:
        for number in range(4):
            step(model, optimizer, number)
            suspended = penstock.suspend(session)
            assert suspended.nbytes > 4 * MIB  # weights, gradients, states
            assert not suspended.stayed
            penstock.resume(session)
            assert suspended.is_restored
        assert_same(state_of(model, optimizer), expected)
    assert list(disk_path.iterdir()) == []


def test_devices_are_waited_for_before_their_memory_goes(disk_path, monkeypatch):
    """Another stream may still be at work on it."""
    asked = []
    monkeypatch.setattr(suspend, "await_devices", asked.extend)
    model = network()
    with session_in(disk_path, model) as session:
        penstock.suspend(session)
        penstock.resume(session)
    assert set(asked) == {torch.device("cpu")}


@pytest.fixture
def collected():
    """Generations that Python's garbage collector, more than eager, collects while a job is moved."""
    generations, before = [], gc.get_threshold()
    movers = {swap_out.__name__, swap_in.__name__}

    def note(phase, details):
        frame = sys._getframe()
        while frame is not None and phase == "start":
            if frame.f_globals["__name__"] in movers:
                generations.append(details["generation"])
                return
            frame = frame.f_back

    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    yield generations
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_what_training_left_to_collect_is_not_collected_meanwhile(disk_path, collected):
    """It took a fifth of a second now and then."""
    with session_in(disk_path, network()) as session:
        suspended = penstock.suspend(session)
        suspended.prefetch(suspended.nbytes)
        penstock.resume(session)
    assert collected == [1]  # what the last steps left behind, asked for
    assert gc.isenabled()


def test_who_collects_no_garbage_keeps_it_so(disk_path):
    gc.disable()
    try:
        with session_in(disk_path, network()) as session:
            penstock.suspend(session)
            penstock.resume(session)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_addresses_and_views_are_what_they_were(disk_path):
    model = network()
    weight = model[0].weight
    row, array, address = weight.detach()[7], weight.detach().numpy(), weight.data_ptr()
    expected = row.clone()
    with session_in(disk_path, model) as session:
        penstock.suspend(session)
        penstock.resume(session)
        assert weight.data_ptr() == address
        assert same_bits(row, expected)
        row.add_(1.0)
        assert same_bits(torch.from_numpy(array[7].copy()), expected + 1.0)


def test_what_is_named_besides_goes_too(disk_path):
    ours, small = torch.randn(MIB // 4), torch.randn(8)
    expected = ours.clone()
    with session_in(disk_path, torch.nn.Linear(2, 2)) as session:
        suspended = penstock.suspend(session, also=[ours, ours[5:], small])
        assert "also.0" in repr(suspended._storages)  # as a debugger shows it, or a log
        assert MIB - 2 * 4096 <= suspended.nbytes <= MIB
        assert same_bits(small, small.clone())  # it has stayed, and can be read
        penstock.resume(session)
        assert same_bits(ours, expected)


def test_it_goes_where_one_says_and_leaves_where_it_was(disk_path):
    a, b, ours = (disk_path / name for name in "abc")
    for each in (a, b, ours):
        each.mkdir()
    model = network()
    expected = [each.detach().clone() for each in model.parameters()]
    with session_in(ours, model) as session:
        for flash in ([a], [b], [a, b]):
            penstock.suspend(session, flash=flash)
            assert {Path(each).parent for each in open_below(disk_path)} - {ours} == set(flash)
            penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


def test_a_job_in_which_all_is_small_may_sleep_in_several_directories(disk_path):
    a, b = disk_path / "a", disk_path / "b"
    for each in (a, b):
        each.mkdir()
    with session_in(disk_path, torch.nn.Linear(2, 2)) as session:
        assert penstock.suspend(session, flash=[a, b]).nbytes == 0
        penstock.resume(session)


def test_states_on_flash_rest_there(disk_path):
    def trained(between):
        model = network()
        optimizer = FlashAdamW(model.parameters(), flash=disk_path, tile=1 << 14)
        with session_in(disk_path, model, optimizer) as session:
            for number in range(4):
                step(model, optimizer, number)
                between(session)
        optimizer.close()
        return [each.detach().clone() for each in model.parameters()]

    def plainly(session):
        pass

    def suspending(session):
        penstock.suspend(session)
        (optimizer,) = session.optimizers
        assert optimizer._penstock._pipeline is None  # nor is there memory for them
        penstock.resume(session)

    assert_same(trained(suspending), trained(plainly))


def test_memory_that_is_not_ours_alone_stays(disk_path, tmp_path):
    model = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    model[0].weight.data.share_memory_()
    path = tmp_path / "weights.pt"
    torch.save(model[1].weight.detach(), path)
    mapped = torch.load(path, mmap=True)
    model[1].weight.data = mapped
    with session_in(disk_path, model) as session:
        suspended = penstock.suspend(session)
        assert suspended.stayed == {
            "ModuleList.0.weight": "its memory is shared with other processes",
            "ModuleList.1.weight": "its memory is mapped from a file, or read-only",
        }
        assert suspended.nbytes <= MIB
        model[0].weight.detach().sum()  # and may be used
        model[1].weight.detach().sum()
        penstock.resume(session)


def test_a_sparse_gradient_goes_too(disk_path):
    def trained(between):
        torch.manual_seed(0)
        model = torch.nn.Embedding(4096, 64, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        with session_in(disk_path, model, optimizer) as session:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randint(0, 4096, (2048,))).square().sum().backward()
                between(session)
                optimizer.step()
        return [each.detach() for each in model.parameters()]

    def suspending(session):
        suspended = penstock.suspend(session)
        assert not suspended.stayed
        assert suspended.nbytes > 4096 * 64 * 4 + 2048 * 64 * 3  # but for pages that are not whole
        penstock.resume(session)

    assert all(map(torch.equal, trained(suspending), trained(lambda _: None)))


def test_resident_memory_goes_back_to_the_system(disk_path):
    found = program("suspended_program.py", disk_path)
    assert found["files"] == 0
    assert not found["stayed"]
    assert found["nbytes"] > 255 * MIB
    assert found["before"] - found["during"] >= 0.95 * found["nbytes"]
    assert found["after"] - found["during"] >= 0.95 * found["nbytes"]


def test_who_touches_it_meanwhile_does_not_go_on_with_wrong_numbers(disk_path):
    code = (
        "import sys, torch, penstock\n"
        "model = torch.nn.Linear(512, 512)\n"
        "with penstock.offload(model, flash=sys.argv[1]) as session:\n"
        "    penstock.suspend(session)\n"
        "    print(model.weight.sum())\n"
    )
    done = preloaded.run(["-c", code, disk_path], timeout=120)
    assert done.returncode == -signal.SIGSEGV
    assert not done.stdout


def test_a_process_may_end_while_it_is_suspended(disk_path):
    code = (
        "import atexit, sys, torch\n"
        "atexit.register(lambda: print('ended', model.weight.isfinite().all().item()))\n"
        "import penstock\n"
        "model = torch.nn.Linear(512, 512)\n"
        "session = penstock.offload(model, flash=sys.argv[1]).__enter__()\n"
        "penstock.suspend(session)\n"
        "print('suspended')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(disk_path)], capture_output=True, timeout=120, check=True
    )
    assert done.stdout == b"suspended\nended True\n"
    assert list(disk_path.iterdir()) == []


def test_leaving_the_session_brings_it_back(disk_path):
    model = network()
    expected = model[0].weight.detach().clone()
    with session_in(disk_path, model) as session:
        penstock.suspend(session)
    assert same_bits(model[0].weight.detach(), expected)


# -- what a checkpoint has ------------------------------------------------------------------------


def spill(disk_path):
    (disk_path / "spill").mkdir()
    return disk_path / "spill"


def saved(tmp_path, model, optimizer, codec=None):
    """A checkpoint of them, and what it was saved from."""
    state = {"model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path / "saved", state, codec=codec)
    return {"checkpoint": tmp_path / "saved", "state": state}


def test_memory_does_not_go_while_a_save_in_the_background_reads_it(disk_path, monkeypatch):
    """Nothing has to be written for the suspend, so it would be done before the save is."""
    gate = GatedSyscalls()
    slow = CheckpointStore(make_engine=lambda: ThreadEngine(1, syscalls=gate), block_bytes=16384)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        session_in(disk_path, model, optimizer) as session,
        checkpoint.Checkpointer(disk_path / "run", store=slow, memory="7MiB") as checkpoints,
    ):
        step(model, optimizer, 0)
        optimizer.zero_grad()
        state = {"model": model, "optimizer": optimizer}
        expected = [each.detach().clone() for each in model.parameters()]
        checkpoint.save(disk_path / "a", state)
        free_pages, saving = suspend.memory.free_pages, checkpoints.save(1, state, wait=False)

        may_write = threading.Event()

        def checked(pages):
            assert may_write.is_set()
            free_pages(pages)

        monkeypatch.setattr(suspend.memory, "free_pages", checked)
        opener = threading.Timer(0.3, lambda: [may_write.set(), gate.open()])
        opener.start()
        penstock.suspend(session, checkpoint=disk_path / "a", state=state)
        opener.join()
        penstock.resume(session)
        checkpoints.wait()
        loaded = checkpoint.load(saving.wait().path)["model"]
    assert all(same_bits(loaded[name], each) for name, each in model.named_parameters())
    assert_same([each.detach() for each in model.parameters()], expected)


@pytest.mark.parametrize("codec", [None, "exponent"])
def test_right_after_a_checkpoint_little_is_written(codec, disk_path, tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    expected = state_of(model, optimizer)
    with session_in(spill(disk_path), model, optimizer) as session:
        known = saved(tmp_path, model, optimizer, codec)
        suspended = penstock.suspend(session, **known)
        assert suspended.nbytes > 7 * MIB  # of two layers weights, gradients and two moments
        assert suspended.written_bytes <= 2 * MIB  # the gradients, which no checkpoint has
        assert session.space.tier.spec.capacity_bytes < suspended.nbytes
        assert suspended.prefetch(suspended.nbytes) == suspended.written_bytes
        shutil.rmtree(known["checkpoint"])  # as retention does
        penstock.resume(session)
        assert_same(state_of(model, optimizer), expected)


@pytest.mark.parametrize("codec", [None, "exponent"])
def test_what_has_changed_since_is_written(codec, disk_path, tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    with session_in(spill(disk_path), model, optimizer) as session:
        known = saved(tmp_path, model, optimizer, codec)
        step(model, optimizer, 1)
        expected = state_of(model, optimizer)
        suspended = penstock.suspend(session, **known)
        assert suspended.written_bytes == suspended.nbytes
        penstock.resume(session)
        assert_same(state_of(model, optimizer), expected)


def test_a_checkpoint_that_is_damaged_meanwhile_is_not_believed(disk_path, tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    expected = state_of(model, optimizer)
    with session_in(spill(disk_path), model, optimizer) as session:
        known = saved(tmp_path, model, optimizer)
        penstock.suspend(session, **known)
        file = max(known["checkpoint"].glob("*.safetensors"), key=lambda one: one.stat().st_size)
        content = file.read_bytes()
        broken = bytearray(content)
        broken[len(broken) // 2] ^= 1
        file.write_bytes(broken)
        with pytest.raises(SuspendError, match="could not be restored"):
            penstock.resume(session)
        file.write_bytes(content)
        penstock.resume(session)
        assert_same(state_of(model, optimizer), expected)


@pytest.mark.parametrize(
    "part",
    [lambda x: x[:300], lambda x: x[300:], lambda x: x.t()],
    ids=["head", "tail", "turned"],
)
def test_what_a_checkpoint_has_in_part_or_in_another_order_is_written(disk_path, tmp_path, part):
    ours = torch.randn(WIDTH, WIDTH)
    expected, state = ours.clone(), {"ours": part(ours)}
    with session_in(spill(disk_path), torch.nn.Linear(2, 2)) as session:
        checkpoint.save(tmp_path / "saved", state)
        suspended = penstock.suspend(
            session, also=[ours], checkpoint=tmp_path / "saved", state=state
        )
        assert suspended.written_bytes == suspended.nbytes > 0
        penstock.resume(session)
        assert same_bits(ours, expected)


def test_files_of_a_checkpoint_are_closed_when_nobody_needs_them(disk_path, tmp_path):
    model = network()
    with session_in(spill(disk_path), model) as session:
        known = saved(tmp_path, model, torch.optim.AdamW(model.parameters()))
        penstock.suspend(session, **known)
        assert open_below(tmp_path / "saved")
        penstock.resume(session)
        assert not open_below(tmp_path / "saved")
        with pytest.raises(ConfigError, match="does not exist"):
            penstock.suspend(session, flash=tmp_path / "no", **known)
        with pytest.raises(CheckpointError):
            penstock.suspend(session, checkpoint=known["checkpoint"], state={"model": object()})
        assert not open_below(tmp_path / "saved")
        assert session.suspended is None


def open_below(folder):
    """Descriptors of it, and of files in it."""
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [each for each in links if each.startswith(str(folder))]


def test_what_could_not_be_read_is_tried_again_though_the_checkpoint_is_gone(
    disk_path, tmp_path, monkeypatch
):
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    expected = [each.detach().clone() for each in model.parameters()]
    real, asked = Recall.restore, []

    def refused_once(recall, held):
        asked.append(held)
        if len(asked) == 1:
            raise TransferError(errno=5, op="read", path="", offset_bytes=0, nbytes=0)
        real(recall, held)

    with session_in(spill(disk_path), model) as session:
        store = CheckpointStore(file_bytes=MIB)
        monkeypatch.setattr("penstock.swap.recall.unchanged", store.unchanged)
        store.save(tmp_path / "saved", {"model": model})
        penstock.suspend(session, checkpoint=tmp_path / "saved", state={"model": model})
        shutil.rmtree(tmp_path / "saved")
        monkeypatch.setattr(Recall, "restore", refused_once)
        with pytest.raises(SuspendError, match=r"1 of 3 tensors"):
            penstock.resume(session)
        penstock.resume(session)
        assert_same([each.detach() for each in model.parameters()], expected)


def test_a_checkpoint_that_is_not_there_is_said(disk_path, tmp_path):
    model = network()
    with session_in(disk_path, model) as session:
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            penstock.suspend(session, checkpoint=tmp_path / "no", state={"model": model})
        assert session.suspended is None
        model[0].weight.detach().sum()


# -- what goes wrong ------------------------------------------------------------------------------


def large():
    """A layer of 9 MiB, in the midst of which there are whole pages of 2 MiB."""
    return torch.nn.Linear(1536, 1536, bias=False)


def faulty(**faults):
    def wrap(tier):
        return FaultyTier(tier, **faults) if tier.spec.name == "suspended" else tier

    return wrap


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("mode", ["raise", "settle"])
def test_a_write_that_fails_leaves_everything_as_it_was(disk_path, at, mode):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    expected = state_of(model, optimizer)
    wrap = faulty(fail_at={"write": at}, mode=mode, times=1)
    with session_in(disk_path, model, optimizer, wrap_tier=wrap) as session:
        with pytest.raises(TransferError):
            penstock.suspend(session)
        assert session.suspended is None
        assert_same(state_of(model, optimizer), expected)
        penstock.resume(session)  # nothing to do
        step(model, optimizer, 1)
        assert_nothing_held(session)
    assert list(disk_path.iterdir()) == []


def test_after_a_write_that_failed_the_space_of_all_others_is_free_again(disk_path):
    def wrap(tier):
        if tier.spec.name != "suspended":
            return tier
        slow = FaultyTier(tier, fail_at={"write": 1}, mode="delay", delay_s=0.3, times=None)
        return FaultyTier(slow, fail_at={"write": 0}, mode="settle")

    model = torch.nn.Sequential(*(network() for _ in range(4)))
    expected = [each.detach().clone() for each in model.parameters()]
    with session_in(disk_path, model, wrap_tier=wrap) as session:
        with pytest.raises(TransferError):
            penstock.suspend(session)
        assert session.space.tier.held_bytes == 0
        penstock.suspend(session)
        penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


class FirstGated(GatedTier):
    """Only the first operation waits at the gate: the huge pages of a large tensor, if it writes."""

    def _hold(self, kind, inner, keep_alive):
        if self.arrived[kind].is_set():
            return inner
        return super()._hold(kind, inner, keep_alive)


@pytest.mark.parametrize("gated", [GatedTier, FirstGated])
def test_memory_is_held_until_all_of_it_is_written(disk_path, gated):
    gates, held = [], []

    def wrap(tier):
        if tier.spec.name == "suspended":
            tier = gated(tier, "write")
            gates.append(tier)
        return tier

    def open_later():
        wait_until(lambda: gates and gates[0].arrived["write"].is_set(), "it is being written")
        for _ in range(10):  # as long as it could be freed
            time.sleep(0.01)
            held.append(all(map(PrivateMemory().holds, ours)))
        gates[0].open("write")

    model = torch.nn.Linear(1536, 1536)
    ours = [whole_pages(model.weight.data_ptr(), model.weight.nbytes)]
    expected = [each.detach().clone() for each in model.parameters()]
    with session_in(disk_path, model, wrap_tier=wrap) as session:
        opener = threading.Thread(target=open_later)
        opener.start()
        penstock.suspend(session)
        opener.join()
        assert all(held)
        assert not any(map(PrivateMemory().holds, ours))
        penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


@pytest.mark.parametrize("mode", ["settle", "corrupt"])
def test_a_read_that_fails_is_named_and_can_be_tried_again(disk_path, mode):
    model = torch.nn.Sequential(large(), torch.nn.Linear(WIDTH, WIDTH))
    expected = [each.detach().clone() for each in model.parameters()]
    wrap = faulty(fail_at={"read": 0}, mode=mode, times=1)
    with session_in(disk_path, model, wrap_tier=wrap) as session:
        suspended = penstock.suspend(session)
        with pytest.raises(SuspendError, match=r"1 of 2 tensors .* Sequential\.0\.weight"):
            penstock.resume(session)
        assert not suspended.is_restored
        assert session.suspended is suspended
        assert same_bits(model[1].weight.detach(), expected[1])  # it is back, and may change
        model[1].weight.detach().add_(1.0)
        expected[1] += 1.0
        penstock.resume(session)
        suspended.resume()
        assert_same([each.detach() for each in model.parameters()], expected)


def test_every_byte_is_checked_whatever_is_said_of_what_is_spilled(disk_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", "off")
    model = large()
    expected = model.weight.detach().clone()
    with session_in(disk_path, model) as session:
        suspended = penstock.suspend(session)
        piece = suspended._batches[0].ticket.place.pieces[0]
        place = piece.offset_bytes + piece.nbytes // 3
        file = os.open(f"/proc/self/fd/{piece.file.fd}", os.O_RDWR)
        byte = os.pread(file, 1, place)
        os.pwrite(file, bytes([byte[0] ^ 1]), place)
        with pytest.raises(SuspendError, match="have checksum"):
            penstock.resume(session)
        os.pwrite(file, byte, place)
        os.close(file)
        penstock.resume(session)
    assert same_bits(model.weight.detach(), expected)


@pytest.mark.parametrize("mode", ["settle", "corrupt"])
def test_small_ones_that_went_together_stay_together_if_their_read_fails(disk_path, mode):
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    expected = [each.detach().clone() for each in model.parameters()]
    wrap = faulty(fail_at={"read": 1}, mode=mode, times=1)
    with session_in(disk_path, model, wrap_tier=wrap) as session:
        suspended = penstock.suspend(session)
        assert len(suspended._batches) == 3  # of 2 MiB; 2 of 1 MiB fit in one, less a page each
        with pytest.raises(SuspendError, match=r"3 of 6 tensors .* Sequential\.2\.weight"):
            penstock.resume(session)
        there = [each.restored for each in suspended._storages]
        assert there == [True, True, False, False, False, True]
        assert [PrivateMemory().holds(each.held.pages) for each in suspended._storages] == there
        penstock.resume(session)
        assert_same([each.detach() for each in model.parameters()], expected)


@pytest.mark.parametrize("layer", [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(1536, 1536)])
@pytest.mark.parametrize("refused", ["mprotect", "madvise"])
def test_memory_that_the_system_does_not_let_go_stays_as_it_was(
    disk_path, monkeypatch, refused, layer
):
    """As where a process would have too many mappings; what was dropped by then would be lost."""
    model = torch.nn.Sequential(layer, torch.nn.Linear(WIDTH, WIDTH))
    expected = [each.detach().clone() for each in model.parameters()]
    real = getattr(pages._libc, refused)
    first = whole_pages(model[0].weight.data_ptr(), model[0].weight.nbytes)

    def call(address, nbytes, argument):
        closes = argument in (0, 4)  # PROT_NONE, MADV_DONTNEED
        is_first = first.address <= address < first.address + first.nbytes
        return -1 if closes and is_first else real(address, nbytes, argument)

    with session_in(disk_path, model) as session:
        monkeypatch.setattr(pages._libc, refused, call)
        suspended = penstock.suspend(session)
        monkeypatch.setattr(pages._libc, refused, real)
        assert list(suspended.stayed) == ["Sequential.0.weight"]
        assert suspended.prefetch(2 * first.nbytes) == suspended.nbytes < 2 * MIB
        assert same_bits(model[0].weight.detach(), expected[0])
        model[0].weight.detach().add_(1.0)
        expected[0] += 1.0
        penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


def test_memory_that_cannot_be_opened_is_named_and_can_be_tried_again(disk_path, monkeypatch):
    model = network()
    expected = [each.detach().clone() for each in model.parameters()]
    real = pages._libc.mprotect
    with session_in(disk_path, model) as session:
        penstock.suspend(session)
        refuse = iter([-1])
        monkeypatch.setattr(pages._libc, "mprotect", lambda *words: next(refuse, 0) or real(*words))
        with pytest.raises(SuspendError, match=r"1 of \d+ .* Sequential\.0\.weight"):
            penstock.resume(session)
        penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


def test_what_cannot_be_fetched_ahead_comes_with_the_rest(disk_path, monkeypatch):
    """The reads before it went on into memory that the next ones were to fill."""
    model = network()
    expected = [each.detach().clone() for each in model.parameters()]
    real = swap_in.memory.unprotect_for_refill
    with session_in(disk_path, model) as session:
        suspended = penstock.suspend(session)
        opened = []

        def refuse(which):
            opened.append(which)
            if len(opened) == 2:
                raise TransferError(errno=12, op="mprotect", path="", offset_bytes=0, nbytes=0)
            real(which)

        monkeypatch.setattr(swap_in.memory, "unprotect_for_refill", refuse)
        assert suspended.prefetch(suspended.nbytes) == suspended.nbytes - opened[1].nbytes
        penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


@pytest.mark.parametrize("count", [1, 12], ids=["one batch", "more than there are buffers"])
def test_what_cannot_be_asked_for_stays_closed(disk_path, monkeypatch, count):
    """It was left open, and full of zeros."""
    model = torch.nn.Sequential(*(network() for _ in range(count)))
    expected = [each.detach().clone() for each in model.parameters()]
    with session_in(disk_path, model) as session:
        suspended = penstock.suspend(session)
        held = [each.held.pages for each in suspended._storages]

        def refuse(*_, **__):
            raise ClosedError("not now")

        with monkeypatch.context() as patched:
            patched.setattr(suspended._tier, "read", refuse)
            with pytest.raises(SuspendError, match="not now"):
                penstock.resume(session)
        private = PrivateMemory()
        assert not any(private.holds(each) for each in held)
        penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


@pytest.mark.parametrize("which", [[large, network], [network] * 3], ids=["large", "small"])
def test_after_ctrl_c_in_a_resume_all_that_is_not_back_is_closed_and_takes_no_memory(
    disk_path, monkeypatch, which
):
    model = torch.nn.Sequential(*(layer() for layer in which))
    expected = [each.detach().clone() for each in model.parameters()]
    with session_in(disk_path, model) as session:
        suspended = penstock.suspend(session)
        held = [each.held.pages for each in suspended._storages]
        real, transfers = suspended._tier.read, []

        def interrupted(*words, **named):
            if transfers:
                raise KeyboardInterrupt
            transfers.append(real(*words, **named))
            return transfers[0]

        with monkeypatch.context() as patched:
            patched.setattr(suspended._tier, "read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                penstock.resume(session)
        assert transfers[0].done
        assert not any(PrivateMemory().holds(each) for each in held)
        assert not any(resident_bytes(each) for each in held)
        penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


def test_ctrl_c_while_memory_is_opened_leaves_it_closed(disk_path, monkeypatch):
    model = network()
    expected = [each.detach().clone() for each in model.parameters()]
    real = swap_in.memory.unprotect_for_refill

    def interrupted(which):
        real(which)
        raise KeyboardInterrupt

    with session_in(disk_path, model) as session:
        suspended = penstock.suspend(session)
        with monkeypatch.context() as patched:
            patched.setattr(swap_in.memory, "unprotect_for_refill", interrupted)
            with pytest.raises(KeyboardInterrupt):
                penstock.resume(session)
        assert not any(PrivateMemory().holds(each.held.pages) for each in suspended._storages)
        penstock.resume(session)
    assert_same([each.detach() for each in model.parameters()], expected)


def test_no_space_is_said_before_anything_is_written(disk_path, monkeypatch):
    model = network()
    with session_in(disk_path, model) as session:
        monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda path: 4096)
        with pytest.raises(NoSpaceError, match="4096"):
            penstock.suspend(session)
        monkeypatch.undo()
        penstock.suspend(session)
        penstock.resume(session)


def test_it_is_refused_where_it_makes_no_sense(disk_path):
    model = network()
    with session_in(disk_path, model) as session:
        penstock.suspend(session)
        with pytest.raises(ClosedError, match="already suspended"):
            penstock.suspend(session)
        penstock.resume(session)

        class Suspends(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                penstock.suspend(session)

        with pytest.raises(SuspendError, match="a backward is running"):
            Suspends.apply(torch.ones(3, requires_grad=True)).sum().backward()
    with (
        penstock.offload(model, policy="keep") as session,
        pytest.raises(ConfigError, match="no directory"),
    ):
        penstock.suspend(session)
    for call in (penstock.suspend, penstock.resume):
        with pytest.raises(SuspendError, match=r"a Sequential cannot be .*`with penstock.offload"):
            call(model)


def test_of_a_checkpoint_and_its_state_none_is_for_itself(disk_path, tmp_path):
    """Else all would be written, and nobody would know why."""
    model = network()
    checkpoint.save(tmp_path / "a", {"model": model})
    with session_in(disk_path, model) as session:
        for half in ({"checkpoint": tmp_path / "a"}, {"state": {"model": model}}):
            with pytest.raises(ConfigError, match=r"both checkpoint=.* and state=.*"):
                penstock.suspend(session, **half)
        assert session.suspended is None


def test_ctrl_c_while_small_ones_are_gathered_leaves_everything_as_it_was(disk_path, monkeypatch):
    model = torch.nn.Sequential(large(), *(network() for _ in range(3)))
    expected = [each.detach().clone() for each in model.parameters()]
    real, sent = Tier.write, []

    def interrupted(*words, **named):
        if len(sent) == 2:
            raise KeyboardInterrupt
        sent.append(real(*words, **named))
        return sent[-1]

    with session_in(disk_path, model) as session:
        with monkeypatch.context() as patched:
            patched.setattr(Tier, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                penstock.suspend(session)
        assert session.suspended is None
        assert_same([each.detach() for each in model.parameters()], expected)
        penstock.suspend(session)
        penstock.resume(session)
        assert_same([each.detach() for each in model.parameters()], expected)
        assert_nothing_held(session)


@pytest.mark.parametrize("what", ["write", "read"])
def test_after_ctrl_c_a_buffer_stays_while_a_transfer_may_use_it(disk_path, monkeypatch, what):
    model = torch.nn.Sequential(*(network() for _ in range(3)))
    expected = [each.detach().clone() for each in model.parameters()]
    real, used = getattr(Tier, what), []

    def interrupted(*words, keep_alive, **named):
        real(*words, keep_alive=keep_alive, **named)
        used.append(keep_alive)
        raise KeyboardInterrupt

    with session_in(disk_path, model) as session:
        if what == "read":
            penstock.suspend(session)
        with monkeypatch.context() as patched:
            patched.setattr(Tier, what, interrupted)
            with pytest.raises(KeyboardInterrupt):
                (penstock.suspend if what == "write" else penstock.resume)(session)
        assert PrivateMemory().holds(PageRange(used[0].address, used[0].nbytes))
        if what == "write":
            penstock.suspend(session)
        penstock.resume(session)
        assert_same([each.detach() for each in model.parameters()], expected)


def test_ctrl_c_while_memory_is_given_back_brings_back_what_has_gone(disk_path, monkeypatch):
    model = torch.nn.Sequential(*(large() for _ in range(3)))
    expected = [each.detach().clone() for each in model.parameters()]
    real, gone, log = suspend.memory.free_pages, [], []

    def interrupted(which):
        real(which)
        gone.append(which)
        raise KeyboardInterrupt

    with session_in(disk_path, model, wrap_tier=lambda tier: LoggedTier(tier, log)) as session:
        with monkeypatch.context() as patched:
            patched.setattr(suspend.memory, "free_pages", interrupted)
            with pytest.raises(KeyboardInterrupt):
                penstock.suspend(session)
        assert session.suspended is None
        assert_same([each.detach() for each in model.parameters()], expected)
        read_bytes = sum(each.nbytes for each in log if each.what == "read")
        assert read_bytes < 2 * gone[0].nbytes
        penstock.suspend(session)
        penstock.resume(session)
        assert_same([each.detach() for each in model.parameters()], expected)


def test_more_small_ones_than_there_are_buffers_for(disk_path):
    """Buffers are used again, out and back; none is overwritten before its write is over."""
    ours = [torch.randn(MIB // 4 + 999 * i) for i in range(2 * BUFFERS * BUFFER_BYTES // MIB)]
    expected = [each.clone() for each in ours]
    with session_in(disk_path, torch.nn.Linear(2, 2)) as session:
        suspended = penstock.suspend(session, also=ours)
        assert len(suspended._batches) <= 2 * BUFFERS + 1
        half = suspended.prefetch(suspended.nbytes // 2)  # to the middle of a batch
        assert suspended.nbytes // 2 - 2 * MIB < half <= suspended.nbytes // 2
        penstock.resume(session)
        assert_same(ours, expected)


@pytest.fixture
def suspended_wholly(disk_path):
    """Suspends tensors as it does those of a device; here they are the host's, treated as such."""
    with session_in(disk_path, torch.nn.Linear(2, 2)) as session, contextlib.ExitStack() as spaces:

        def begin(tensors, wrap_tier=None):
            held = [
                SuspendableStorage(name=str(i), storage=each.untyped_storage(), pages=None)
                for i, each in enumerate(tensors)
            ]
            space = SwapSpace(
                disk_path,
                capacity_bytes=SwapSpace.needed_bytes(held, disk_path),
                recorder=session.recorder,
                wrap_tier=wrap_tier,
            )
            spaces.callback(space.close)
            suspended = suspend.Suspended(
                held, tier=space.tier, stayed={}, while_writing=lambda: None
            )
            assert not any(each.storage.nbytes() for each in held)
            return suspended

        yield begin


def test_what_is_no_memory_of_the_host_goes_as_a_whole_and_has_its_bytes_again(suspended_wholly):
    tensors = [torch.randn(count) for count in (MIB // 4, 12345, MIB // 4, MIB // 4)]
    expected = [each.clone() for each in tensors]
    suspended = suspended_wholly(tensors)
    assert suspended.prefetch(suspended.nbytes) == 0
    suspended.resume()
    assert_same(tensors, expected)


def test_little_of_it_is_in_the_host_at_once(suspended_wholly, monkeypatch):
    for each in (swap_out, swap_in):
        monkeypatch.setattr(each, "STAGED_BYTES", 5 * MIB // 2)
    tensors = [torch.randn(MIB // 4) for _ in range(5)]
    expected = [each.clone() for each in tensors]
    write, read, sent, waiting, back = Tier.write, Tier.read, [], [], []

    def written(*words, **named):
        waiting.append(sum(not each.written.done for each in sent))
        sent.append(write(*words, **named))
        return sent[-1]

    def counted(*words, **named):
        back.append(sum(each.untyped_storage().nbytes() > 0 for each in tensors))
        return read(*words, **named)

    def slow(tier):
        return FaultyTier(tier, fail_at={"write": 0}, mode="delay", delay_s=0.1, times=None)

    monkeypatch.setattr(Tier, "write", written)
    monkeypatch.setattr(Tier, "read", counted)
    suspended = suspended_wholly(tensors, wrap_tier=slow)
    assert max(waiting) == 1
    suspended.resume()
    assert back == [0, 0, 1, 2, 3]
    assert_same(tensors, expected)


def test_a_device_that_is_full_is_named_and_can_be_tried_again(suspended_wholly, monkeypatch):
    tensors = [torch.randn(MIB // 4), torch.randn(12345)]
    expected = [each.clone() for each in tensors]
    suspended = suspended_wholly(tensors)
    real, asked = torch.UntypedStorage.resize_, []

    def full_once(storage, nbytes):
        asked.append(nbytes)
        if len(asked) == 1:
            raise RuntimeError("out of memory")
        return real(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full_once)
    with pytest.raises(SuspendError, match=r"1 of 2 tensors .* out of memory"):
        suspended.resume()
    suspended.resume()
    assert_same(tensors, expected)


# -- parts ----------------------------------------------------------------------------------------


def test_only_whole_pages_go():
    assert whole_pages(4096, 8192) == (4096, 8192)
    assert whole_pages(4097, 8191) == (8192, 4096)
    assert whole_pages(5000, 100)[1] == 0


PAGES = st.builds(
    PageRange,
    st.integers(1, 4000).map(lambda i: i * 4096),
    st.integers(1, 1500).map(lambda i: i * 4096),
)


@given(PAGES)
def test_huge_pages_and_what_is_around_them_are_all_there_is(pages):
    whole = huge_pages_within(pages)
    assert (whole.address % (2 * MIB), whole.nbytes % (2 * MIB)) == (0, 0) or not whole.nbytes
    rest = around(whole, pages)
    assert all(0 < each.nbytes < (2 if whole.nbytes else 4) * MIB for each in rest)
    everything = sorted(each for each in (whole, *rest) if each.nbytes)
    assert everything[0].address == pages.address
    ends = [each.address + each.nbytes for each in everything]
    assert ends == [each.address for each in everything[1:]] + [pages.address + pages.nbytes]


@given(st.lists(PAGES, max_size=12))
def test_parcels_have_every_byte_once_and_are_full_but_for_the_last(wanted):
    batches = list(packed((i, pages) for i, pages in enumerate(wanted)))
    lengths = [sum(part.pages.nbytes for part in parts) for parts in batches]
    assert all(each == BUFFER_BYTES for each in lengths[:-1])
    assert all(0 < each <= BUFFER_BYTES for each in lengths)
    for parts in batches:
        begins = itertools.accumulate((part.pages.nbytes for part in parts), initial=0)
        assert [part.offset for part in parts] == list(begins)[:-1]
    found = [(part.swapped, part.pages) for parts in batches for part in parts]
    for i, whole in enumerate(wanted):
        mine = [each for away, each in found if away == i]
        assert [each.address for each in mine] == [
            *itertools.accumulate((each.nbytes for each in mine[:-1]), initial=whole.address)
        ]
        assert sum(each.nbytes for each in mine) == whole.nbytes


@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 30), st.sets(st.integers(1, 89)))
def test_of_a_tensor_only_what_lies_in_the_pages_is_set(begin, nbytes, behind, cuts):
    length = begin + nbytes + behind
    tensor = torch.arange(1, length + 1, dtype=torch.uint8)
    target = torch.zeros(length, dtype=torch.uint8)
    region = _Range(PageRange(target.data_ptr() + begin, nbytes), length, begin)
    for start, stop in itertools.pairwise([0, *sorted(c for c in cuts if c < length), length]):
        region.copy_in(start, stop, tensor.data_ptr() + start)
    assert target[begin : begin + nbytes].equal(tensor[begin : begin + nbytes])
    assert target.count_nonzero() == nbytes


def test_the_same_storage_is_found_once_and_small_ones_stay():
    large = torch.zeros(MIB)
    private = PrivateMemory()
    assert private.holds(whole_pages(large.data_ptr(), large.nbytes))
    assert not private.holds(whole_pages(id(None) // 4096 * 4096 % 4096, 4096))
    held, stay = storages_of(
        [
            ("a", large),
            ("b", large[5:]),
            ("c", torch.zeros(LEAST_BYTES // 8).share_memory_()),
            ("d", large.view(-1, 2)),
        ]
    )
    assert [each.name for each in held] == ["a"]
    assert stay == {}


def program(name, *arguments):
    path = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, path, *map(str, arguments)], capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_a_tensor_without_data_stays():
    held, stay = storages_of([("weight", torch.empty(MIB, device="meta"))])
    assert (held, stay) == ([], {"weight": "it is on the meta device, without data"})


def test_parameters_gradients_buffers_and_nested_states_are_found():
    model, own = torch.nn.BatchNorm1d(3), torch.nn.Parameter(torch.ones(3))
    model.weight.grad, own.grad = torch.ones(3), torch.ones(3).to_sparse()
    optimizer = torch.optim.SGD([own])
    optimizer.state[own] = {"step": 1, "old": [own, (own, None)], "more": {"mean": own}}
    assert [name for name, _ in tensors_of([("net", model)], [optimizer])] == [
        *("net.weight", "net.weight.grad", "net.bias"),
        *("net.running_mean", "net.running_var", "net.num_batches_tracked"),
        *("SGD.0.0", "SGD.0.0.grad.indices", "SGD.0.0.grad.values"),
        *("SGD.state.0.old.0", "SGD.state.0.old.1.0", "SGD.state.0.more.mean"),
    ]


def test_a_sharded_tensor_goes_by_its_part_and_one_without_a_storage_stays():
    sharded = SimpleNamespace(_local_tensor=torch.zeros(MIB))  # as a DTensor has it
    held, stay = storages_of([("a", sharded), ("b", torch.eye(3).to_sparse())])
    assert ([each.name for each in held], list(stay)) == (["a"], ["b"])


def test_a_lazy_module_that_never_ran_has_nothing_to_suspend():
    held, stay = storages_of([("weight", torch.nn.LazyLinear(4).weight)])
    assert (held, list(stay)) == ([], ["weight"])
