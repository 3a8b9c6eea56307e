"""[Note: finalizers]: what a finalizer defers waits for this thread's last lock, and no longer."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from interrupted import HandlerError, Interrupt
from penstock.core.locks import Lock, condition, defer
from penstock.testing.engines import run_in_fork


def test_deferred_runs_at_once_without_a_lock():
    seen = []
    defer(lambda: seen.append(1))
    assert seen == [1]


def test_deferred_waits_for_the_last_lock():
    seen, outer, inner = [], Lock(), Lock()
    with outer:
        with inner:
            defer(lambda: seen.append(1))
            defer(lambda: seen.append(2))
        assert seen == []
    assert seen == [1, 2]


def test_deferred_waits_for_the_lock_of_a_condition():
    seen, outer, inner = [], Lock(), condition()
    with outer:
        with inner:
            defer(lambda: seen.append(1))
        assert seen == []
    with inner:
        defer(lambda: seen.append(2))
        assert seen == [1]
    assert seen == [1, 2]


def test_deferred_may_take_the_very_lock():
    seen, lock = [], Lock()

    def action():
        with lock:
            seen.append(1)

    with lock:
        defer(action)
    assert seen == [1]


def test_deferred_by_deferred_is_not_nested():
    seen = []

    def first():
        defer(lambda: seen.append("second"))
        seen.append("first")

    defer(first)
    assert seen == ["first", "second"]


def test_another_threads_lock_does_not_delay():
    lock, seen, held, done = Lock(), [], threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    defer(lambda: seen.append(1))
    assert seen == [1]
    done.set()
    thread.join()


def test_what_a_thread_left_is_done_by_another():
    """A thread that holds a lock for long does not hold up what it deferred."""
    seen, mine, other, left = [], Lock(), Lock(), threading.Event()
    done = threading.Event()

    def leave():
        with mine:
            defer(lambda: seen.append(threading.current_thread()))
            left.set()
            done.wait(20)

    thread = threading.Thread(target=leave)
    thread.start()
    left.wait()
    with other:
        pass
    assert seen == [threading.current_thread()]
    done.set()
    thread.join()


def test_a_failing_action_is_seen_and_the_rest_still_runs():
    seen, lock = [], Lock()

    def fail():
        raise RuntimeError("an action must not raise")

    lock.acquire()
    defer(fail)
    defer(lambda: seen.append(1))
    with pytest.raises(RuntimeError, match="must not raise"):
        lock.release()
    with lock:
        pass
    assert seen == [1]


def test_a_lock_excludes_and_says_so():
    lock = Lock()
    assert lock.acquire()
    assert not lock.acquire(blocking=False)
    assert not lock.acquire(timeout=0.001)
    lock.release()
    assert lock.acquire(blocking=False)
    lock.release()
    seen = []
    defer(lambda: seen.append(1))  # the attempts in vain are not counted as held
    assert seen == [1]


@pytest.mark.parametrize("how", ["with", "acquire", "condition"])
def test_an_interrupted_wait_does_not_count_as_held(how):
    """Ctrl-C while waiting for a lock; what finalizers defer afterwards must still be done."""
    lock, seen = condition() if how == "condition" else Lock(), []

    class InterruptError(Exception):
        pass

    def interrupt(*_):
        raise InterruptError

    before = signal.signal(signal.SIGALRM, interrupt)
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        with pytest.raises(InterruptError):  # noqa: PT012
            if how == "acquire":
                lock.acquire()
            with lock:
                raise AssertionError("the lock was held by another thread")
    finally:
        signal.signal(signal.SIGALRM, before)
        done.set()
        thread.join()
    defer(lambda: seen.append(1))
    assert seen == [1]


def test_conditions_wait_and_notify():
    changed, seen, waiting = condition(), [], threading.Event()

    def wait():
        with changed:
            waiting.set()
            seen.append(changed.wait(20))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    with changed:
        changed.notify_all()
    thread.join()
    assert seen == [True]
    with changed:
        assert not changed.wait(0.001)
    with pytest.raises(RuntimeError, match="un-acquired"):
        changed.notify()


def test_waiting_on_a_condition_lets_deferred_actions_run():
    changed, seen = condition(), []
    with changed:
        defer(lambda: seen.append(1))
        changed.wait(0.001)
        assert seen == [1]


def test_the_collector_inside_a_critical_section():
    """The story of the note: a finalizer that needs the lock that this thread holds."""

    class Handle:
        pass

    lock, freed = Lock(), []

    def free():
        with lock:
            freed.append(1)

    handle = Handle()
    handle.cycle = handle
    weakref.finalize(handle, defer, free)
    del handle
    with lock:
        gc.collect()
        assert freed == []
    assert freed == [1]


def test_a_finalizer_amid_the_start_of_a_thread_leaves_its_action_to_the_next_lock():
    seen = []
    with threading._active_limbo_lock:
        defer(seen.append, 1)
        assert seen == []
    with Lock():
        pass
    assert seen == [1]


STARTS_UNDER_A_LOCK = """
import threading
from penstock.core.locks import Lock, defer

lock, inside, go, seen = Lock(), threading.Event(), threading.Event(), []


def starts_a_thread():
    with lock:
        inside.set()
        go.wait()
        threading.Thread(target=int, daemon=True).start()


def action():
    with lock:
        seen.append(1)


holder = threading.Thread(target=starts_a_thread, daemon=True)
holder.start()
inside.wait()
with threading._active_limbo_lock:  # as while this thread starts one, and the collector comes
    go.set()
    defer(action)
holder.join()
with lock:
    pass
print(seen)
"""


def test_a_finalizer_amid_the_start_of_a_thread_waits_for_nobody_that_starts_one():
    """In a process of its own: without this, no thread could be started any more."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS_UNDER_A_LOCK],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[1]\n"


def test_a_forked_child_gives_nothing_of_its_parents_back():
    lock, seen = Lock(), []
    with lock:
        defer(lambda: seen.append(os.getpid()))

        def child():
            lock.release()
            assert seen == []
            other = []
            defer(lambda: other.append(1))
            assert other == [1]

        run_in_fork(child)
    assert seen == [os.getpid()]


def test_no_action_is_lost_in_a_crowd():
    low, high, seen = [Lock(), Lock()], Lock(), []

    def work(which):
        for index in range(500):
            with low[index % 2], high:
                defer(partial(seen.append, (which, index)))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with high:
        pass
    assert len(seen) == len(set(seen)) == 4 * 500


def test_a_condition_wakes_who_waits_and_runs_what_was_deferred():
    wake, done = condition(), []

    def wait():
        with wake:
            wake.wait_for(lambda: done)
            done.append("woken")

    thread = threading.Thread(target=wait)
    thread.start()
    while True:  # until it waits, so that only the notification wakes it
        with wake:
            if wake._waiters:
                break
        time.sleep(0.001)
    with wake:
        defer(done.append, "deferred")
        wake.notify_all()
        assert not done
    with wake:
        wake.notify_all()
    thread.join(60)
    assert done == ["deferred", "woken"]


def interrupted_at_each_point(action):
    """Call it again and again, each time interrupted at the next point; yield after each call."""
    for at in itertools.count():
        interrupt = Interrupt(at)
        with suppress(HandlerError), interrupt:
            action()
        yield
        if interrupt.where is None:
            return


def in_thread(function):
    """Call it in a thread of its own, as it sets a trace function."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(60)


@pytest.mark.parametrize("how", ["with", "condition", "wait"])
def test_a_handler_that_raises_leaves_no_lock_locked(how):
    """See [Note: signals]; what finalizers defer afterwards is done."""
    lock, seen = Lock() if how == "with" else condition(), []

    def use():
        with lock:
            if how == "wait":
                lock.wait(0.0001)

    def check():
        points = 0
        for _ in interrupted_at_each_point(use):
            points += 1
            assert not (lock if how == "with" else lock._lock).bare.locked(), points
            defer(seen.append, points)
            assert len(seen) == points
        return points

    assert in_thread(check) > 2


@pytest.mark.parametrize("make", [Lock, condition])
def test_a_handler_that_raises_stop_iteration_does_not_let_in_without_the_lock(make):
    lock = make()
    own = getattr(lock, "_lock", lock) if make is condition else lock
    own._taking = iter(partial(next, iter(())), False)  # as if it were raised while this waits
    with pytest.raises(RuntimeError, match="StopIteration"), lock:
        raise AssertionError
    with lock:
        assert own._is_owned()
    assert not own._is_owned()
    ran = []
    defer(ran.append, 1)
    assert ran == [1]
