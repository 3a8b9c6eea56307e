"""A manager and a job talk by a file: nothing torn is believed, and both outlive each other."""

import errno
import mmap
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from offload_runs import same_bits, session_in
from penstock.core.errors import ClosedError, JobError, SuspendError, TransferError
from penstock.core.units import MIB
from penstock.io.pages import PrivateMemory
from penstock.jobs.logs import disk_is_full, last_lines, length_of, rotate
from penstock.jobs.processes import (
    Identity,
    JobProcess,
    describe_end,
    end_holders,
    held_bytes,
)
from penstock.observe.summary_text import render, to_text
from penstock.swap.channel import JobEnd, ManagerEnd, Status, start_ticks
from penstock.swap.signals import StepSuspender


@pytest.fixture
def ends(tmp_path):
    manager = ManagerEnd(str(tmp_path / "channel"))
    yield manager, JobEnd(str(tmp_path / "channel"))
    manager.close()


def test_what_one_says_the_other_hears(ends):
    manager, job = ends
    assert manager.look().pid == os.getpid()
    assert manager.status.start_ticks == start_ticks(os.getpid())
    manager.want(sleep=True, fetch_bytes=5)
    assert (job.look().sleep, job.order.fetch_bytes, job.order.number) == (True, 5, 1)
    job.tell(state="asleep", steps=7, order=1)
    assert manager.look().steps == 7
    again = ManagerEnd(manager.path)  # another manager
    assert again.status == manager.status
    assert again.order == manager.order
    again.close()
    manager.clear()
    assert manager.look() == Status()


def test_a_reason_of_any_length_and_alphabet_fits(ends):
    manager, job = ends
    job.tell(refused='"\\ü\0' * 1000)
    assert len(manager.look().refused) == 600
    assert manager.status.refused.endswith("...")


@given(place=st.integers(0, 8191), damage=st.binary(min_size=1, max_size=300))
def test_what_is_damaged_is_not_believed(tmp_path_factory, place, damage):
    path = str(tmp_path_factory.mktemp("channel") / "channel")
    manager = ManagerEnd(path)
    job = JobEnd(path)
    manager.want(sleep=True, fetch_bytes=9)
    job.tell(steps=3)
    with open(path, "r+b") as file:
        before = file.read()
        file.seek(place)
        file.write(damage[: 8192 - place])
        file.seek(0)
        same = file.read() == before
    fresh = ManagerEnd(path)
    for status in (manager.look(), fresh.status):
        assert status.steps in (0, 3)
        assert same is False or status.steps == 3
    assert job.look().sleep in (False, True)
    fresh.close()
    manager.close()


@pytest.mark.parametrize("text", [b"[]", b'{"pid": "x"}', b'{"other": 1}', b'{"pid": null}', b"{"])
def test_another_version_is_not_believed(ends, text):
    import struct
    import zlib

    manager, _ = ends
    manager.look()
    with open(manager.path, "r+b") as file:
        file.seek(4096)
        file.write(struct.pack("<II", len(text), zlib.crc32(text)) + text)
    assert manager.look().pid == os.getpid()


def test_a_file_that_was_cut_does_no_harm(ends):
    manager, job = ends
    manager.look()
    os.truncate(manager.path, 0)
    assert manager.look().pid == os.getpid()  # what was heard last
    assert not job.look().sleep
    job.tell(steps=4)
    assert manager.look().steps == 4


def test_its_space_is_its_own_before_anything_is_written(disk_path):
    """A disk that somebody else fills later must end neither side."""
    manager = ManagerEnd(str(disk_path / "channel"))
    assert os.stat(manager.path).st_blocks * 512 >= 8192
    manager.clear()
    assert os.stat(manager.path).st_blocks * 512 >= 8192
    manager.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_the_disk_refuses_ends_neither_side_and_is_said_later(ends, monkeypatch, code):
    manager, job = ends

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    manager.want(sleep=True)
    assert not job.look().sleep
    job.tell(state="asleep", steps=4)
    assert manager.look().steps == 0
    monkeypatch.setattr(os, "pread", refuse)
    assert not job.look().sleep
    monkeypatch.undo()
    manager.look()
    assert job.look().sleep
    assert manager.look().state == "asleep"


def test_a_channel_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manager = ManagerEnd(str(tmp_path / "channel"))
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(JobError, match="cannot be created: No space left"):
        manager.clear()
    manager.close()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(JobError, match="cannot be created: No space left"):
        ManagerEnd(str(tmp_path / "another"))


def test_without_a_manager_there_is_no_channel(tmp_path):
    with pytest.raises(JobError, match="created by a manager"):
        JobEnd(str(tmp_path / "no"))


def test_the_lock_says_whether_a_process_lives(ends):
    manager, _ = ends
    assert not manager.has_process()
    fd = manager.lock_for_child()
    assert manager.has_process()
    assert manager.lock_for_child() is None
    os.close(fd)
    assert not manager.has_process()


def test_a_process_that_has_just_begun_is_waited_for(tmp_path, monkeypatch):
    manager = ManagerEnd(str(tmp_path / "channel"))
    assert manager.wait_for_pid().pid == 0  # there is none
    fd = manager.lock_for_child()
    later = threading.Timer(0.2, JobEnd, [manager.path])
    later.start()
    assert manager.wait_for_pid().pid == os.getpid()
    later.join()
    manager.clear()
    monkeypatch.setattr("penstock.swap.channel._REPORT_LIMIT_S", 0.05)
    with pytest.raises(JobError, match="does not report its number"):
        manager.wait_for_pid()
    os.close(fd)
    manager.close()


# -- processes ------------------------------------------------------------------------------------


def test_a_process_is_its_number_and_its_beginning():
    me = Identity(os.getpid(), start_ticks(os.getpid()))
    assert me.lives()
    assert not Identity(me.pid, me.start_ticks + 1).lives()
    assert JobProcess.find(Identity(me.pid, me.start_ticks - 1)) is None
    assert not Identity(0, 0).lives()


def test_who_can_write_to_a_file_is_ended_and_who_reads_it_is_not(tmp_path):
    path = str(tmp_path / "channel")
    with open(path, "wb") as mine:
        writer = subprocess.Popen(["sleep", "60"], stdin=mine)
        with open(path, "rb") as file:
            reader = subprocess.Popen(["sleep", "60"], stdin=file)
        end_holders(path)
        assert writer.wait(10) == -signal.SIGKILL
        assert reader.poll() is None
        reader.kill()
        reader.wait()
    end_holders(str(tmp_path / "no"))


def test_what_a_process_holds_is_measured_from_outside():
    before = held_bytes(os.getpid())
    with mmap.mmap(-1, 64 * MIB) as memory:  # new memory, where the heap may have some left
        memory.write(b"x" * 64 * MIB)
        assert held_bytes(os.getpid()) - before >= 60 * MIB


def test_children_count_by_their_part():
    before = held_bytes(os.getpid())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        memory = bytearray(b"x") * (32 * MIB)
        os.write(writer, b"1")
        time.sleep(60)
        os._exit(len(memory) % 2)
    try:
        assert os.read(reader, 1) == b"1"
        more = held_bytes(os.getpid()) - before
        assert more >= 30 * MIB
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_ends_are_told_in_words(tmp_path):
    assert describe_end(0) == "done"
    assert describe_end(3) == "failed with exit code 3"
    assert describe_end(-9).startswith("killed by SIGKILL, perhaps out of memory")
    assert describe_end(-11) == "killed by SIGSEGV"
    assert "not known" in describe_end(None)
    (tmp_path / "log").write_bytes(b"x" * 10000 + b"\n\xff one\n\n two\n")
    assert last_lines(str(tmp_path / "log"), count=2) == ["\ufffd one", " two"]
    assert last_lines(str(tmp_path / "no")) == []
    assert last_lines(str(tmp_path / "log"), begin=10006) == [" two"]  # an earlier run's is above
    assert last_lines(str(tmp_path / "log"), begin=10**6, count=1) == [
        " two"
    ]  # it began anew since
    (tmp_path / "log").write_bytes(b"\x1b[31mred\x1b[0m \x1b]0;title\x07\rback\tx\n\x1b[2J\n")
    assert last_lines(str(tmp_path / "log")) == ["red ]0;title", "back\tx"]


def test_a_long_log_is_moved_beside_and_goes_on_at_its_beginning(tmp_path, monkeypatch):
    path = str(tmp_path / "a.log")
    assert not rotate(path, most_bytes=10)
    with open(path, "ab", buffering=0) as file:
        file.write(b"0123456789")
        assert not rotate(path, most_bytes=10)
        file.write(b"x")
        assert rotate(path, most_bytes=10)
        assert length_of(path) == 0
        file.write(b"next")
        assert (tmp_path / "a.log").read_bytes() == b"next"
        assert (tmp_path / "a.log.1").read_bytes() == b"0123456789x"
        file.write(b"y" * 100)

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("shutil.copyfile", full)
        assert rotate(path, most_bytes=10)
    assert os.listdir(tmp_path) == ["a.log"]
    assert length_of(path) == 0
    assert not disk_is_full(path)
    monkeypatch.setattr("penstock.jobs.logs.free_space_bytes", lambda path: 0)
    assert disk_is_full(path)


# -- a session that is told by a manager ----------------------------------------------------------


@pytest.fixture
def handlers():
    """As they were, in the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def trained(disk_path, one_thread, handlers):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (disk_path / "spill").mkdir()
    with session_in(disk_path / "spill", model, optimizer) as session:
        yield session, model, optimizer


def step(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    model(torch.ones(4, 512)).square().mean().backward()
    optimizer.step()


def test_the_summary_of_a_run_is_not_how_its_log_ends(trained, tmp_path):
    session, model, optimizer = trained
    step(model, optimizer)
    text = to_text(render(session.summary()))
    (tmp_path / "log").write_text(f"ValueError: wrong\n\n{text}\n")
    assert last_lines(str(tmp_path / "log")) == ["ValueError: wrong"]


def test_a_manager_puts_it_to_sleep_and_has_it_fetch_and_go_on(trained, ends):
    session, model, optimizer = trained
    manager, job = ends
    told = []
    StepSuspender(session, tell=told.append, channel=job)
    assert manager.look().state == "awake"
    step(model, optimizer)
    expected = [each.detach().clone() for each in model.parameters()]
    seen = {}

    def manage():
        until(manager, lambda status: status.state == "asleep")
        seen["asleep"] = manager.status
        manager.want(sleep=True, fetch_bytes=3 * MIB)
        until(manager, lambda status: status.fetched_bytes)
        seen["fetched"] = manager.status
        manager.want(sleep=True, fetch_bytes=0)
        until(manager, lambda status: not status.fetched_bytes)
        manager.want(sleep=True, fetch_bytes=2 * MIB)
        until(manager, lambda status: status.fetched_bytes)
        manager.want(sleep=False)

    manager.want(sleep=True)
    thread = threading.Thread(target=manage)
    thread.start()
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer)
    thread.join()
    assert all(map(same_bits, (each.detach() for each in model.parameters()), expected))
    status = manager.look()
    assert (status.state, status.sleeps, status.flash_bytes) == ("awake", 1, 0)
    assert seen["asleep"].flash_bytes >= 11.9 * MIB
    assert 2.9 * MIB < seen["fetched"].fetched_bytes <= 3 * MIB
    assert status.moved_bytes == 2 * seen["asleep"].flash_bytes
    assert "its manager wakes it" in told[0]


def test_what_cannot_come_ahead_does_not_wake_it(trained, ends, monkeypatch):
    """It would take memory that is another's now."""
    session, model, optimizer = trained
    manager, job = ends
    told, states = [], []
    StepSuspender(session, tell=told.append, channel=job)

    def refuse(*_):
        states.append(manager.look().state)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("penstock.swap.suspend.Suspended.prefetch", refuse)

    def manage():
        until(manager, lambda status: status.state == "asleep")
        manager.want(sleep=True, fetch_bytes=3 * MIB)
        until(manager, lambda _: any("not prefetched any further" in line for line in told))
        time.sleep(0.1)  # it would wake by now
        states.append(manager.look().state)
        manager.want(sleep=False)

    manager.want(sleep=True)
    thread = threading.Thread(target=manage)
    thread.start()
    step(model, optimizer)
    thread.join()
    assert states == ["asleep", "asleep"]
    assert (manager.look().state, manager.status.refused) == ("awake", "")
    assert any("not prefetched any further: can't start new thread" in line for line in told)


def test_the_space_of_a_channel_is_there_before_the_disk_is_full(ends):
    manager, _ = ends
    for change in (lambda: None, manager.clear):
        change()
        facts = os.stat(manager.path)
        assert (facts.st_size, facts.st_blocks * 512 >= 8192) == (8192, True)


def test_a_signal_does_not_put_to_sleep_what_a_manager_runs(trained, ends):
    """The manager would take it for awake, and wait for its turn to pass for ever."""
    session, model, optimizer = trained
    manager, job = ends
    told = []
    StepSuspender(session, channel=job, tell=told.append)
    signal.raise_signal(signal.SIGUSR1)
    step(model, optimizer)
    assert manager.look().state == "awake"
    assert "because this job has a manager" in told[0]


def until(manager, what):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if what(manager.look()):
            return
        time.sleep(0.005)
    raise AssertionError(manager.status)


def test_what_comes_ahead_can_go_again_and_all_comes_back(trained):
    session, model, optimizer = trained
    step(model, optimizer)
    expected = [each.detach().clone() for each in (*model.parameters(), model[0].weight.grad)]
    suspended = penstock.suspend(session)
    resident = held_bytes(os.getpid())
    assert 3.9 * MIB < suspended.prefetch(4 * MIB + 5) <= 4 * MIB
    assert held_bytes(os.getpid()) - resident >= 3.5 * MIB
    assert 0.9 * MIB < suspended.prefetch(MIB) <= MIB
    assert held_bytes(os.getpid()) - resident <= 1.5 * MIB
    assert 5.9 * MIB < suspended.prefetch(6 * MIB) <= 6 * MIB
    penstock.resume(session)
    now = [each.detach() for each in (*model.parameters(), model[0].weight.grad)]
    assert all(map(same_bits, now, expected))


def test_what_has_come_ahead_is_closed_and_not_read_again(trained, monkeypatch):
    session, model, _ = trained
    expected = [each.detach().clone() for each in model.parameters()]
    suspended = penstock.suspend(session)
    held = [each.held.pages for each in suspended._storages]
    there = suspended.prefetch(4 * MIB)
    assert not any(PrivateMemory().holds(each) for each in held)

    def refuse(*_, **__):
        raise ClosedError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(suspended._tier, "read", refuse)
        assert suspended.prefetch(there) == suspended.prefetch(6 * MIB) == there
        with pytest.raises(SuspendError, match="not now"):
            suspended.resume()
        assert suspended.prefetch(0) == 0  # what is back is in use
        assert sum(each.nbytes for each in held if PrivateMemory().holds(each)) == there
    penstock.resume(session)
    assert all(map(same_bits, (each.detach() for each in model.parameters()), expected))


def test_a_refusal_is_told_to_the_manager(ends, one_thread, handlers):
    manager, job = ends
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with penstock.offload(model, optimizer, policy="keep") as session:
        StepSuspender(session, tell=lambda line: None, channel=job)
        manager.want(sleep=True)
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        assert "no directory" in manager.look().refused
        assert (manager.status.state, manager.status.order) == ("awake", 1)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("no thread")])
def test_what_the_system_refuses_is_a_refusal_and_not_the_end_of_the_script(
    trained, ends, monkeypatch, error
):
    session, model, optimizer = trained
    manager, job = ends

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("penstock.swap.signals.suspend", refuse)
    StepSuspender(session, tell=lambda line: None, channel=job)
    manager.want(sleep=True)
    for _ in range(2):
        step(model, optimizer)
    assert str(error) in manager.look().refused
    assert manager.status.state == "awake"


def test_without_proc_a_suspend_says_so(trained, monkeypatch, tmp_path):
    session, model, optimizer = trained
    step(model, optimizer)
    monkeypatch.setattr("penstock.io.pages._MAPS", str(tmp_path / "maps"))
    with pytest.raises(TransferError, match="maps"):
        penstock.suspend(session)
    step(model, optimizer)
