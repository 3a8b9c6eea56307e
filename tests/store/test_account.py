"""The account that may not be exceeded by a byte."""

import gc
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.config import UNLIMITED
from penstock.core.errors import BudgetError, ConfigError
from penstock.store import account
from penstock.store.account import Account, Holding, host_account


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


def woken_for(account, nbytes):
    """Whether a waiter is woken when there are so many bytes, and not only finds them in the end."""
    while account.free_bytes < nbytes:
        if not account.changed.wait(5):
            return False
    return True


def test_a_waiter_wakes_when_bytes_return():
    budget, waiting, got = Account(10), threading.Event(), []
    budget.try_take(10, "a")

    def wait():
        with budget.changed:
            waiting.set()
            got.append(woken_for(budget, 4))

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


def test_without_a_limit():
    account = Account()
    assert account.limit_bytes == UNLIMITED
    assert account.try_take(1 << 50, "a")


def test_the_table_of_owners_has_peaks_and_cannot_be_changed():
    account = Account(100)
    account.try_take(60, "a")
    account.move(20, "a", "b")
    account.free(30, "a")
    table = account.holdings()
    assert table == {"a": Holding(10, 60), "b": Holding(20, 20)}
    with pytest.raises(TypeError):
        table["a"] = Holding(0, 0)
    account.try_take(5, "a")
    assert table["a"] == (10, 60)
    account.reset_peak()
    assert account.holdings() == {"a": (15, 15), "b": (20, 20)}
    assert not Account(100).child("x").parent.holdings()


def test_children_are_bounded_by_their_own_limit_and_the_parent_s():
    memory = Account(100, name="memory")
    tight, loose = memory.child("tight", 30), memory.child("loose", owner="loose things")
    assert not tight.try_take(31, "a")
    assert tight.try_take(30, "a")
    assert loose.free_bytes == 70
    assert not loose.try_take(71, "a")
    assert loose.try_take(70, "a")
    assert (memory.used_by("tight"), memory.used_by("loose things")) == (30, 70)
    assert memory.holdings() == {"tight": (30, 30), "loose things": (70, 70)}
    tight.free(10, "a")
    assert (tight.free_bytes, loose.free_bytes, memory.free_bytes) == (10, 10, 10)
    tight.force(40, "b")
    assert (tight.free_bytes, loose.free_bytes) == (-30, -30)
    assert not loose.try_take(0, "a")
    memory.limit_bytes = 200
    assert loose.try_take(70, "a")


def test_a_refused_take_changes_nothing_anywhere():
    seen = []
    memory = Account(10, on_change=seen.append)
    child = memory.child("child", on_change=seen.append)
    assert not child.try_take(11, "a")
    assert not seen
    assert (child.used_bytes, memory.used_bytes, child.peak_bytes, memory.peak_bytes) == (
        0,
        0,
        0,
        0,
    )


def test_what_a_closed_child_holds_is_freed_in_the_parent():
    memory = Account(100)
    child = memory.child("child")
    child.try_take(60, "a")
    child.close()
    child.close()
    assert (memory.used_bytes, memory.peak_bytes, child.used_bytes) == (0, 60, 60)
    child.free(60, "a")
    assert (memory.used_bytes, child.used_bytes) == (0, 0)


def test_what_a_dropped_child_holds_is_freed_in_the_parent():
    memory = Account(100)
    child = memory.child("child")
    child.child("grandchild").try_take(25, "a")
    child.try_take(60, "a")
    gc.collect()
    assert memory.used_bytes == child.used_bytes == 60
    del child
    gc.collect()
    assert memory.used_bytes == 0


def test_bytes_freed_in_one_child_wake_who_waits_in_another():
    memory = Account(10)
    holder, waiter = memory.child("holder"), memory.child("waiter")
    holder.try_take(10, "a")
    waiting, got = threading.Event(), []

    def wait():
        with waiter.changed:
            waiting.set()
            got.append(woken_for(waiter, 4))

    for give in (lambda: holder.free(4, "a"), holder.close):
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        waiting.clear()
        give()
        thread.join()
        waiter.force(4, "b")
    assert got == [True, True]


def test_an_error_names_what_the_full_account_holds():
    memory = Account(4096, name="memory")
    shelf, ring = memory.child("shelf", 1024), memory.child("ring")
    shelf.try_take(1000, "a")
    ring.try_take(3000, "b")
    error = ring.refusal(200, "the buffers", "a smaller tile")
    assert isinstance(error, BudgetError)
    assert (error.slot, error.limit_bytes, error.least_bytes) == ("the buffers", 4096, 4200)
    assert str(error) == (
        "the buffers: 200 B (200 bytes) do not fit in the memory budget of 4.00 KiB, which has 96"
        " bytes left (ring 2.93 KiB, shelf 1000 B); give it at least 4200 bytes, or a smaller tile"
    )
    error = shelf.refusal(50, "gradients", "fewer tiles", least_bytes=2000)
    assert (error.limit_bytes, error.least_bytes) == (1024, 2000)
    assert Account(5).held_by() == "nothing is held"


@pytest.fixture
def fork_while_locked():
    """Fork while another thread holds an account's lock; return the child's process, 0 in the child."""

    def fork(memory):
        locked = threading.Event(), threading.Event()

        def hold():
            with memory.changed:
                locked[0].set()
                locked[1].wait(20)

        holder = threading.Thread(target=hold)
        holder.start()
        locked[0].wait()
        pid = os.fork()
        if pid:
            locked[1].set()
            holder.join()
        return pid

    return fork


def test_an_account_of_a_device_is_unlocked_in_a_forked_child(fork_while_locked):
    device = Account(100)
    child = device.child("streams")
    pid = fork_while_locked(device)
    if not pid:
        os._exit(0 if child.try_take(60, "a") and not device.try_take(60, "b") else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_one_account_for_the_process_and_another_for_a_child(fork_while_locked):
    memory = host_account()
    assert memory is host_account()
    held, mine = memory.used_bytes, memory.child("test of a fork")
    mine.force(5, "a")
    pid = fork_while_locked(memory)
    if not pid:  # what a thread of the parent had locked is free, and nobody's bytes are here
        mine.free(5, "a")
        mine.close()
        inside = host_account()
        os._exit(0 if inside is not memory and inside.try_take(1, "a") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert memory.used_bytes == held + 5
    mine.close()
    assert memory.used_bytes == held


_accounts = st.sampled_from(["root", "left", "right", "leaf"])


@given(
    st.lists(st.tuples(_accounts, st.sampled_from("ab"), st.integers(-60, 60)), max_size=60),
    st.tuples(*[st.one_of(st.none(), st.integers(0, 150))] * 4),
)
def test_children_add_up_and_no_limit_is_exceeded(changes, limits):
    root = Account(limits[0], name="root")
    left, right = root.child("left", limits[1]), root.child("right", limits[2])
    accounts = {"root": root, "left": left, "right": right, "leaf": left.child("leaf", limits[3])}
    above = {"root": (), "left": ("root",), "right": ("root",), "leaf": ("left", "root")}
    own = dict.fromkeys(((name, owner) for name in accounts for owner in "ab"), 0)

    def used(name):
        below = {each for each in accounts if name in (each, *above[each])}
        return sum(nbytes for (each, _), nbytes in own.items() if each in below)

    for name, owner, change in changes:
        account, before = accounts[name], own[name, owner]
        if change < 0:
            account.free(min(-change, before), owner)
            own[name, owner] -= min(-change, before)
        else:
            fits = all(
                used(each) + change <= accounts[each].limit_bytes for each in (name, *above[name])
            )
            assert account.try_take(change, owner) is fits
            own[name, owner] += change * fits
        for each, account in accounts.items():
            assert account.used_bytes == used(each) <= min(account.limit_bytes, account.peak_bytes)
            assert [account.used_by(owner) for owner in "ab"] == [own[each, who] for who in "ab"]
        assert root.used_by("left") == left.used_bytes
        assert root.used_by("right") == right.used_bytes
        assert left.used_by("leaf") == accounts["leaf"].used_bytes


def test_an_account_that_yields_frees_memory_for_others():
    """The bytes go to the one that they are freed for, also if the one that yields asks meanwhile."""
    process = Account(100, name="memory")
    saved, buffers = process.child("saved tensors"), process.child("buffers")
    assert saved.try_take(90, "saved")
    missing = []

    def free(nbytes):
        missing.append(nbytes)
        saved.free(nbytes, "saved")
        assert not saved.try_take(1, "saved")
        assert saved.free_bytes == 0

    saved.yield_by(free)
    assert buffers.make_room(30)
    assert missing == [20]
    assert buffers.try_take(30, "a buffer")
    assert not saved.make_room(10), "it yields itself"
    assert not buffers.make_room(101), "more than there is"
    saved.close()
    assert not buffers.make_room(10), "nothing yields any more"


def test_an_account_that_yields_owes_what_is_waited_for():
    process = Account(100, name="memory")
    saved, buffers = process.child("saved tensors"), process.child("buffers")
    assert saved.try_take(90, "saved")
    owed = []

    def free(nbytes):
        owed.append(saved.owed_bytes)
        saved.free(nbytes, "saved")
        owed.append(saved.owed_bytes)

    saved.yield_by(free)
    assert saved.owed_bytes == 0
    assert buffers.make_room(30)
    assert owed == [20, 0]
    assert buffers.owed_bytes == process.owed_bytes == 0


def test_an_account_that_yields_can_ask_another_one_that_does():
    process = Account(100, name="memory")
    saved, weights = process.child("saved tensors"), process.child("weights")
    assert weights.try_take(90, "weights")
    saved.yield_by(lambda nbytes: pytest.fail("it is asked for its own memory"))
    weights.yield_by(lambda nbytes: weights.free(nbytes, "weights"))
    assert saved.make_room(30)
    assert saved.try_take(30, "saved")
    assert weights.used_bytes == 70


def test_memory_that_is_freed_later_is_waited_for(monkeypatch):
    process = Account(100, name="memory")
    saved, buffers = process.child("saved tensors"), process.child("buffers", 40)
    assert saved.try_take(100, "saved")
    saved.yield_by(lambda nbytes: threading.Timer(0.02, saved.free, (nbytes, "saved")).start())
    assert buffers.make_room(40)
    assert not buffers.make_room(41), "its own limit is lower"
    saved.yield_by(lambda nbytes: None)
    monkeypatch.setattr(account, "PATIENCE_S", 0.01)
    assert saved.try_take(40, "saved"), "nothing is kept for anybody"
    assert not buffers.make_room(10)


def test_it_is_not_waited_for_memory_that_nobody_holds(monkeypatch):
    process = Account(100, name="memory")
    saved, buffers = process.child("saved tensors"), process.child("buffers")
    asked = []
    saved.yield_by(asked.append)
    assert buffers.try_take(80, "a buffer")
    assert saved.try_take(9, "saved")
    monkeypatch.setattr(account, "PATIENCE_S", 1e6)
    assert not buffers.make_room(30), "all that yields would not do"
    assert asked == []


def test_bytes_that_are_kept_for_another_account_are_missing(monkeypatch):
    """They are free, but not for an account that yields: it waits for them as for others' bytes."""
    process = Account(100, name="memory")
    saved, buffers = process.child("saved tensors"), process.child("buffers")
    seen = []
    saved.yield_by(lambda nbytes: seen.append(saved.missing_elsewhere(30)))
    assert saved.try_take(50, "saved")
    assert saved.missing_elsewhere(30) == 0
    monkeypatch.setattr(account, "PATIENCE_S", 0.001)
    assert not buffers.make_room(60)
    assert seen == [40]


def test_an_account_that_yields_is_woken_when_another_has_given_up(monkeypatch):
    """Its own bytes are free again as soon as nobody else waits for them."""
    process = Account(100, name="memory")
    saved, buffers = process.child("saved tensors"), process.child("buffers")
    assert saved.try_take(50, "saved")
    began = threading.Event()
    saved.yield_by(lambda nbytes: began.set())
    monkeypatch.setattr(account, "PATIENCE_S", 0.1)
    other = threading.Thread(target=buffers.make_room, args=(90,))
    other.start()
    assert began.wait(20)
    with saved.changed:
        assert saved.free_bytes < 50
        assert saved.changed.wait(20), "nobody wakes it"
        assert saved.free_bytes == 50
    other.join()
