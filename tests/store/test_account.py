"""The account that may not be exceeded by a byte."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.store.account import Account


def test_taken_up_to_the_last_byte_and_no_further():
    budget = Account(100, name="host")
    assert budget.try_take(60, "tier")
    assert not budget.try_take(41, "arena")
    assert budget.try_take(40, "arena")
    assert not budget.try_take(1, "arena")
    assert budget.try_take(0, "arena")
    assert (budget.used_bytes, budget.free_bytes) == (100, 0)
    assert (budget.used_by("tier"), budget.used_by("arena"), budget.used_by("x")) == (60, 40, 0)


def test_given_back():
    budget = Account(100)
    budget.try_take(60, "tier")
    budget.free(20, "tier")
    assert (budget.used_bytes, budget.used_by("tier"), budget.peak_bytes) == (40, 40, 60)
    with pytest.raises(AssertionError, match="tier frees 41 bytes but holds 40"):
        budget.free(41, "tier")
    with pytest.raises(AssertionError):
        budget.free(1, "arena")
    assert budget.used_bytes == 40


def test_forced_over_the_limit():
    budget = Account(100)
    budget.force(130, "fallback")
    assert (budget.free_bytes, budget.peak_bytes) == (-30, 130)
    assert not budget.try_take(0, "arena")
    budget.free(31, "fallback")
    assert budget.try_take(1, "arena")


def test_moved_between_owners():
    budget = Account(100)
    budget.try_take(60, "source")
    budget.move(25, "source", "target")
    assert (budget.used_by("source"), budget.used_by("target"), budget.used_bytes) == (35, 25, 60)
    with pytest.raises(AssertionError, match="source moves 36 bytes but holds 35"):
        budget.move(36, "source", "target")
    budget.move(35, "source", "source")
    assert budget.used_by("source") == 35


def test_peak_starts_again():
    budget = Account(100)
    budget.try_take(80, "a")
    budget.free(50, "a")
    budget.reset_peak()
    assert budget.peak_bytes == 30
    budget.try_take(5, "a")
    assert budget.peak_bytes == 35


def test_every_change_is_reported():
    seen = []
    budget = Account(100, on_change=seen.append)
    budget.try_take(60, "a")
    budget.try_take(60, "a")
    budget.force(50, "a")
    budget.move(10, "a", "b")
    budget.free(100, "a")
    assert seen == [60, 110, 10]


def test_negative_budget():
    with pytest.raises(ConfigError, match="host budget is -1 bytes"):
        Account(-1, name="host")
    assert not Account(0).try_take(1, "a")


def test_a_waiter_wakes_when_bytes_return():
    budget, waiting, got = Account(10), threading.Event(), []
    budget.try_take(10, "a")

    def wait():
        with budget.changed:
            waiting.set()
            got.append(budget.changed.wait_for(lambda: budget.free_bytes >= 4, timeout=20))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    budget.free(3, "a")
    budget.free(1, "a")
    thread.join()
    assert got == [True]


def test_threads_never_exceed_it_together():
    budget = Account(50)

    def work(owner):
        for size in range(400):
            if budget.try_take(size % 30, owner):
                budget.free(size % 30, owner)

    threads = [threading.Thread(target=work, args=(f"owner {which}",)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used_bytes == 0
    assert 29 <= budget.peak_bytes <= 50


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-40, 40)), max_size=40))
def test_it_adds_up(changes):
    budget, held, peak = Account(100), dict.fromkeys("abc", 0), 0
    for owner, change in changes:
        if change < 0:
            returned = min(-change, held[owner])
            budget.free(returned, owner)
            held[owner] -= returned
        elif budget.try_take(change, owner):
            held[owner] += change
        else:
            assert sum(held.values()) + change > 100
        peak = max(peak, sum(held.values()))
        assert [budget.used_by(owner) for owner in "abc"] == list(held.values())
        assert budget.used_bytes == sum(held.values()) <= 100
        assert budget.peak_bytes == peak
