"""One number for all host memory of a session: ``memory=`` as a size, a share, or found."""

import json
import os
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from offload_runs import same_bits
from penstock.checkpoint import Checkpointer
from penstock.core import memory as core_memory
from penstock.core.config import UNLIMITED
from penstock.core.errors import BudgetError
from penstock.core.memory import ProcessMemory
from penstock.core.units import MIB, format_bytes
from penstock.data import FlashDataset, FlashLoader
from penstock.io.pages import trim_heap
from penstock.observe.events import Mark
from penstock.optim import FlashAdamW
from penstock.report.run_file import read_run
from penstock.runtime.allowance import HOST_LIMIT, LEAST_SHARE_BYTES
from penstock.runtime.movers import page_slack_bytes
from penstock.runtime.stores import Stores
from penstock.store.account import host_account
from penstock.store.arena import Arena

pytestmark = pytest.mark.usefixtures("collected_account")


ROWS = 1024
SAVED_MIB = 17
"""By ``network``: 16 of a MiB, and the input."""


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU())))


def train(net, steps=3, session=None):
    torch.manual_seed(1)
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(ROWS, 256)).square().mean().backward()
        if session is not None:
            session.step()
    return net


def gradients_of(net):
    return [each.grad for each in net.parameters()]


@pytest.fixture
def plain():
    return gradients_of(train(network()))


@pytest.fixture
def others():
    """An account of another part of Penstock, empty."""
    account = host_account().child("others")
    yield account
    account.close()


@pytest.fixture
def limited_process(monkeypatch):
    """Limit the process as a control group would, so that ``nbytes`` are left beside what it holds."""

    def limit(nbytes):
        trim_heap()  # as the session does
        process = ProcessMemory()
        total = (process.held_bytes() + nbytes) * 16 // 15  # a sixteenth is left free
        process.close()
        monkeypatch.setattr(core_memory, "cgroup_limits", lambda: [])
        monkeypatch.setattr(core_memory, "memory_sizes", lambda: {"MemTotal": total})
        return total

    return limit


def test_a_size_limits_all_that_penstock_holds(session_for, plain):
    net, account = network(), host_account()
    with session_for(net, policy="auto", memory="8MiB") as session:
        train(net, session=session)
        assert account.limit_bytes == 8 * MIB
        assert account.peak_bytes <= 8 * MIB
        assert session.plan.offloaded_bytes > 0
    assert all(map(same_bits, gradients_of(net), plain))
    assert account.limit_bytes == UNLIMITED, "the session is over"
    assert not account.used_bytes


def test_limits_of_parts_are_within_it(session_for, plain):
    net = network()
    settings = {"memory": "12MiB", "device_memory": "7MiB", "host_memory": "2MiB"}
    with session_for(net, policy="auto", **settings) as session:
        assert session.budget.limit_bytes == 7 * MIB
        train(net, session=session)
        assert session.budget.peak_bytes <= 7 * MIB
        assert host_account().peak_bytes <= 12 * MIB
    assert all(map(same_bits, gradients_of(net), plain))


def test_the_host_tier_is_set_aside(session_for):
    with session_for(network(), policy="auto", memory="12MiB", host_memory="4MiB") as session:
        assert session.budget.limit_bytes == 8 * MIB


def test_saved_tensors_get_what_others_leave(session_for, others, plain):
    """What others hold at the end of a step is theirs in the next plan; the most of it counts."""
    net = network()
    with session_for(net, policy="auto", memory="16MiB") as session:
        train(net, session=session)
        assert session.budget.limit_bytes == 16 * MIB
        assert others.try_take(6 * MIB, "a buffer")
        train(net, session=session)
        assert session.budget.limit_bytes == 10 * MIB
        assert session.plan.budgets.device_bytes == 10 * MIB - page_slack_bytes(10 * MIB)
        others.free(6 * MIB, "a buffer")
        train(net, session=session)
        assert session.budget.limit_bytes == 10 * MIB, "plans do not change to and fro"
        reasons = {line.reason for line in session.summary().replans}
    assert "memory" in reasons
    assert all(map(same_bits, gradients_of(net), plain))


def test_a_session_in_which_nothing_fits_is_refused_with_what_holds_the_memory(session_for, others):
    assert others.try_take(20 * MIB, "a buffer")
    with (
        pytest.raises(BudgetError, match=r"16\.00 MiB, but .* holds 20\.00 MiB .*others 20"),
        session_for(network(), memory="16MiB"),
    ):
        pass
    assert host_account().limit_bytes == UNLIMITED
    others.free(20 * MIB, "a buffer")
    with session_for(network(), memory="16MiB"):
        pass


def test_a_share_limits_the_process(session_for, limited_process, plain):
    """Half of what is left is for saved tensors until the first pass has shown the rest."""
    total = limited_process(64 * MIB)
    net = network()
    with session_for(net, policy="auto", memory="100%") as session:
        limit = host_account().limit_bytes
        assert limit < 65 * MIB
        assert session.budget.limit_bytes == limit // 2
        assert session.budget.advisory
        assert session._codec() == "none", "their kernels would take much of what is left"
        train(net, session=session)
        assert session.budget.limit_bytes <= host_account().limit_bytes <= limit
        use = session.summary().host
    assert use.usable_bytes == total
    assert use.limit_bytes == session.budget.limit_bytes
    assert use.limit_source.startswith("memory='100%': 100% of the machine's")
    assert use.rest_bytes + use.limit_bytes + total // 16 <= total
    assert all(map(same_bits, gradients_of(net), plain))


def test_local_ranks_divide_a_share_and_the_summary_says_so(
    session_for, limited_process, monkeypatch
):
    total = limited_process(0)
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with session_for(network(), policy="auto", memory="80%") as session:
        summary = session.summary()
    assert summary.host.usable_bytes == total * 8 // 10 // 2
    assert summary.host.limit_source.endswith(", divided between 2 processes")
    assert ", divided between 2 processes; of the" in " ".join(str(summary).split())


def test_the_limit_follows_the_rest_of_the_process(session_for, limited_process):
    """As when an optimizer makes its states, or the script loads something."""
    limited_process(256 * MIB)
    net = network()
    with session_for(net, policy="auto", memory="auto") as session:
        train(net, session=session)
        before = host_account().limit_bytes
        held = bytearray(b"x") * (64 * MIB)
        session.step()
        assert 60 * MIB < before - host_account().limit_bytes < 72 * MIB
        assert session.budget.limit_bytes == host_account().limit_bytes
        del held
        session.step()
        assert before - host_account().limit_bytes > 60 * MIB, "the most that the rest has held"
    marks = [each for each in session.recorder.events() if isinstance(each, Mark)]
    found = [each.fields["limit_bytes"] for each in marks if each.name == HOST_LIMIT]
    assert found == sorted(found, reverse=True)
    assert len(found) >= 3


def test_the_limit_follows_what_others_leave_on_the_machine(
    session_for, limited_process, monkeypatch
):
    total = limited_process(512 * MIB)
    net = network()
    with session_for(net, policy="auto", memory="auto") as session:
        train(net, session=session)
        before = host_account().limit_bytes
        monkeypatch.setattr(core_memory, "memory_sizes", lambda: {"MemTotal": total - 128 * MIB})
        session._accounts.process._next_look_ns = 0  # a second later
        session.step()
        assert before - host_account().limit_bytes >= 100 * MIB


def test_nothing_fails_for_a_limit_that_was_found(session_for, limited_process, plain):
    limited_process(-64 * MIB)
    net = network()
    with session_for(net, policy="auto", memory="auto") as session:
        train(net, session=session)
        assert session.recorder.snapshot().counted("budget.refused") == 0
        assert session.budget.limit_bytes == LEAST_SHARE_BYTES
    assert all(map(same_bits, gradients_of(net), plain))


def test_the_summary_says_how_much_memory_is_saved_and_by_whom(session_for, others, disk_path):
    net, log = network(), disk_path / "events.jsonl"
    with session_for(net, policy="auto", memory="16MiB", event_log=str(log)) as session:
        assert others.try_take(6 * MIB, "a buffer")
        train(net, session=session)
        summary = session.summary()
        others.free(6 * MIB, "a buffer")
    use = summary.host
    owners = {line.owner: line for line in use.owners}
    assert owners["others"].peak_bytes == owners["others"].current_bytes == 6 * MIB
    assert owners["saved tensors"].peak_bytes <= 10 * MIB
    assert use.held_peak_bytes <= use.limit_bytes == 16 * MIB
    assert use.limit_source == "memory=16.00 MiB"
    assert use.without_bytes == use.rest_bytes + summary.saved_peak_bytes
    text = str(summary)
    for words in ("held by Penstock", "saved tensors", "others", "without Penstock, about"):
        assert words in text
    assert json.loads(json.dumps(summary.to_json()))["host"]["limit_bytes"] == 16 * MIB
    logged = read_run(log).summary.host
    assert logged.held_peak_bytes == session.summary().host.held_peak_bytes


def test_the_first_summary_says_what_to_set(session_for, others):
    """Values of ``memory``, with what other parts hold, and what the process then holds."""
    net = network()
    with session_for(net, policy="auto") as session:
        assert others.try_take(6 * MIB, "a buffer")
        train(net, session=session)
        summary = session.summary()
        others.free(6 * MIB, "a buffer")
    assert summary.suggestion.is_host
    assert summary.suggestion.others_bytes == 6 * MIB
    text = str(summary)
    for each in summary.suggestion.budgets:
        assert f"'{each.device_bytes // MIB + 6}MiB'" in text
        memory = each.device_bytes + 6 * MIB
        assert format_bytes(summary.host.rest_bytes + memory) in text  # over 1 GiB in GiB
        assert others.try_take(6 * MIB, "a buffer")
        with session_for(net, policy="auto", memory=memory) as session:
            train(net, session=session)
            assert session.summary().suggestion is None, "there is a limit"
        others.free(6 * MIB, "a buffer")


class Watch:
    """Samples what Penstock holds in this process, in a thread."""

    def __init__(self):
        self.most_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _run(self):
        account = host_account()
        while not self._over.wait(0.0005):
            self.most_bytes = max(self.most_bytes, account.used_bytes)


def test_saved_tensors_yield_to_a_buffer_in_the_middle_of_a_step(session_for, plain):
    """They fill the limit, so that it is only by moving them that a buffer can be had."""
    net, blocks, pool = network(), [], None

    def take(module, args, result):
        if not blocks:
            blocks.append(pool.allocate(4 * MIB))

    with session_for(net, policy="keep", memory="18MiB") as session, Watch() as watch:
        pool = Arena(4 * MIB, owner="others")
        train(net, 1, session)
        hook = net[-1].register_forward_hook(take)
        train(net, 3, session)
        hook.remove()
        assert blocks[0] is not None
        assert session.recorder.snapshot().counted("evicted") > 0
        assert host_account().peak_bytes <= 18 * MIB
        use = session.summary().host
        blocks[0].free()
        pool.close()
    assert watch.most_bytes <= 18 * MIB
    assert {line.owner for line in use.owners} == {"saved tensors", "others"}
    assert all(map(same_bits, gradients_of(net), plain))


def test_a_buffer_that_cannot_be_had_is_refused_and_training_goes_on(session_for, plain):
    net = network()
    with session_for(net, policy="auto", memory="12MiB") as session:
        pool = Arena(16 * MIB, owner="others")
        train(net, 1, session)
        assert pool.allocate(14 * MIB) is None
        error = pool.account.refusal(14 * MIB, "a test", "less", least_bytes=0)
        assert "memory budget of 12.00 MiB" in str(error)
        train(net, 3, session)
        pool.close()
    assert all(map(same_bits, gradients_of(net), plain))


def train_with_everything(path, name, net):
    """Some steps of an optimizer on flash, from flash, with checkpoints; return the weights."""
    rows = path / f"{name}.npy"
    np.save(rows, np.random.default_rng(0).standard_normal((4096, 256), dtype=np.float32))
    with (
        FlashLoader(FlashDataset(rows, memory="6MiB"), ROWS, seed=1) as loader,
        Checkpointer(path / f"{name}-kept", memory="26MiB") as checkpoints,
        closing(FlashAdamW(net.parameters(), flash=path, tile=1 << 14)) as optimizer,
    ):
        for step, batch in enumerate(batch for _ in range(2) for batch in loader):
            net(torch.as_tensor(batch)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                checkpoints.save(step, {"net": net}, wait=False)
    return [each.detach().clone() for each in net.parameters()]


def test_all_parts_together_stay_within_one_limit(session_for, disk_path):
    """Saved tensors, an optimizer on flash, a loader and checkpoints; the same bits as without."""
    limit = 20 * MIB
    expected = train_with_everything(disk_path, "plain", network())
    net = network()
    with session_for(net, policy="auto", memory=limit) as session, Watch() as watch:
        found = train_with_everything(disk_path, "limited", net)
        summary = session.summary()
    assert all(map(same_bits, found, expected))
    assert 0 < watch.most_bytes <= limit
    assert summary.host.held_peak_bytes <= limit
    owners = {line.owner for line in summary.host.owners}
    print(summary)
    assert {"saved tensors", "optimizer", "checkpoint"} <= owners


PROCESS = """
import sys
from pathlib import Path
import torch
from torch import nn
import penstock
from penstock.core import memory

disk, more = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(2)
net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU())))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def train(rows, steps):
    for _ in range(steps):
        net(torch.randn(rows, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

train(8, 1)  # libraries are loaded
process = memory.ProcessMemory()
group = disk / "fs" / "job"
group.mkdir(parents=True)
limit = process.held_bytes() + more
(group / "memory.max").write_text(str(limit))
(disk / "membership").write_text("0::/job")
memory.MEMBERSHIP, memory.CGROUPS = disk / "membership", disk / "fs"
with penstock.offload(net, optimizer, memory="90%", flash=disk, flash_capacity="1GiB") as session:
    train(2048, 3)
use = session.summary().host
assert use.usable_bytes == limit * 9 // 10, use
assert session.plan.offloaded_bytes, session.plan
assert use.without_bytes > use.usable_bytes, use
print(use.usable_bytes - process.peak_bytes())
"""


def test_a_process_stays_within_its_control_group(disk_path):
    """Its resident memory, as the kernel counts it; 68 MiB are saved, so without it would not."""
    command = [sys.executable, "-c", PROCESS, str(disk_path), str(96 * MIB)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 0


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_limit_is_lifted_even_if_a_tier_cannot_be_closed(tmp_path, monkeypatch, error):
    def fail(_):
        raise error("on purpose")

    net = network()
    session = penstock.offload(net, memory="8MiB", flash=tmp_path, flash_capacity="64MiB").open()
    train(net, session=session)
    close = Stores.close
    monkeypatch.setattr(Stores, "close", fail)
    with pytest.raises(error, match="on purpose"):
        session.close()
    assert host_account().limit_bytes == UNLIMITED
    assert host_account().used_by("saved tensors") == 0
    close(session._stores)


def test_memory_of_the_measurement_is_shown_but_not_needed_in_training(tmp_path):
    """Advice on ``memory`` adds what others hold while the program trains."""
    net = network()
    with penstock.offload(net, flash=tmp_path, flash_capacity="64MiB") as session:
        train(net, session=session)
        summary = session.summary()
    owners = {line.owner: line for line in summary.host.owners}
    assert owners["bandwidth measurement"].peak_bytes >= 16 * MIB
    assert owners["bandwidth measurement"].current_bytes == 0
    assert summary.suggestion.others_bytes == 0
