"""The guard of objects that a forked child must not use, and what a child releases."""

import gc
import os

import pytest

from penstock.core import process
from penstock.core.errors import ClosedError
from penstock.core.process import call_in_child, fork_guard, release_in_child
from penstock.testing.engines import run_in_fork


class Holder:
    def __init__(self):
        self.released = 0

    def release(self):
        self.released += 1


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(process, "_actions", list(process._actions))


def test_objects_of_one_process_share_a_guard():
    guard = fork_guard()
    assert guard is fork_guard()
    assert guard.pid == os.getpid()
    assert not guard.in_child


def test_a_child_knows_that_it_is_one_and_its_own_objects_are_its_own():
    guard = fork_guard()

    def grandchild(child):
        assert guard.in_child
        assert child.in_child
        assert not fork_guard().in_child

    def child():
        assert guard.in_child
        assert guard.pid == os.getppid()
        mine = fork_guard()
        assert mine is not guard
        assert mine.pid == os.getpid()
        assert not mine.in_child
        run_in_fork(lambda: grandchild(mine))
        assert not mine.in_child

    run_in_fork(child)
    assert not guard.in_child
    assert fork_guard() is guard


def test_the_error_names_both_processes_and_what_to_do():
    guard = fork_guard()

    def child():
        with pytest.raises(ClosedError) as caught:
            raise guard.error("this engine", "make one here")
        assert str(caught.value) == (
            f"this engine belongs to process {os.getppid()}, from which this process"
            f" ({os.getpid()}) was forked; make one here"
        )

    run_in_fork(child)


def test_a_child_calls_and_releases_what_was_registered_and_the_parent_nothing():
    calls = []
    holder, dead = Holder(), Holder()
    released = dead.__dict__
    release_in_child(holder, Holder.release)
    release_in_child(dead, Holder.release)
    call_in_child(lambda: calls.append(holder.released))
    del dead
    gc.collect()

    def child():
        assert calls == [0]
        assert holder.released == 1
        assert released["released"] == 0
        run_in_fork(lambda: None)
        assert holder.released == 1  # the child has nothing more to release

    run_in_fork(child)
    assert calls == []
    assert holder.released == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_fails_in_a_child_keeps_nothing_else_from_being_released():
    first, last, calls = Holder(), Holder(), []

    def fail():
        raise OSError("as it happens")

    release_in_child(first, lambda _: fail())
    release_in_child(last, Holder.release)
    call_in_child(fail)
    call_in_child(lambda: calls.append(1))

    def child():
        assert calls == [1]
        assert last.released == 1

    run_in_fork(child)
    process._holders.pop(first)
