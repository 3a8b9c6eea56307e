"""One limit of memory for weights on flash, saved tensors and the buffers of an optimizer."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

import forked
import penstock
import preloaded
from offload_runs import session_in
from penstock import ConfigError
from penstock.core.memory import ProcessMemory
from penstock.core.units import MIB
from penstock.io.mapping import PAGE_BYTES
from penstock.observe.events import StallCause
from penstock.plan.machine import Machine
from penstock.runtime.memory_division import MemoryDivision
from penstock.runtime.memory_limit import MemoryLimit
from penstock.store.account import host_account
from penstock.store.heap import Heap
from weights_rig import Chain, bits, built, flash_adamw, inputs, scripted, train_step

WIDTH = 512
"""Of a layer, whose weight is one MiB."""
BATCH = 512
"""Each layer saves about two MiB."""


def chain():
    return built(lambda: Chain(depth=16, width=WIDTH))


def batches(steps):
    return inputs(steps, shape=(BATCH, WIDTH))


def adamw(model, directory, **options):
    return flash_adamw(model, directory, lr=1e-3, overlap=True, tile=1 << 16, **options)


def test_weights_that_fit_into_more_than_half_of_the_memory_stay(disk_path):
    """A byte of them that stays saves more than one of a saved tensor: they are served first."""
    model = chain()
    with penstock.offload(
        model, memory="26MiB", weights="flash", flash=str(disk_path), policy="all"
    ) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x in batches(2):
            train_step(model, optimizer, x)
        before = weight_reads(session)
        for x in batches(2):
            train_step(model, optimizer, x)
        assert weight_reads(session) == before == 16
        assert host_account().peak_bytes <= 26 * MIB


def weight_reads(session):
    flows = session.summary().to_json()["flows"]
    return sum(
        each["count"] for each in flows if (each["stage"], each["tier"]) == ("read", "weights")
    )


@pytest.mark.parametrize(
    ("memory", "into"),
    [
        ("11.5MiB", "heap"),
        *(("18MiB", "arena"), ("18MiB", "heap"), ("24MiB", "arena"), ("24MiB", "heap")),
    ],
)
def test_weights_give_way_to_what_a_step_cannot_do_without(disk_path, monkeypatch, memory, into):
    """An optimizer takes its buffers in the first step, when weights have most of the memory."""
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", into)
    plain, model = chain(), chain()
    optimizer = adamw(plain, disk_path, host_memory="7MiB")
    expected = [train_step(plain, optimizer, x) for x in batches(3)]
    optimizer.close()
    optimizer = adamw(model, disk_path, host_memory="7MiB")
    with penstock.offload(model, optimizer, memory=memory, weights="flash", flash=str(disk_path)):
        host_account().reset_peak()  # the bandwidth is measured in more than the least limit
        assert [train_step(model, optimizer, x) for x in batches(3)] == expected
        assert host_account().peak_bytes <= host_account().limit_bytes
    optimizer.close()
    assert all(map(torch.equal, map(bits, plain.parameters()), map(bits, model.parameters())))


@pytest.mark.parametrize("changed", [False, True])
def test_no_more_weights_leave_the_heap_than_others_need(disk_path, monkeypatch, changed):
    """Nor do more leave later, when others have got what they waited for."""
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", "heap")
    model, buffers = chain(), Heap(owner="buffers")
    with (
        penstock.offload(
            model, memory="24MiB", weights="flash", flash=str(disk_path), policy="all"
        ) as session,
        torch.no_grad(),
    ):
        model(torch.ones(1, WIDTH))
        if changed:
            for layer in model.layers:
                layer.weight.mul_(0.5)
        weights = session._weights.account
        before, each = weights.used_bytes, MIB + PAGE_BYTES
        assert before >= 8 * each
        host_account().limit_bytes -= host_account().free_bytes
        block = buffers.allocate(7 * MIB // 2)
        assert block is not None
        assert before - weights.used_bytes == 4 * each
        for _ in range(2):
            model(torch.ones(1, WIDTH))
        assert before - weights.used_bytes <= 4 * each
        block.free()


@pytest.mark.parametrize("into", ["arena", "heap"])
def test_others_give_way_to_a_weight_that_is_needed(disk_path, monkeypatch, into):
    """Saved tensors, for example, that were there first: the limit is kept."""
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", into)
    model, memory = chain(), host_account()
    with (
        penstock.offload(
            model, memory="24MiB", weights="flash", flash=str(disk_path), policy="all"
        ) as session,
        torch.no_grad(),
    ):
        memory.reset_peak()
        saved = memory.child("others")
        held = memory.free_bytes
        assert saved.try_take(held, "others")
        saved.yield_by(lambda nbytes: saved.free(min(nbytes, saved.used_bytes), "others"))
        model(torch.ones(1, WIDTH))
        assert 0 < saved.used_bytes < held
        assert session._weights.forced == 0
        assert memory.peak_bytes <= 24 * MIB
        saved.close()


SLOW = Machine("slow flash", 1e12, 1e12, 1e-9, 20e6, 20e6)


def on_slow_flash(disk_path, model):
    """A session with too little memory for all weights, and a flash that binds."""
    settings = {"weights": "flash", "memory": "18MiB", "floor": "64KiB"}
    return session_in(
        disk_path, model, machine=SLOW, policy="auto", flash_capacity=None, **settings
    )


def reads_of_last_step(disk_path):
    """Weights read in the last of some steps that save four MiB."""
    model = chain()
    with on_slow_flash(disk_path, model) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        before = 0
        for x in inputs(4, shape=(64, WIDTH)):
            before = weight_reads(session)
            train_step(model, optimizer, x)
        host = host_account()
        assert host.used_bytes <= host.limit_bytes
        return weight_reads(session) - before


def test_what_saved_tensors_do_not_need_in_a_step_goes_to_weights(disk_path, monkeypatch):
    divided = reads_of_last_step(disk_path)
    monkeypatch.setattr(MemoryDivision, "weights_bytes", lambda *_: None)
    assert divided < reads_of_last_step(disk_path)


def test_a_step_that_saves_more_than_those_before_is_given_it_by_weights(disk_path):
    """Replays know the steps that were; a larger one is no reason to fail."""
    plain, model = chain(), chain()
    sizes = [64, 64, 64, 1024, 64]
    expected = [step_of(plain, size) for size in sizes]
    with on_slow_flash(disk_path, model) as session:
        assert [step_of(model, size) for size in sizes] == expected
        assert host_account().peak_bytes <= 18 * MIB
        assert session.recorder.snapshot().counted("budget.overflow") == 0
    assert all(map(torch.equal, map(bits, plain.parameters()), map(bits, model.parameters())))


def step_of(model, batch):
    [x] = inputs(1, shape=(batch, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return train_step(model, optimizer, x)


def test_waits_for_weights_are_stalls_and_not_computing(disk_path):
    """So that plans are made for the time that computing takes."""
    model = chain()
    with (
        scripted() as engine,
        penstock.offload(
            model, weights="flash", memory="12MiB", flash=str(disk_path), floor="64KiB"
        ) as session,
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        first, second = inputs(2, shape=(64, WIDTH))
        train_step(model, optimizer, first)
        before = session.executor.time.stalled_ns

        def let_go_later():
            engine.wait_for_held()
            time.sleep(0.5)
            engine.open()

        opener = threading.Thread(target=let_go_later)
        engine.hold("read")
        opener.start()
        train_step(model, optimizer, second)
        opener.join()
        stalls = {each.cause: each.total_ms for each in session.summary().stalls}
        assert stalls[StallCause.WEIGHTS] >= 100
        assert session.executor.time.stalled_ns - before >= 10**8


def test_the_summary_compares_with_all_that_would_be_in_memory(disk_path):
    model = chain()
    with penstock.offload(
        model, weights="flash", memory="24MiB", flash=str(disk_path), floor="64KiB"
    ) as session:
        optimizer = adamw(model, disk_path, host_memory="7MiB", gradient_memory="2MiB")
        for x in batches(2):
            train_step(model, optimizer, x)
        summary = session.summary()
    optimizer.close()
    weights, states, gradients = 16 * MIB, 2 * 16 * MIB, 14 * MIB
    moved = summary.saved_peak_bytes + weights + states + gradients
    assert summary.host.without_bytes == summary.host.rest_bytes + moved


def test_weights_that_were_in_memory_count_as_free_when_they_rest(disk_path):
    model = built(lambda: Chain(depth=16, width=2 * WIDTH))  # 64 MiB
    before = ProcessMemory().held_bytes()
    with penstock.offload(model, memory="60%", weights="flash", flash=str(disk_path)) as session:
        assert session._accounts.process._found.other_bytes < before - 40 * MIB
        assert session.planner._limit_bytes == session.budget.limit_bytes


NO_MEMORY_LEFT = """
import sys

sys.path.insert(0, sys.argv[2])
import torch

import penstock
from penstock.core.memory import UsableMemory
from penstock.core.units import MIB
from penstock.runtime import memory_limit
from weights_rig import Chain, built, train_step

held = []


def less_than_is_held(request, own, **_):
    held.append(own)
    return UsableMemory((held[0] - 8 * MIB) * 16 // 15, "a test")  # a sixteenth is left free


def train(model):
    # all that is saved is needed for the first layer, and there is one gradient
    model.requires_grad_(False).layers[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.05)
    return [train_step(model, optimizer, x) for _ in range(3)]


memory_limit.usable_memory = less_than_is_held
plain, model = (built(lambda: Chain(depth=16, width=1024)) for _ in range(2))  # 64 MiB each
x = torch.ones(768, 1024)  # a saved tensor is 3 MiB
expected = train(plain)
with penstock.offload(
    model, memory="auto", weights="flash", flash=sys.argv[1], policy="all"
) as session:
    assert session.budget.limit_bytes < 30 * MIB
    assert train(model) == expected
    print(session.recorder.snapshot().counted("budget.overflow"), "beyond the budget")
"""


def test_a_model_that_leaves_no_memory_has_what_it_frees_when_it_rests(disk_path):
    environment = os.environ | {"PENSTOCK_RESTORE_INTO": "arena"}
    words = ["-c", NO_MEMORY_LEFT, str(disk_path), str(Path(__file__).parents[1])]
    done = preloaded.run(words, env=environment)
    assert done.stdout == "0 beyond the budget\n", done.stderr


GRADIENTS_OF_A_LONG_WEIGHT = """
import sys

sys.path.insert(0, sys.argv[2])
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.core.memory import ProcessMemory, UsableMemory
from penstock.core.units import MIB
from penstock.runtime import memory_limit
from penstock.store.account import host_account
from weights_rig import Chain


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32 * 1024, 1024)  # 128 MiB
        self.chain = Chain(depth=48, width=1024).requires_grad_(False)  # 192 MiB

    def forward(self, ids):
        return functional.linear(self.chain(self.tokens(ids)), self.tokens.weight)


with penstock.built_on_flash(sys.argv[1]):
    model = Tied()
process = ProcessMemory()
usable = process.held_bytes() + 565 * MIB  # three gradients of the embedding take 384
memory_limit.usable_memory = lambda *_, **__: UsableMemory(usable, "a test")
with penstock.offload(model, memory="auto", weights="flash", flash=sys.argv[1]) as session:
    with torch.no_grad():
        model(torch.arange(32))
    before = session._weights.account.limit_bytes  # nothing is left free for gradients without autograd
    if sys.argv[3] == "early":
        session.step()
    model(torch.arange(32)).sum().backward()
    session.step()
    after = host_account().limit_bytes
    print(before > 180 * MIB, process.peak_bytes() < usable, after > 100 * MIB)
"""


@pytest.mark.parametrize("step", ["early", "late"])
def test_the_first_step_has_room_for_gradients_of_a_weight_that_is_used_twice(disk_path, step):
    words = ["-c", GRADIENTS_OF_A_LONG_WEIGHT, str(disk_path), str(Path(__file__).parents[1])]
    done = preloaded.run([*words, step])
    assert done.stdout == "True True True\n", done.stderr


INFERENCE_AND_TRAINING = """
import sys

sys.path.insert(0, sys.argv[2])
import torch

import penstock
from penstock.core.memory import ProcessMemory, UsableMemory
from penstock.core.units import MIB
from penstock.runtime import memory_limit
from weights_rig import Chain, train_step

with penstock.built_on_flash(sys.argv[1]):
    model = Chain(depth=64, width=1024)  # 256 MiB
torch.ones(64, 64) @ torch.ones(64, 64)
torch.set_flush_denormal(True)  # or backward takes a minute
process = ProcessMemory()
usable = process.held_bytes() + 480 * MIB
memory_limit.usable_memory = lambda *_, **__: UsableMemory(usable, "a test")
model.requires_grad_(False).layers[0].requires_grad_(True)
optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.05)


def reads():
    flows = session.summary().to_json()["flows"]
    return sum(each["count"] for each in flows if each["tier"] == "weights")


with penstock.offload(model, memory="auto", weights="flash", flash=sys.argv[1]) as session:
    print("half", session._weights.account.limit_bytes < 200 * MIB)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(8, 1024))
        before = reads()
        for _ in range(3):
            model(torch.ones(8, 1024))
        print("reads", before > 64, reads() - before < 16)
        held = torch.ones(120 * MIB // 4)  # what the program holds is left to it
        model(torch.ones(8, 1024))
        print("held", session._weights.account.used_bytes < 0.75 * (480 - 120) * MIB)
        del held
    for _ in range(2):
        train_step(model, optimizer, torch.ones(1024, 1024))
    print("trained", process.peak_bytes() < usable)
"""


def test_in_inference_no_half_is_left_to_a_step(disk_path):
    words = ["-c", INFERENCE_AND_TRAINING, str(disk_path), str(Path(__file__).parents[1])]
    done = preloaded.run(words, env=dict(os.environ))
    assert done.stdout == "half True\nreads True True\nheld True\ntrained True\n", done.stderr


def test_inference_finds_limits_also_after_training_that_could_not_begin(disk_path):
    model, looks = chain(), []
    with penstock.offload(model, memory="auto", weights="flash", flash=str(disk_path)) as session:
        session._weights.before_training = lambda _: 1 / 0
        session._weights.in_inference = looks.append
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, WIDTH))
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        assert looks[-1]


def test_a_forked_child_finds_no_limits(disk_path):
    model = chain()
    with penstock.offload(model, memory="auto", weights="flash", flash=str(disk_path)) as session:

        def looks(found):
            session._weights.in_inference = found.append
            with torch.no_grad():
                torch.nn.ReLU()(torch.ones(1))
            return found

        assert looks([]) == [False, True]
        child, reader = forked.in_a_child(lambda: str(looks([])))
        with open(reader) as file:
            assert file.read() == "[]"
        os.waitpid(child, 0)


def test_a_session_that_is_interrupted_when_it_is_nearly_open_is_closed(disk_path, monkeypatch):
    model = chain()

    def interrupt(*_):
        raise KeyboardInterrupt

    settings = {"memory": "24MiB", "weights": "flash", "flash": str(disk_path)}
    with monkeypatch.context() as interrupted:
        interrupted.setattr(MemoryLimit, "begin_again", interrupt)
        with pytest.raises(KeyboardInterrupt):
            penstock.offload(model, **settings).open()
    model(torch.ones(1, WIDTH)).sum().backward()
    with penstock.offload(model, **settings):
        model(torch.ones(1, WIDTH))


def test_a_limit_is_needed(disk_path):
    with pytest.raises(ConfigError, match="needs a limit of the weights in memory"):
        penstock.offload(chain(), weights="flash", flash=str(disk_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory": "1GiB"}, "the model is on the CPU, and its weights are in host memory"),
        ({}, "needs host memory for the weights"),
    ],
)
def test_weights_of_a_model_on_the_host_are_in_host_memory_already(options, message):
    with pytest.raises(ConfigError, match=message):
        penstock.offload(chain(), weights="host", **options)
