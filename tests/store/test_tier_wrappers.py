"""Faults on cue, logs, and wrappers in wrappers."""

import errno
import time
from contextlib import ExitStack

import pytest
from tier_builders import flash, host, outcome

from penstock.core.errors import ChecksumError, ConfigError, NoSpaceError, TransferError
from penstock.io.engine import Priority
from penstock.store import FaultyTier, LoggedTier, WrapperTier
from penstock.testing.engines import aligned
from penstock.testing.tier_machine import assert_equal, check_all_room, read, write


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["flash", "host"])
def inner(request, stack, tmp_path):
    return flash(stack, tmp_path) if request.param == "flash" else host(stack)


SOURCE = aligned(16384, seed=1)


def attempt(tier):
    """Write, read, discard; what went wrong, or None."""
    target = aligned(16384)
    try:
        ticket = write(tier, SOURCE, 3, 9000)
    except NoSpaceError as error:
        return error
    error = outcome(ticket.written) or outcome(read(tier, ticket, target))
    if error is None:
        assert_equal(target, ticket, SOURCE[3:9003])
    tier.discard(ticket)
    assert tier.held_bytes == 0
    return error


class TestFaulty:
    def test_raises_at_once(self, inner):
        tier = FaultyTier(inner, fail_at={"write": 1}, mode="raise")
        assert attempt(tier) is None
        error = attempt(tier)
        assert isinstance(error, NoSpaceError)
        assert error.errno == errno.ENOSPC
        assert "injected fault" in str(error)
        assert attempt(tier) is None
        check_all_room(tier)
        tier.close()

    def test_settles_with_an_error(self, inner):
        tier = FaultyTier(inner, fail_at=3)  # the second read
        assert attempt(tier) is None
        error = attempt(tier)
        assert isinstance(error, TransferError)
        assert error.errno == errno.EIO
        assert tier.operations == 4
        assert attempt(tier) is None
        check_all_room(tier)
        tier.close()

    def test_every_index(self, stack):
        """As tests of the runtime use it: fail at each operation in turn."""
        for index in range(6):
            tier = FaultyTier(host(stack), fail_at=index)
            failures = [attempt(tier) for _ in range(3)]
            assert sum(failure is not None for failure in failures) == 1
            check_all_room(tier)
            tier.close()

    def test_for_good(self, inner):
        mine = ValueError("mine")
        tier = FaultyTier(inner, fail_at={"read": 1}, error=mine, times=None)
        assert attempt(tier) is None
        assert [attempt(tier) for _ in range(3)] == [mine] * 3
        tier.close()

    @pytest.mark.parametrize(("skew", "nbytes"), [(0, 1), (511, 1), (511, 2), (5, 9000), (0, 8192)])
    def test_corrupt_is_found_wherever_the_data_lie(self, inner, skew, nbytes):
        tier = FaultyTier(inner, fail_at=0, mode="corrupt")
        target = aligned(16384)
        ticket = write(tier, SOURCE, skew, nbytes)
        ticket.written.wait(20)
        assert tier.operations == 0
        assert isinstance(outcome(read(tier, ticket, target)), ChecksumError)
        read(tier, ticket, target).wait(20)
        assert_equal(target, ticket, SOURCE[skew : skew + nbytes])
        tier.close()

    def test_corrupt_is_not_for_writes(self, inner):
        with pytest.raises(ConfigError, match="for reads"):
            FaultyTier(inner, fail_at={"write": 0}, mode="corrupt")

    def test_without_checksums_nobody_would_know(self, stack, monkeypatch):
        """Why they are on by default."""
        monkeypatch.setenv("PENSTOCK_VERIFY", "off")
        tier = FaultyTier(host(stack), fail_at=0, mode="corrupt")
        ticket, target = write(tier, SOURCE, 0, 100), aligned(4096)
        ticket.written.wait(20)
        read(tier, ticket, target).wait(20)
        assert (target[:100] != SOURCE[:100]).any()
        tier.close()

    def test_delays(self, inner):
        tier = FaultyTier(inner, fail_at={"read": 0}, mode="delay", delay_s=0.05)
        start = time.perf_counter()
        assert attempt(tier) is None
        assert time.perf_counter() - start >= 0.05
        tier.close()

    def test_faults_in_faults(self, inner):
        """A disk that gets full, then fails to read."""
        tier = FaultyTier(
            FaultyTier(inner, fail_at={"write": 1}, mode="raise"), fail_at={"read": 1}
        )
        assert attempt(tier) is None
        assert isinstance(attempt(tier), NoSpaceError)
        assert outcome_errno(attempt(tier)) == errno.EIO
        tier.close()

    def test_failures_are_counted(self, inner):
        tier = FaultyTier(inner, fail_at={"write": 0})
        attempt(tier)
        counters = tier.recorder.snapshot().counters
        assert counters[f"write.failed.{tier.spec.name}"] == 1
        tier.close()


class TestLogged:
    def test_every_call_and_every_end(self, inner):
        log = []
        failing = FaultyTier(inner, fail_at={"read": 1})
        tier = LoggedTier(failing, log)
        ticket = write(tier, SOURCE, 0, 8192)
        ticket.written.wait(20)
        for _ in range(2):
            outcome(read(tier, ticket, aligned(8192)))
        tier.discard(ticket)
        tier.close()
        assert [entry.what for entry in log] == [
            *("write", "write.done", "read", "read.done", "read", "read.done"),
            *("discard", "close"),
        ]
        assert [entry.nbytes for entry in log[:6]] == [8192] * 6
        assert log[0].priority is Priority.WRITE_BEHIND
        assert log[2].priority is Priority.PREFETCH
        assert [entry.error is None for entry in log[1:6:2]] == [True, True, False]

    def test_a_function_will_do(self, inner):
        seen = []
        tier = LoggedTier(inner, lambda entry: seen.append(entry.what))
        attempt(tier)
        assert seen == ["write", "write.done", "read", "read.done", "discard"]
        tier.close()


def test_a_wrapper_is_what_it_wraps(inner):
    tier = WrapperTier(inner)
    assert tier.spec is inner.spec
    assert tier.recorder is inner.recorder
    assert attempt(tier) is None
    flows = tier.recorder.snapshot().flows
    assert [flow.count for flow in flows.values()] == [1, 1]  # not once more for the tier inside
    tier.close()
    with pytest.raises(Exception, match="closed"):
        write(inner, SOURCE, 0, 1)


def outcome_errno(error):
    return error.errno
