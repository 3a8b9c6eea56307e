"""Transfers in flight: completed in order, within a limit, and never left behind."""

from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import TransferError
from penstock.io.engine import Priority, Transfer
from penstock.store.window import TransferWindow

INTERRUPTS = (KeyboardInterrupt, TimeoutError)
"""What a signal's handler raises: Ctrl-C's, or one that the program has for a timer."""


class Device:
    """Transfers that the test settles, or that settle when they are waited for."""

    def __init__(self, errors=()):
        self.errors = dict(errors)
        self.begun, self.waited, self.cancelled = {}, [], []

    def submit(self, name, *, started=True):
        device = self

        class Waited(Transfer):
            def _wait(self, timeout_s):
                device.waited.append(name)
                if isinstance(device.errors.get(name), INTERRUPTS):
                    raise device.errors.pop(name)
                if not self.done:
                    self.settle(device.errors.get(name))
                return super()._wait(timeout_s)

        def cancel(_):
            device.cancelled.append(name)
            return not started

        def begin(priority):
            self.begun[name] = priority
            return Waited(1, cancel=cancel)

        return begin


class Log:
    """Calls of a window, in order."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))

    def window(self, **settings):
        return TransferWindow(complete=self.complete, release=self.release, **settings)

    def of(self, name):
        return [call[1] for call in self.calls if call[0] == name]


def error():
    return TransferError(errno=5, op="read", path="a", offset_bytes=0, nbytes=1)


def test_items_are_completed_and_released_in_order():
    device, log = Device(), Log()
    with log.window() as window:
        for name in "abc":
            window.begin(name, device.submit(name))
        assert len(window) == 3
        assert log.calls == []
        assert window.advance()
        assert log.calls == [("complete", "a"), ("release", "a")]
    assert log.of("complete") == log.of("release") == ["a", "b", "c"]
    assert not window.advance()
    assert device.cancelled == []


def test_a_limit_of_bytes_completes_as_many_as_needed():
    device, log = Device(), Log()
    with log.window(limit_bytes=10) as window:
        for name, nbytes in zip("abcd", (4, 4, 2, 9), strict=True):
            window.make_room(nbytes)
            window.begin(name, device.submit(name), nbytes)
        assert log.of("complete") == ["a", "b", "c"]
        window.make_room(100)  # more than the limit goes alone
        assert log.of("complete") == ["a", "b", "c", "d"]
    with log.window() as window:
        window.begin("e", device.submit("e"), 100)
        window.make_room(100)
        assert "e" not in log.of("complete")


def test_an_item_that_is_popped_is_its_callers():
    device, log = Device(), Log()
    window = log.window(limit_bytes=10)
    for name, nbytes in zip("abc", (4, 4, 2), strict=True):
        window.add(name, device.submit(name)(Priority.DEMAND), nbytes)
    assert window.pop_excess(0) is None
    assert window.pop_excess(1) == "a"
    assert window.pop_excess(4) is None
    assert window.pop() == "b"
    assert len(window) == 1
    assert window.pop_excess(100) == "c"
    assert window.pop_excess(100) is None
    window.finish()
    window.cancel()
    assert (log.calls, device.waited, device.cancelled) == ([], [], [])


def test_memory_comes_from_the_oldest():
    device, free = Device(), ["x", "y"]
    window = TransferWindow(release=free.append)
    for _ in range(2):
        memory = window.take(lambda: free.pop(0) if free else None)
        window.begin(memory, device.submit(memory))
    assert window.take(lambda: free.pop(0) if free else None) == "x"
    assert device.waited == ["x"]
    assert window.take(lambda: None) is None
    assert device.waited == ["x", "y"]


def test_an_error_is_raised_and_the_rest_cancelled_newest_first():
    device, log = Device({"b": error()}), Log()
    window = log.window()
    for name in "abcd":
        window.begin(name, device.submit(name))
    with pytest.raises(TransferError), window:
        window.finish()
    assert log.of("complete") == ["a"]
    assert log.of("release") == ["a", "b", "c", "d"]
    assert device.cancelled == ["d", "c"]  # b is settled
    assert device.waited[-3:] == ["b", "c", "d"]  # what cannot be cancelled is waited for


def test_what_has_not_started_is_cancelled_and_not_moved():
    device, log = Device(), Log()
    window = log.window()
    transfers = [window.begin(name, device.submit(name, started=False)) for name in "ab"]
    window.cancel()
    assert all(isinstance(each.error, CancelledError) for each in transfers)
    assert log.of("release") == ["a", "b"]
    assert log.of("complete") == []
    window.cancel()
    assert log.of("release") == ["a", "b"]


@pytest.mark.parametrize("where", ["transfer", "complete"])
def test_an_error_that_is_handled_ends_one_item_only(where):
    lost, released = [], []

    def complete(name):
        if name == "b" and where == "complete":
            raise error()

    device = Device({"b": error()} if where == "transfer" else {})
    with TransferWindow(
        complete=complete, fail=lambda *told: lost.append(told), release=released.append
    ) as window:
        for name in "abc":
            window.begin(name, device.submit(name))
    assert [name for name, _ in lost] == ["b"]
    assert isinstance(lost[0][1], TransferError)
    assert released == ["a", "b", "c"]


def test_what_cannot_begin_is_released_at_once():
    log = Log()
    window = log.window()

    def refuse(_):
        raise error()

    with pytest.raises(TransferError):
        window.begin("a", refuse)
    assert log.of("release") == ["a"]
    assert not len(window)


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_after_an_interrupt_while_it_begins_memory_stays_taken(interrupt):
    """Whether the transfer has begun is not known."""
    log = Log()
    window = log.window()

    def interrupted(_):
        raise interrupt

    with pytest.raises(interrupt), window:
        window.begin("a", interrupted)
    assert log.calls == []


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_after_an_interrupt_while_it_waits_nothing_is_in_flight(interrupt):
    device, log = Device({"a": interrupt()}), Log()
    window = log.window()
    for name in "ab":
        window.begin(name, device.submit(name))
    with pytest.raises(interrupt), window:
        window.finish()
    assert log.of("complete") == []
    assert log.of("release") == ["a", "b"]
    assert device.waited == ["a", "a", "b"]


def test_the_priority_is_that_of_the_moment():
    device = Device()
    with TransferWindow(priority=Priority.BACKGROUND) as window:
        window.begin("a", device.submit("a"))
        window.priority = Priority.PREFETCH
        window.begin("b", device.submit("b"))
    assert device.begun == {"a": Priority.BACKGROUND, "b": Priority.PREFETCH}


@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["good", "bad", "refused"]))),
    st.integers(1, 12),
)
def test_whatever_happens_each_item_is_released_once_and_in_order(items, limit):
    """And never more than the limit is in flight, but for a single item."""
    device, released, done, lost = Device(), [], [], []
    window = TransferWindow(
        complete=done.append,
        fail=lambda item, _: lost.append(item),
        release=released.append,
        limit_bytes=limit,
    )
    begun, refused, sizes = [], [], dict(enumerate(size for size, _ in items))

    def refuse(_):
        raise error()

    with window:
        for number, (size, fate) in enumerate(items):
            window.make_room(size)
            if fate == "refused":
                refused.append(number)
                with pytest.raises(TransferError):
                    window.begin(number, refuse, size)
                continue
            if fate == "bad":
                device.errors[number] = error()
            window.begin(number, device.submit(number), size)
            begun.append(number)
            under_way = [each for each in begun if each not in released]
            assert sum(sizes[each] for each in under_way) <= max(limit, size)
    bad = [number for number in begun if items[number][1] == "bad"]
    assert lost == bad
    assert done == [number for number in begun if number not in bad]
    assert [each for each in released if each not in refused] == begun
    assert sorted(released) == list(range(len(items)))
