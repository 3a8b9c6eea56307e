"""A save in the background is of one moment, whatever training does meanwhile."""

import threading
import time

import pytest
import torch
from checkpoint_runs import BLOCK, assert_same, small_store

import preloaded
from offload_runs import wait_until
from penstock import CheckpointError, PenstockWarning, TransferError
from penstock.checkpoint import Checkpointer, Saving, checkpointer
from penstock.checkpoint import background as checkpoint_background
from penstock.checkpoint.background import TensorSnapshot
from penstock.checkpoint.streams import BUFFERS_BYTES
from penstock.core.units import MIB
from penstock.io.engine import Priority
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.store.account import host_account
from penstock.store.arena import Arena
from penstock.store.engine import shared_engine
from penstock.store.flash import FlashTier
from penstock.testing.faults import Fail, FaultySyscalls, GatedSyscalls
from penstock.testing.shared_engine import shared_engine_replaced

SIZE = 600_000  # more than all buffers of a small store hold


@pytest.fixture
def gate():
    made = GatedSyscalls()
    yield made
    made.open()


def stored(path, syscalls, **settings):
    store = small_store(make_engine=lambda: ThreadEngine(1, syscalls=syscalls))
    return Checkpointer(path, store=store, **settings)


def trained(steps=1):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(SIZE)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights)
    for _ in range(steps):
        step(weights, optimizer)
    return weights, optimizer, {"weights": weights, "optimizer": optimizer}


def step(weights, optimizer):
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def snapshot(state):
    return {
        "weights": [each.detach().clone() for each in state["weights"]],
        "optimizer": [
            {key: value.clone() for key, value in each.items()}
            for each in state["optimizer"].state.values()
        ],
    }


def check(loaded, before):
    assert_same([each.detach() for each in loaded["weights"]], before["weights"])
    assert_same(list(loaded["optimizer"]["state"].values()), before["optimizer"])


def test_several_hear_of_a_step(disk_path):
    weights, optimizer, state = trained()
    heard = []
    with Checkpointer(disk_path / "a") as one, Checkpointer(disk_path / "b") as other:
        for number in (1, 2, 3):
            before = snapshot(state)
            for each in (one, other):
                each.save(number, state, wait=False)
            hook = optimizer.register_step_pre_hook(lambda *_: heard.append(1))
            step(weights, optimizer)
            hook.remove()
            for each in (one, other):
                check(each.load(), before)
    assert heard == [1] * 3
    assert not optimizer._optimizer_step_pre_hooks


def test_what_a_step_is_about_to_change_is_copied(gate, disk_path):
    weights, optimizer, state = trained()
    before = snapshot(state)
    with stored(disk_path, gate) as ours:
        saving = ours.save(1, state, wait=False)
        gate.wait_for_call()
        assert not saving.done
        for _ in range(2):
            step(weights, optimizer)
        assert not saving.done
        assert saving.copied_bytes > 0
        gate.open()
        ours.wait()
        check(ours.load(), before)
        assert ours.stats.copied_bytes == saving.copied_bytes
        assert ours.stats.stall_s >= saving.stall_s > 0
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("budget", [0, 3_000_000])
def test_a_step_waits_for_what_is_over_the_budget(budget, gate, disk_path):
    weights, optimizer, state = trained()
    before = snapshot(state)
    with stored(disk_path, gate, memory=7 * MIB + budget) as ours:
        saving = ours.save(1, state, wait=False)
        stepped = threading.Event()

        def train():
            step(weights, optimizer)
            stepped.set()

        thread = threading.Thread(target=train)
        thread.start()
        gate.wait_for_call()
        assert not stepped.is_set()
        gate.open()
        thread.join()
        assert (
            saving.copied_bytes <= budget
        )  # 6 MiB are for all else, and a small store's buffers take 1
        assert (saving.copied_bytes > 0) is (budget != 0)
        ours.wait()
        check(ours.load(), before)


class NotedEngine(ThreadEngine):
    """Notes the priorities of what is submitted."""

    def __init__(self, syscalls):
        super().__init__(1, syscalls=syscalls)
        self.priorities = []

    def submit(self, request):
        self.priorities.append(request.priority)
        return super().submit(request)


def test_a_save_beside_training_gives_way_until_training_waits_for_it(gate, disk_path):
    engine = NotedEngine(gate)
    _, _, state = trained()
    with Checkpointer(disk_path, store=small_store(make_engine=lambda: engine)) as ours:
        saving = ours.save(1, state, wait=False)
        gate.wait_for_call()
        waiter = threading.Thread(target=saving.wait)
        waiter.start()
        wait_until(lambda: saving._awaited, "the save is waited for")
        gate.open()  # all blocks that its buffers do not hold follow
        waiter.join(60)
    assert set(engine.priorities) == {Priority.BACKGROUND, Priority.PREFETCH}
    assert engine.priorities == sorted(engine.priorities, reverse=True)


def test_a_save_that_is_waited_for_does_not_give_way(disk_path):
    engine = NotedEngine(Syscalls())
    with Checkpointer(disk_path, store=small_store(make_engine=lambda: engine)) as ours:
        ours.save(1, trained()[2])
    assert set(engine.priorities) == {Priority.PREFETCH}


def test_a_demand_overtakes_a_save_in_the_same_engine(gate, disk_path):
    """One call at a time: the read comes after the call that was under way, before all other blocks."""
    source = torch.arange(4096, dtype=torch.uint8).repeat(2)
    start = -source.data_ptr() % 4096
    held = source[start : start + 4096]
    with shared_engine_replaced(ThreadEngine(1, syscalls=gate)) as engine:
        tier = FlashTier(
            disk_path,
            capacity_bytes=64 * MIB,
            engine=engine,
            recorder=Recorder(event_bytes=0),
        )
        gate.let_through()
        ticket = tier.write(held.data_ptr(), 4096, keep_alive=source, label="a")
        ticket.written.wait(60)
        with Checkpointer(disk_path / "saved", store=small_store()) as ours:
            ours.save(1, trained()[2], wait=False)
            wait_until(
                lambda: sum(call.op == "write" for call in gate.calls) == 2, "the save writes"
            )
            target = torch.empty_like(source)
            address = -(-target.data_ptr() // 4096) * 4096
            read = tier.read(ticket, address, keep_alive=target, priority=Priority.DEMAND)
            gate.let_through(2)
            read.wait(60)
            assert [call.op for call in gate.calls[1:3]] == ["write", "read"]
            gate.open()
            ours.wait()
        tier.close()


def test_what_has_been_read_is_not_copied(gate, disk_path):
    weights, optimizer, state = trained()
    with stored(disk_path, gate) as ours:
        saving = ours.save(1, state, wait=False)
        gate.let_through(8 * MIB // BLOCK)
        end = time.monotonic() + 20
        while saving._released < (3, 0) and time.monotonic() < end:
            time.sleep(0.001)
        step(weights, optimizer)
        gate.open()
        ours.wait()
        assert (
            0 < saving.copied_bytes <= 3 * SIZE * 4 + 64
        )  # of six tensors, each a file of its own


def test_what_may_change_at_any_moment_is_copied_at_once(gate, disk_path):
    buffer, other = torch.randn(SIZE), torch.randn(SIZE)
    before = [buffer.clone(), other.clone()]
    with stored(disk_path, gate) as ours:
        saving = ours.save(1, [buffer, other], wait=False)
        assert saving.copied_bytes == 8 * SIZE
        assert host_account().holdings()["checkpoint"].nbytes >= 8 * SIZE
        buffer.zero_()
        other.zero_()
        gate.open()
        assert_same(ours.load(), before)


def test_frozen_parameters_are_not_copied(gate, disk_path):
    model = torch.nn.Linear(1000, 1000).requires_grad_(False)
    with stored(disk_path, gate) as ours:
        assert ours.save(1, {"model": model}, wait=False).copied_bytes == 0
        gate.open()


def test_a_change_that_nobody_announced_fails_the_save_and_not_the_run(gate, disk_path):
    weights, _, state = trained()
    with stored(disk_path, gate) as ours:
        saving = ours.save(1, state, wait=False)
        gate.wait_for_call()
        with torch.no_grad():
            for each in weights:
                each.add_(1)
            for each in state["optimizer"].state.values():
                each["exp_avg_sq"].add_(1)
        gate.open()
        with pytest.raises(CheckpointError, match="was changed while it was being saved"):
            saving.wait()
        with pytest.warns(PenstockWarning, match="could not be saved"):
            ours.save(2, state)
        assert [each.step for each in ours.checkpoints()] == [2]
        assert (ours.stats.saves, ours.stats.failures) == (1, 1)


def test_a_step_after_a_change_that_nobody_announced_goes_on(gate, disk_path):
    weights, optimizer, state = trained()
    with stored(disk_path, gate) as ours:
        saving = ours.save(1, state, wait=False)
        gate.wait_for_call()
        with torch.no_grad():
            for each in state["optimizer"].state.values():
                each["exp_avg_sq"].add_(1)
        step(weights, optimizer)
        gate.open()
        with pytest.raises(CheckpointError, match="was changed while it was being saved"):
            saving.wait()
        ours._saving = None


def test_while_a_piece_is_copied_the_thread_that_writes_goes_on(disk_path, monkeypatch):
    """Copies may be slow, for their memory is new: nobody may wait for one but who makes it."""
    weights, optimizer, state = trained()
    before = snapshot(state)
    reads, copying = threading.Event(), threading.Event()
    copied = TensorSnapshot.copied

    def slow(self, piece, memory):
        copying.set()
        assert reads.wait(60), "a tensor is read meanwhile"
        return copied(self, piece, memory)

    def noted(self, source, piece):
        if copying.is_set():
            reads.set()
        return asked(self, source, piece)

    gate = GatedSyscalls()
    asked = Saving.reads
    monkeypatch.setattr(TensorSnapshot, "copied", slow)
    monkeypatch.setattr(Saving, "reads", noted)
    try:
        with stored(disk_path, gate) as ours:
            ours.save(1, state, wait=False)
            gate.wait_for_call()
            threading.Thread(target=lambda: copying.wait(60) and gate.open()).start()
            step(weights, optimizer)
            ours.wait()
            check(ours.load(), before)
    finally:
        gate.open()


def test_an_announced_change_is_well(gate, disk_path):
    weights, _, state = trained()
    before = snapshot(state)
    with stored(disk_path, gate) as ours:
        saving = ours.save(1, state, wait=False)
        saving.before_update()
        with torch.no_grad():
            for each in weights:
                each.zero_()
        gate.open()
        check(ours.load(), before)


def test_a_device_that_fails_is_told_and_training_goes_on(disk_path):
    weights, optimizer, state = trained()
    with stored(disk_path, FaultySyscalls({5: Fail(5)}), keep=1) as ours:
        ours.save(1, state, wait=False)
        step(weights, optimizer)
        with pytest.raises(TransferError):
            ours.wait()
        before = snapshot(state)
        ours.save(2, state, wait=False)
        step(weights, optimizer)
    with Checkpointer(disk_path) as ours:
        check(ours.load(), before)
        assert [each.step for each in ours.checkpoints()] == [2]


def test_where_no_thread_is_to_be_had_a_save_fails_and_training_goes_on(disk_path, monkeypatch):
    """The optimizer's next step waited for a thread that there was not."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

    step()
    with Checkpointer(disk_path, memory="16MiB") as ours:
        ours.save(1, {"model": model, "optimizer": optimizer})

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransferError, match=r"a thread for the save .*unavailable"):
            ours.save(2, {"model": model, "optimizer": optimizer}, wait=False)
        monkeypatch.undo()
        step()
        assert not optimizer._optimizer_step_pre_hooks
        ours.save(3, {"model": model, "optimizer": optimizer})
        assert [each.step for each in ours.checkpoints()] == [3, 1]


def test_where_no_further_thread_is_to_be_had_a_save_makes_do(disk_path, monkeypatch):
    state = trained()[2]
    with Checkpointer(disk_path, memory="16MiB") as ours:
        ours.save(1, state)
        shared_engine().start()
        start, begun = threading.Thread.start, []

        def refuse(thread):
            begun.append(thread)
            if len(begun) > 1:  # the first is ours
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            ours.save(2, state, wait=False).wait()
        assert len(begun) > 1
        check(ours.load(), snapshot(state))
        assert [each.step for each in ours.checkpoints()] == [2, 1]


@pytest.mark.parametrize("why", ["error", "refused", "limit"])
def test_where_there_is_no_memory_for_copies_the_step_waits(disk_path, monkeypatch, why):
    weights, optimizer, state = trained()
    before = snapshot(state)

    class Full(Arena):
        def allocate(self, nbytes, **_):
            if why == "refused":
                return None
            raise TransferError(errno=12, op="map", path="memory", offset_bytes=0, nbytes=nbytes)

    if why == "limit":
        memory = host_account()
        monkeypatch.setattr(memory, "limit_bytes", memory.used_bytes + BUFFERS_BYTES)
    else:
        monkeypatch.setattr(checkpoint_background, "Arena", Full)
    with stored(disk_path, FaultySyscalls(), memory="64MiB") as ours:
        saving = ours.save(1, state, wait=False)
        step(weights, optimizer)
        saving.wait()
        assert saving.copied_bytes == 0
        check(ours.load(), before)


def test_a_save_that_is_interrupted_as_it_begins_leaves_nothing_behind(disk_path, monkeypatch):
    weights, optimizer, state = trained()

    def interrupted(self, sources):
        raise KeyboardInterrupt

    with stored(disk_path, FaultySyscalls()) as ours:
        with monkeypatch.context() as patched:
            patched.setattr(Saving, "_let_change", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ours.save(1, state, wait=False)
        assert not optimizer._optimizer_step_pre_hooks
        assert "penstock-checkpoint" not in [each.name for each in threading.enumerate()]
        step(weights, optimizer)
        ours.save(2, state, wait=False)
    assert Checkpointer(disk_path).latest().step == 2


class Slow:
    """What takes long to say what is in it."""

    def __init__(self, seconds):
        self.seconds = seconds

    def state_dict(self):
        time.sleep(self.seconds)
        return {}

    def load_state_dict(self, state_dict):
        pass


def test_a_stall_is_counted_once_and_wholly(disk_path, monkeypatch):
    """What a state takes to be gathered, the wait for the save before, and what retiring takes."""
    retire = Checkpointer._retire

    def slowly(*args):
        time.sleep(0.1)
        retire(*args)

    monkeypatch.setattr(Checkpointer, "_retire", slowly)
    gate = GatedSyscalls()
    with stored(disk_path, gate) as ours:
        start = time.perf_counter()
        ours.save(1, {"slow": Slow(0.2), "x": torch.ones(9)}, wait=False)
        opened = []

        def open_gate():
            opened.append(time.perf_counter())
            gate.open()

        threading.Timer(0.2, open_gate).start()
        begun = time.perf_counter()
        ours.save(2, {"slow": Slow(0.2), "x": torch.ones(9)})
        held = time.perf_counter() - start
        waited = opened[0] - begun
        assert 0.2 + 0.2 + waited + 0.1 + 0.1 - 0.05 < ours.stats.stall_s <= held


def test_a_save_that_somebody_wants_now_and_that_fails_is_counted(disk_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "is_wanted", lambda: True)
    syscalls = FaultySyscalls({0: Fail(5)})
    with stored(disk_path, syscalls) as ours:
        with pytest.raises(TransferError):
            ours.save(1, trained()[2], wait=False)
        assert (ours.stats.saves, ours.stats.failures) == (0, 1)


PROGRAM = """
import os, sys, threading, torch
from penstock.checkpoint import Checkpointer, streams

start = threading.Thread.start

def only_before_the_end(thread):  # as from Python 3.12 on
    if not threading.main_thread().is_alive():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(thread)

threading.Thread.start = only_before_the_end

def refused(fd):
    raise OSError(5, "no such luck")

os.chdir(sys.argv[1])
for how in ("memory", "slow memory", "fails"):  # each in a process, and torch is loaded once
    if not os.fork():
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
os.dup2(os.open(how + ".err", os.O_CREAT | os.O_WRONLY), 2)
if how == "fails":
    os.fdatasync = refused
streams._DEVICE_BYTES_PER_S = 1e18 if how == "slow memory" else 1.0
weight = torch.nn.Parameter(torch.randn(4_000_000))
checkpoints = Checkpointer(how)
checkpoints.save(1, {"weight": weight}, wait=False)
"""


def test_a_save_is_done_when_the_program_ends_and_one_that_fails_is_told(disk_path):
    preloaded.run(["-c", PROGRAM, disk_path], timeout=100, check=True)
    for how in ("memory", "slow memory"):
        assert (disk_path / f"{how}.err").read_text() == ""
        with Checkpointer(disk_path / how) as checkpoints:
            assert checkpoints.load()["weight"].shape == (4_000_000,)
    told = (disk_path / "fails.err").read_text()
    assert "sync of" in told
    assert "those before it stay" in told
