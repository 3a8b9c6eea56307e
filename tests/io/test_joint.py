"""Several requests as one transfer: it settles once, when none of them is in flight any more."""

import random
import weakref
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from penstock.core.errors import ClosedError
from penstock.io.engine import Engine, EngineSpec, Priority, Request, Transfer, submit_all
from penstock.io.files import open_unlinked
from penstock.io.threads import ThreadEngine
from penstock.testing.engines import aligned


class Owner:
    pass


def outcome(transfer):
    with suppress(Exception):
        transfer.wait(20)
    return transfer.error


class HandEngine(Engine):
    """Begins and settles requests when the test says so."""

    def __init__(self, refuse=()):
        self.requests = []
        self.transfers = []
        self.begun = set()
        self.promoted = []
        self._refuse = refuse

    @property
    def spec(self):
        return EngineSpec(name="hand", workers=1, piece_bytes=4096)

    def submit(self, request):
        index = len(self.requests)
        if index in self._refuse:
            raise ClosedError("refused")
        self.requests.append(request)
        self.transfers.append(
            Transfer(
                request.nbytes,
                cancel=lambda _: index not in self.begun,
                promote=lambda _, priority: self.promoted.append((index, priority)),
            )
        )
        return self.transfers[-1]

    def close(self):
        pass


def request(nbytes=10, keep_alive=None):
    return Request(
        op="write", file=None, offset_bytes=0, address=0, nbytes=nbytes, keep_alive=keep_alive
    )


def test_settles_after_the_last_part():
    engine = HandEngine()
    joint = submit_all(engine, [request(1), request(2), request(3)])
    ends = []
    joint.add_done_callback(ends.append)
    assert joint.nbytes == 6
    for index in (1, 2):
        engine.transfers[index].settle()
        assert not ends
    engine.transfers[0].settle()
    assert ends == [joint]
    assert joint.wait(0) == 6


def test_fails_with_the_first_error_and_not_before_the_last_part():
    engine = HandEngine()
    joint = submit_all(engine, [request(), request(), request()])
    first, second = OSError("first"), OSError("second")
    engine.transfers[2].settle(first)
    engine.transfers[0].settle(second)
    assert not joint.done  # memory and file are still in use
    engine.transfers[1].settle()
    assert joint.error is first


def test_a_failure_is_not_hidden_by_a_cancellation():
    engine = HandEngine()
    joint = submit_all(engine, [request(), request()])
    engine.transfers[0].cancel()  # the engine is closed, say
    failure = OSError("EIO")
    engine.transfers[1].settle(failure)
    assert joint.error is failure


def test_cancelled_whole():
    engine = HandEngine()
    owner = Owner()
    death = weakref.ref(owner)
    joint = submit_all(engine, [request(keep_alive=owner), request(keep_alive=owner)])
    del owner
    engine.requests.clear()
    seen = []
    joint.add_done_callback(lambda _: seen.append(death()))
    assert joint.cancel()
    assert seen == [None]  # let go before anybody hears of it
    assert isinstance(joint.error, CancelledError)
    assert all(isinstance(part.error, CancelledError) for part in engine.transfers)
    assert not joint.cancel()


def test_not_cancelled_when_the_first_part_has_begun():
    engine = HandEngine()
    joint = submit_all(engine, [request(), request()])
    engine.begun.add(0)
    assert not joint.cancel()
    assert not engine.transfers[1].done
    for part in engine.transfers:
        part.settle()
    assert joint.wait(0) == 20


def test_a_part_that_began_out_of_order_is_waited_for():
    engine = HandEngine()
    joint = submit_all(engine, [request(1), request(2), request(4)])
    engine.begun.add(1)
    assert not joint.cancel()
    assert not joint.done  # its memory is still in use
    assert engine.transfers[2].done
    engine.transfers[1].settle()
    assert isinstance(joint.error, CancelledError)


def test_promotion_reaches_every_part_in_flight():
    engine = HandEngine()
    joint = submit_all(engine, [request(), request(), request()])
    engine.transfers[1].settle()
    joint.promote(Priority.DEMAND)
    assert engine.promoted == [(0, Priority.DEMAND), (2, Priority.DEMAND)]


def test_refused_at_once_or_later():
    with pytest.raises(ClosedError):
        submit_all(HandEngine(refuse={0}), [request(), request()])
    engine = HandEngine(refuse={1})
    joint = submit_all(engine, [request(), request()])
    assert not joint.done
    engine.transfers[0].settle()
    assert isinstance(joint.error, ClosedError)


def test_cancelling_at_random_moments(tmp_path):
    """Cancelled, or written: what is said to be cancelled is over, and what has no error is whole."""
    engine = ThreadEngine(2, 4096)
    file = open_unlinked(tmp_path)
    file.preallocate(8 * 4096)
    rng = random.Random(0)
    cancelled = 0
    for turn in range(300):
        source, target = aligned(8 * 4096), aligned(8 * 4096)
        source[:] = turn % 251 + 1
        requests = [move("write", file, source, part) for part in range(8)]
        joint = submit_all(engine, requests)
        for _ in range(rng.randrange(300)):
            pass
        said = joint.cancel()
        error = outcome(joint)
        assert isinstance(error, CancelledError) or not said
        cancelled += said
        if error is None:
            submit_all(engine, [move("read", file, target, part) for part in range(8)]).wait(20)
            assert (source == target).all()
    engine.close()
    file.close()
    assert cancelled < 300


def move(op, file, buffer, part):
    return Request(
        op=op,
        file=file,
        offset_bytes=part * 4096,
        address=buffer.ctypes.data + part * 4096,
        nbytes=4096,
        keep_alive=buffer,
    )
