"""`penstock run --state DIR`: a suspended run survives its process, and goes on to the same bits."""

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import preloaded
from offload_runs import session_in
from penstock.checkpoint import Checkpointer, training_state
from penstock.checkpoint.listeners import listeners
from penstock.core.errors import CheckpointError, ConfigError, SuspendError
from penstock.runtime.rank_store import RankStore
from penstock.session import Session
from penstock.swap.resume_record import ResumeFile, ResumeRecord
from penstock.swap.signals import StepSuspender

SCRIPT = """
import os, sys, time, torch
from penstock.checkpoint import Checkpointer, training_state
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)), torch.nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters())
checkpoints = Checkpointer("run") if "own" in sys.argv else None
first = 0
if checkpoints:
    resumed = checkpoints.load(training_state(model=model, optimizer=optimizer))
    first = resumed["step"] if resumed else 0
for step in range(first, 8):
    while step == 4 and not os.path.exists("go"):
        time.sleep(0.01)
    optimizer.zero_grad(set_to_none=False)
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    print(step, flush=True)
    if checkpoints and checkpoints.due(step + 1):
        checkpoints.save(step + 1, training_state(model=model, optimizer=optimizer, step=step + 1))
print("sum", sum(float(each.detach().double().sum()) for each in model.parameters()), flush=True)
"""


@contextmanager
def started(folder, *options, words=()):
    """Under ``penstock run``; it waits before its fifth step until there is a file ``go``."""
    (folder / "spill").mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    command = [preloaded.PENSTOCK_COMMAND, "run", "--flash", "spill", *options, "script.py", *words]
    pipe = subprocess.PIPE
    process = preloaded.Process(command, bare=True, stdout=pipe, stderr=pipe, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "first"), [(("own",), 5), pytest.param((), 0, marks=pytest.mark.slow)]
)
def test_killed_in_its_sleep_it_goes_on_to_the_same_bits(
    disk_path, monkeypatch, capsys, one_thread, *, words, first
):
    with started(disk_path, "--state", "kept", words=words) as process:
        assert [process.stdout.readline() for _ in range(4)] == ["0\n", "1\n", "2\n", "3\n"]
        process.send_signal(signal.SIGUSR1)
        (disk_path / "go").touch()
        told = next(line for line in process.stderr if "suspended process" in line)
        assert re.search(r"MiB on flash", told)
        process.kill()
    with started(disk_path, "--state", "kept", "--resume", words=words) as process:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "resumed" in error
    assert not (disk_path / "kept/run.json").exists()  # it has ended
    shutil.rmtree(disk_path / "run", ignore_errors=True)
    whole = plainly(disk_path, monkeypatch, capsys)
    assert out.splitlines() == whole[first:]


def plainly(folder, monkeypatch, capsys):
    """What the script prints without all this."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["script.py"])
    exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out.splitlines()


# -- in one process -------------------------------------------------------------------------------


@pytest.fixture
def keeper_for(disk_path):
    """``keeper_for(resume=..., words=...)``, and what it tells."""
    (disk_path / "script.py").write_text("steps = 3\n")
    lines = []

    def make(*, resume=False, words=("script.py",)):
        script = str(disk_path / "script.py")
        record = ResumeFile(str(disk_path / "kept"), words=list(words), script=script)
        return ResumeRecord(record, resume=resume, tell=lines.append)

    make.lines = lines
    yield make
    listeners.clear()


def training(disk_path, keeper, *, steps, seed=0, sleep_at=None, checkpoints=None):
    """Trains; sleeps for a moment where it is told to. Returns the weights."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (disk_path / "spill").mkdir(exist_ok=True)
    with session_in(disk_path / "spill", model, optimizer) as session:
        sleeper = StepSuspender(session, tell=keeper_lines.append, record=keeper)
        first = 0
        if checkpoints is not None:
            resumed = checkpoints.load(training_state(model=model, optimizer=optimizer))
            first = 0 if resumed is None else resumed["step"]
        for step in range(first, steps):
            optimizer.zero_grad()
            if step == sleep_at:
                sleeper.signals.asked = True
                wake_when_asleep(session, sleeper)
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            if checkpoints is not None and checkpoints.due(step + 1):
                state = training_state(model=model, optimizer=optimizer, step=step + 1)
                checkpoints.save(step + 1, state, wait=False)
    return model.weight.detach().clone()


keeper_lines = []


def wake_when_asleep(session, sleeper):
    """Instead of a signal: it looks often whether it is to sleep on."""
    looked = []

    class Woken(StepSuspender):
        @property
        def _is_to_sleep(self):
            looked.append(session.suspended is not None)
            return not any(looked)

    sleeper.__class__ = Woken


@pytest.fixture(autouse=True)
def quiet():
    keeper_lines.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_steps_done_again_are_compared_to_the_last_bit(disk_path, keeper_for):
    expected = training(disk_path, keeper_for(), steps=5, sleep_at=2)
    listeners.clear()
    again = training(disk_path, keeper_for(resume=True), steps=5)
    assert torch.equal(again, expected)
    assert any(
        "3 steps were repeated, and all bits are the same" in each for each in keeper_for.lines
    )
    listeners.clear()
    with pytest.raises(SuspendError, match=r"of \d+ parts differ from .* not deterministic"):
        training(disk_path, keeper_for(resume=True), steps=5, seed=1)


def test_one_that_sleeps_and_is_killed_while_it_does_steps_again_is_compared_all_the_same(
    disk_path, keeper_for
):
    """A manager puts it to sleep at each end of a turn; what it is to be the same as is the first run."""
    expected = training(disk_path, keeper_for(), steps=5, sleep_at=3)
    listeners.clear()
    training(disk_path, keeper_for(resume=True), steps=2, seed=1, sleep_at=1)
    assert any("suspended process" in line for line in keeper_lines)
    listeners.clear()
    with pytest.raises(SuspendError, match=r"after 4 steps .* differ from"):
        training(disk_path, keeper_for(resume=True), steps=5, seed=1)
    listeners.clear()
    again = training(disk_path, keeper_for(resume=True), steps=5)
    assert torch.equal(again, expected)


def test_a_script_with_a_checkpointer_saves_and_sleeps_then(disk_path, keeper_for):
    with Checkpointer(disk_path / "run") as checkpoints:
        keeper = keeper_for()
        keeper.opened()
        expected = training(disk_path, keeper, steps=5, sleep_at=2, checkpoints=checkpoints)
        assert [each.step for each in checkpoints.checkpoints()] == [3]
        assert any("suspended process" in line for line in keeper_lines)
        listeners.clear()
        again = training(disk_path, keeper_for(resume=True), steps=5, checkpoints=checkpoints)
        assert torch.equal(again, expected)
        listeners.clear()
        with pytest.raises(SuspendError, match="has not loaded its checkpoint"):
            training(disk_path, keeper_for(resume=True), steps=5)


@pytest.mark.parametrize("keep", [1, 9])
def test_one_that_was_woken_and_went_on_is_resumed_from_what_it_saved_since(
    disk_path, keeper_for, keep
):
    """Else a job that computes by itself for long cannot be resumed when its machine is restarted."""
    with Checkpointer(disk_path / "run", every=1, keep=keep) as checkpoints:
        keeper = keeper_for()
        keeper.opened()
        training(disk_path, keeper, steps=5, sleep_at=2, checkpoints=checkpoints)
        checkpoints.wait()
        assert (disk_path / "run/step-000000000003").exists() == (keep > 1)  # that it slept with
        listeners.clear()
        again = training(disk_path, keeper_for(resume=True), steps=7, checkpoints=checkpoints)
    assert any("step-000000000005', saved since" in each for each in keeper_for.lines)
    listeners.clear()
    assert torch.equal(again, training(disk_path, None, steps=7))


def test_one_that_saves_without_asking_due_is_not_called_random(disk_path, keeper_for):
    """It slept without a checkpoint, and now goes on from an older one: its steps count otherwise."""
    expected = torch.ones(3)
    with Checkpointer(disk_path / "run") as checkpoints:
        checkpoints.save(1, {"weight": expected})
        keeper = keeper_for()
        training(disk_path, keeper, steps=5, sleep_at=2)
        listeners.clear()
        keeper = keeper_for(resume=True)
        checkpoints.load()
        with pytest.raises(SuspendError, match=r"continued from '.*step-0+1', .* due\(\)"):
            training(disk_path, keeper, steps=5, seed=1)


def test_what_was_deleted_by_hand_is_said(disk_path, keeper_for):
    with Checkpointer(disk_path / "run") as checkpoints:
        keeper = keeper_for()
        keeper.opened()
        training(disk_path, keeper, steps=5, sleep_at=2, checkpoints=checkpoints)
        shutil.rmtree(disk_path / "run/step-000000000003")
    with pytest.raises(CheckpointError, match=r"step-000000000003', which is damaged or missing"):
        keeper_for(resume=True)
    os.unlink(disk_path / "kept/run.json")
    with pytest.raises(ConfigError, match="does not exist: this run was never suspended"):
        keeper_for(resume=True)


def test_another_run_or_script_is_refused(disk_path, keeper_for):
    training(disk_path, keeper_for(), steps=3, sleep_at=1)
    with pytest.raises(ConfigError, match="has another script and arguments"):
        keeper_for(resume=True, words=("script.py", "--other"))
    (disk_path / "script.py").write_text("steps = 4\n")
    with pytest.raises(
        ConfigError, match=r"the script has changed since, .* or remove .*run\.json"
    ):
        keeper_for(resume=True)
    (disk_path / "kept/run.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        keeper_for(resume=True)


def test_a_record_that_is_damaged_is_refused(disk_path, keeper_for):
    training(disk_path, keeper_for(), steps=3, sleep_at=1)
    path = disk_path / "kept/run.json"
    good = json.loads(path.read_text())
    for change in ({"kind": "checkpoint"}, {"steps": "x"}, {"digests": 5}, {"digests": [["a", 1]]}):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ConfigError, match="is damaged, or of another version"):
            keeper_for(resume=True)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        keeper_for(resume=True)


def test_a_run_that_ends_before_it_was_compared_says_so(disk_path, keeper_for):
    training(disk_path, keeper_for(), steps=5, sleep_at=3)
    listeners.clear()
    keeper = keeper_for(resume=True)
    training(disk_path, keeper, steps=2)
    keeper.finish(0)
    assert any("has ended before step 4" in each for each in keeper_for.lines), keeper_for.lines
    assert (disk_path / "kept/run.json").exists()


def test_another_checkpoint_than_the_one_it_slept_with_is_refused(disk_path, keeper_for):
    with Checkpointer(disk_path / "run") as checkpoints:
        keeper = keeper_for()
        keeper.opened()
        training(disk_path, keeper, steps=5, sleep_at=2, checkpoints=checkpoints)
    listeners.clear()
    keeper = keeper_for(resume=True)
    keeper.loaded(str(disk_path / "pretrained/step-000000000003"))
    with pytest.raises(SuspendError, match="has not loaded its checkpoint"):
        training(disk_path, keeper, steps=5)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_directory_keeps_one_run_at_a_time(tmp_path):
    """Two runs would overwrite what the other sleeps on, and the first to end would remove it."""
    first, second = (ResumeFile(str(tmp_path), words=[], script=None) for _ in range(2))
    held = first.lock()
    with pytest.raises(ConfigError, match=r"is in use by .*; wait until that run has ended"):
        second.lock()
    if not (child := os.fork()):  # a worker of the first, which may outlive it
        os._exit(held.fd >= 0)
    assert os.waitpid(child, 0)[1] == 0
    held.close()
    second.lock().close()


def test_of_two_optimizers_of_a_kind_both_are_compared(disk_path, keeper_for):
    """As a generator and a discriminator have them: their states have the same names."""
    model = torch.nn.Linear(256, 256)
    ours = [torch.optim.SGD([each], lr=0.0, momentum=0.9) for each in model.parameters()]
    job = SimpleNamespace(modules=[("", model)], optimizers=ours)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    for each in ours:
        each.step()
    keeper_for().write(job, 1)
    listeners.clear()
    keeper_for(resume=True).step_over(job, 1)
    listeners.clear()
    ours[0].state[model.weight]["momentum_buffer"].add_(1)
    with pytest.raises(SuspendError, match=r"1 of \d+ parts .*: SGD.state.0.momentum_buffer"):
        keeper_for(resume=True).step_over(job, 1)


# -- with other ranks -----------------------------------------------------------------------------


@pytest.fixture
def ranks_of_job(monkeypatch):
    """``ranks_of_job(size)``: sessions in this process are rank 0; returns the stores of all ranks."""

    def make(size):
        store = dist.HashStore()
        ranks = [RankStore(store, number, size, session=0) for number in range(size)]
        monkeypatch.setattr(Session, "ranks", ranks[0])
        return ranks

    return make


def test_with_other_ranks_it_sleeps_a_step_after_its_checkpoint(
    disk_path, keeper_for, ranks_of_job
):
    ranks_of_job(1)  # which agrees with itself
    with Checkpointer(disk_path / "run") as checkpoints:
        keeper = keeper_for()
        keeper.opened()
        expected = training(disk_path, keeper, steps=7, sleep_at=2, checkpoints=checkpoints)
        assert any("suspended process" in line for line in keeper_lines)
        record = json.loads((disk_path / "kept/run.json").read_text())
        assert (record["kind"], record["step"]) == ("checkpoint", 4)
        listeners.clear()
        again = training(disk_path, keeper_for(resume=True), steps=7, checkpoints=checkpoints)
        assert torch.equal(again, expected)


def test_a_rank_that_reaches_no_other_says_so_when_it_sleeps(disk_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    training(disk_path, None, steps=4, sleep_at=2)
    assert "only this rank sleeps" in keeper_lines[0]
    assert "suspended process" in keeper_lines[1]


def test_ranks_that_have_loaded_different_steps_are_refused(disk_path, keeper_for, ranks_of_job):
    with Checkpointer(disk_path / "run") as checkpoints:
        keeper = keeper_for()
        keeper.opened()
        training(disk_path, keeper, steps=5, sleep_at=2, checkpoints=checkpoints)
        listeners.clear()
        _, other = ranks_of_job(2)
        other.publish("loaded step", "2")
        with pytest.raises(SuspendError, match=r"\(rank 0: step 3, rank 1: step 2\)"):
            training(disk_path, keeper_for(resume=True), steps=5, checkpoints=checkpoints)


def test_a_rank_without_a_checkpointer_follows_the_others(disk_path, keeper_for, ranks_of_job):
    """Its steps are no more those of its record, so that is not compared."""
    training(disk_path, keeper_for(), steps=5, sleep_at=2)
    _, other = ranks_of_job(2)
    other.publish("loaded step", "7")
    listeners.clear()
    training(disk_path, keeper_for(resume=True), steps=5, seed=1)
    (told,) = keeper_for.lines
    assert "resumed with the checkpoint of step 7 that other ranks have loaded" in told
