"""What becomes of a request: settled once, told to all, whatever callbacks do."""

import gc
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from penstock.core.errors import ChecksumError
from penstock.io.engine import Priority, Transfer


def test_unsettled():
    transfer = Transfer(10)
    assert not transfer.done
    assert transfer.error is None
    with pytest.raises(TimeoutError, match=r"10 bytes is not done after 0\.001 s"):
        transfer.wait(0.001)
    assert not transfer.cancel()  # nobody could withdraw it
    transfer.promote(Priority.DEMAND)


def test_settled_once():
    transfer = Transfer(10)
    transfer.settle()
    assert transfer.done
    assert transfer.wait() == 10
    with pytest.raises(AssertionError, match="settled twice"):
        transfer.settle()


def test_an_error_reaches_every_waiter():
    transfer, seen, error = Transfer(10), [], OSError(5, "injected")

    def wait():
        try:
            transfer.wait(20)
        except OSError as found:
            seen.append(found)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    transfer.settle(error)
    for thread in threads:
        thread.join()
    assert seen == [error] * 3
    assert transfer.error is error


def test_waiters_wake_after_the_callbacks_have_run():
    """Whoever has waited for a write finds that its room is free."""
    transfer, waits, woken, early = Transfer(10), threading.Event(), threading.Event(), []

    def wait():
        waits.set()
        transfer.wait(20)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    transfer.add_done_callback(lambda _: early.append(woken.wait(0.2)))
    transfer.settle()
    thread.join()
    assert early == [False]


def test_a_callback_that_raises_is_reported_and_stops_nobody(monkeypatch):
    reported, seen = [], []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    transfer = Transfer(10)

    def fail(_):
        raise RuntimeError("a callback must not raise")

    transfer.add_done_callback(fail)
    transfer.add_done_callback(seen.append)
    transfer.settle()
    assert transfer.wait(0) == 10
    assert seen == [transfer]
    assert [str(details.exc_value) for details in reported] == ["a callback must not raise"]
    assert reported[0].thread is threading.current_thread()


def test_cancelled_by_whoever_holds_the_request():
    asked, answers = [], [False, True]

    def withdraw(transfer):
        asked.append(transfer)
        return answers.pop(0)

    transfer = Transfer(10, cancel=withdraw)
    assert not transfer.cancel()
    assert not transfer.done
    assert transfer.cancel()
    assert not transfer.cancel()
    assert asked == [transfer] * 2
    with pytest.raises(CancelledError):
        transfer.wait(0)


def test_settling_lets_go_of_the_engine():
    promoted = []
    transfer = Transfer(10, promote=lambda _, priority: promoted.append(priority))
    transfer.promote(Priority.PREFETCH)
    transfer.settle()
    transfer.promote(Priority.DEMAND)
    assert promoted == [Priority.PREFETCH]
    assert transfer._promote is transfer._cancel is None


def test_a_transfer_that_follows_another_is_settled_once():
    inner = Transfer(10, cancel=lambda _: True)
    outer = Transfer(10, cancel=lambda _: inner.cancel())
    inner.add_done_callback(lambda transfer: outer.settle(transfer.error))
    assert outer.cancel()
    assert isinstance(outer.error, CancelledError)


@pytest.mark.parametrize("first", [None, OSError("EIO")])
def test_a_tier_checks_the_result_before_anybody_sees_it(first):
    transfer, seen = Transfer(8), []
    second, third = OSError("second"), OSError("third")

    def finish(error):
        seen.append((error, transfer.done))
        assert not transfer.cancel()
        return second

    transfer.finish_with(finish, lambda: seen.append("after"))
    transfer.finish_with(lambda error: seen.append((error, transfer.done)) or third)
    transfer.add_done_callback(lambda done: seen.append((done.error, done.done)))
    transfer.settle(first)
    assert seen == [(first, False), (second, False), (third, True), "after"]
    with pytest.raises(OSError, match="third"):
        transfer.wait(0)


def test_a_check_of_what_has_ended_already_is_made_at_once():
    transfer, seen = Transfer(8), []
    transfer.settle()
    transfer.finish_with(lambda error: OSError("late"), lambda: seen.append(transfer.error))
    assert str(seen) == "[OSError('late')]"
    assert transfer.error is seen[0]


def test_an_error_keeps_nothing_of_a_waiter_alive():
    """It is the transfer's as long as that is, and its traceback would have the waiter's frames."""
    transfer = Transfer(10)
    transfer.settle(ChecksumError("other bytes"))

    class Held:
        pass

    def wait():
        held = Held()
        with pytest.raises(ChecksumError, match="other bytes"):
            transfer.wait()
        return weakref.ref(held)

    gc.disable()
    try:
        assert wait()() is None
    finally:
        gc.enable()


def test_a_check_that_fails_is_the_error():
    """Else nobody would ever hear of the transfer."""
    transfer, error = Transfer(8), MemoryError()

    def fail(_):
        raise error

    transfer.finish_with(fail)
    transfer.settle()
    assert transfer.error is error


def test_a_transfer_that_is_cancelled_is_checked_too():
    transfer, seen = Transfer(8, cancel=lambda _: True), []
    transfer.finish_with(lambda error: seen.append(error) or error)
    assert transfer.cancel()
    assert [type(error) for error in seen] == [CancelledError]
    assert transfer.error is seen[0]


def test_a_wait_that_a_signals_handler_ends_keeps_nobody_from_settling():
    """Wherever it raises: the thread of an engine that waited for that one would move no more bytes."""
    for count in range(1, 100):
        transfer, left = Transfer(1), count

        def interrupt(frame, event, argument):
            nonlocal left
            code = frame.f_code
            if code.co_filename == threading.__file__ or code is Transfer._wait.__code__:
                left -= 1
                if not left:
                    raise KeyboardInterrupt
            return interrupt

        def wait(transfer=transfer, interrupt=interrupt):
            nonlocal is_through
            sys.settrace(interrupt)
            try:
                with suppress(TimeoutError):
                    transfer.wait(0.001)
                is_through = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)

        is_through = False
        gc.disable()
        waiting = threading.Thread(target=wait)  # whose count of locks may be wrong afterwards
        waiting.start()
        waiting.join(20)
        gc.enable()
        if transfer._lock.bare.locked():
            continue  # the lock's own matter
        settling = threading.Thread(target=transfer.settle, daemon=True)
        settling.start()
        settling.join(20)
        assert not settling.is_alive()
        if is_through:
            break
    assert 5 < count < 99
