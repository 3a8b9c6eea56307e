"""Ranks agree on the step after which all of them sleep: threads in place of ranks, with a store."""

import random
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from penstock.runtime import rank_store
from penstock.runtime.rank_store import RankStore
from penstock.swap import sleep_agreement
from penstock.swap.signals import StepSuspender
from penstock.swap.sleep_agreement import SleepAgreement, SleepOrder

LONG_S = 15
SLEEPS = 3
"""Sleeps of each rank in a test that sends signals at any moment."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sleep_agreement, "_LOOK_S", 0.01)
    monkeypatch.setattr(sleep_agreement, "_PATIENCE_S", 0.03)
    monkeypatch.setattr(sleep_agreement, "_POLL_S", 0.001)
    monkeypatch.setattr(rank_store, "_GLANCE_S", LONG_S)


class Ended(Exception):
    """The test has seen what it waited for."""


class Rank:
    """One rank: its signals, what it tells, and the order and step of each sleep."""

    def __init__(self, store, number, size, *, has_checkpointer=False):
        self.signals = SimpleNamespace(asked=False, sleeps=0, wakes=0)
        self.told, self.slept = [], []
        self.is_asleep = threading.Event()
        self.steps = 0
        ranks = RankStore(store, number, size, session=0)
        self.agreement = SleepAgreement(ranks, self.signals, tell=self.told.append)
        self._has_checkpointer = has_checkpointer

    def ask(self):
        self.signals.sleeps += 1
        self.signals.asked = True

    def wake(self):
        self.signals.wakes += 1
        self.signals.asked = False

    def end_step(self):
        """Return whether it is to sleep after one more step."""
        self.steps += 1
        return self.agreement.is_due(self.steps, has_checkpointer=self._has_checkpointer)

    def sleep(self):
        self.slept.append((self.agreement._order.number, self.steps))
        self.is_asleep.set()
        deadline = time.monotonic() + LONG_S
        while self.agreement.holds() and time.monotonic() < deadline:
            time.sleep(0.001)
        self.is_asleep.clear()
        self.agreement.end()

    def train(self, before_step, steps):
        try:
            while self.steps < steps:
                before_step(self)
                if self.end_step():
                    self.sleep()
        except Ended:
            self.agreement.end()


def ranks_of(size, store=None, **settings):
    store = dist.HashStore() if store is None else store
    return [Rank(store, number, size, **settings) for number in range(size)]


def started(ranks, before_step, *, steps=sys.maxsize):
    threads = [
        threading.Thread(target=each.train, args=(before_step, steps), daemon=True)
        for each in ranks
    ]
    for each in threads:
        each.start()
    return threads


def end(threads):
    for each in threads:
        each.join(LONG_S)
    assert not any(each.is_alive() for each in threads)


def all_asleep(ranks):
    return all(each.is_asleep.wait(LONG_S) for each in ranks)


class Collective:
    """What ranks do in a step: every few steps they wait for each other, as in an all-reduce.

    Training goes on until the test ends it, however long the main thread takes to ask.
    """

    def __init__(self, ranks, *, every=1):
        self._barrier = threading.Barrier(len(ranks), timeout=LONG_S)
        self._every = every
        self._is_over = False

    def __call__(self, rank):
        try:
            if rank.steps % self._every == 0:
                self._barrier.wait()
        except threading.BrokenBarrierError:
            if self._is_over:
                raise Ended from None
            raise
        time.sleep(0.0005)

    def end(self, threads):
        self._is_over = True
        self._barrier.abort()
        end(threads)


@pytest.mark.parametrize("every", [1, 2, 7])
def test_all_sleep_after_the_same_step_and_any_rank_wakes_them(every):
    """With ``every`` above 1 a rank may be steps ahead, in a collective that waits for the others."""
    ranks = ranks_of(3)
    step = Collective(ranks, every=every)
    threads = started(ranks, step)
    for asked, woken in ((0, 2), (1, 1)):
        ranks[asked].ask()
        assert all_asleep(ranks)
        ranks[woken].wake()
        for each in ranks:
            while each.is_asleep.is_set():
                time.sleep(0.001)
    step.end(threads)
    first, second, third = (each.slept for each in ranks)
    assert first == second == third
    assert [number for number, _ in first] == [0, 1]
    assert not any(each.signals.asked for each in ranks)


def test_all_are_asked_at_once():
    ranks = ranks_of(3)
    for each in ranks:
        each.ask()
    step = Collective(ranks)
    threads = started(ranks, step)
    assert all_asleep(ranks)
    for each in ranks:
        each.wake()
    step.end(threads)
    assert [len(each.slept) for each in ranks] == [1, 1, 1]
    assert len({each.slept[0] for each in ranks}) == 1


def test_a_rank_that_is_far_ahead_is_waited_for_where_it_is():
    ahead, behind = ranks_of(2)
    for _ in range(50):
        assert not ahead.end_step()
    threads = started([ahead, behind], lambda rank: time.sleep(0.001), steps=10**5)
    behind.ask()
    assert all_asleep([ahead, behind])
    assert ahead.slept == behind.slept
    assert ahead.slept[0][1] >= 50
    ahead.steps = behind.steps = 10**5
    behind.wake()
    end(threads)


@pytest.mark.parametrize("woken", [0, 1])
def test_a_wake_before_the_ordered_step_cancels_it_for_all(woken):
    ranks = ranks_of(2)
    ranks[0].ask()
    assert not ranks[0].end_step()
    ranks[woken].wake()
    time.sleep(0.02)
    assert not ranks[woken].end_step()
    for _ in range(3):
        assert [each.end_step() for each in ranks] == [False, False]
    assert not any(each.signals.asked for each in ranks)
    ranks[0].steps = ranks[1].steps
    step = Collective(ranks)
    threads = started(ranks, step)
    ranks[1].ask()  # the next one is followed
    assert all_asleep(ranks)
    ranks[0].wake()
    step.end(threads)
    assert ranks[0].slept == ranks[1].slept


def test_a_wake_of_the_past_does_not_cancel_an_order():
    ranks = ranks_of(2)
    ranks[1].wake()
    step = Collective(ranks)
    threads = started(ranks, step)
    time.sleep(0.1)
    ranks[0].ask()
    assert all_asleep(ranks)
    ranks[1].wake()
    step.end(threads)


def test_a_rank_that_cannot_sleep_wakes_the_others():
    ranks = ranks_of(2)
    refused = []

    def refuse():
        refused.append(ranks[1].steps)
        ranks[1].agreement.end()

    ranks[1].sleep = refuse
    ranks[0].ask()
    end(started(ranks, Collective(ranks), steps=200))
    assert len(refused) == 1
    assert [step for _, step in ranks[0].slept] in ([], refused)  # it may have been told before


def test_a_rank_that_is_interrupted_while_it_waits_ends_the_order(monkeypatch):
    first, second = ranks_of(2)
    first.ask()
    assert not first.end_step()

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sleep_agreement.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.end_step()
    assert not any(second.end_step() for _ in range(5))


def test_training_goes_on_while_a_rank_ends_no_step_and_it_is_named():
    first, _, third = ranks_of(3)
    first.ask()
    end(started([first, third], Collective([first, third]), steps=100))
    assert first.slept == third.slept == []
    assert first.told or third.told
    for told in (first.told, third.told):
        assert len(told) <= 1
        assert all("1 ha" in line and "not come to step" in line for line in told)


def test_ranks_that_count_other_steps_do_not_hang(monkeypatch):
    """One rank has two optimizers, the other one: their numbers of steps never meet."""
    monkeypatch.setattr(sleep_agreement, "_ARRIVAL_S", 0.05)
    ranks = ranks_of(2)
    ranks[1].steps = 100
    barrier = threading.Barrier(2, timeout=LONG_S)

    def before_step(rank):
        if rank is ranks[0] or rank.steps % 2 == 0:
            barrier.wait()

    threads = [
        threading.Thread(target=rank.train, args=(before_step, steps), daemon=True)
        for rank, steps in zip(ranks, (300, 700), strict=True)
    ]
    ranks[0].ask()
    for each in threads:
        each.start()
    end(threads)
    assert any(each.told for each in ranks)


def test_a_rank_that_takes_long_for_a_step_is_waited_for():
    """It ends each step late, so its peer must not move the order on and on."""
    ranks = ranks_of(2)
    barrier = threading.Barrier(2, timeout=LONG_S)

    def before_step(rank):
        barrier.wait()
        if rank is ranks[1]:
            time.sleep(5 * sleep_agreement._PATIENCE_S)

    ranks[0].ask()
    threads = started(ranks, before_step, steps=12)
    assert all_asleep(ranks)
    assert ranks[0].slept == ranks[1].slept
    assert ranks[0].slept[0][1] < 8
    ranks[0].wake()
    end(threads)


def test_where_one_rank_has_a_checkpointer_all_sleep_a_step_later():
    store = dist.HashStore()
    ranks = [Rank(store, number, 2, has_checkpointer=number == 0) for number in range(2)]
    ranks[1].ask()
    dues = {0: [], 1: []}

    def train(number):
        for _ in range(100):
            time.sleep(0.001)
            if ranks[number].end_step():
                dues[number].append(ranks[number].steps)
                if len(dues[number]) == 2:
                    return

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LONG_S)
    assert dues[0] == dues[1]
    assert dues[0][1] == dues[0][0] + 1
    assert all(each.agreement.saves for each in ranks)


class Suspender(StepSuspender):
    """One rank of ``penstock run`` without ``--state``; it only notes the steps of its sleeps."""

    def __init__(self, store, number, size):
        self.slept = []
        super().__init__(
            SimpleNamespace(ranks=RankStore(store, number, size, session=0), on_step=None),
            tell=lambda line: None,
            pending=SimpleNamespace(asked=False, sleeps=0, wakes=0),
        )

    def _sleep(self, **known):
        self.slept.append(self._steps)


def test_a_rank_without_a_record_waits_for_the_checkpoint_of_another():
    """Only the other one has ``--state``; it may need this one in the step in which it saves."""
    store = dist.HashStore()
    saving, mine = Rank(store, 0, 2, has_checkpointer=True), Suspender(store, 1, 2)
    barrier = threading.Barrier(2, timeout=LONG_S)
    dues = []

    def train():
        while len(dues) < 2:
            barrier.wait()
            if saving.end_step():
                dues.append(saving.steps)

    saving.ask()
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    while not mine.slept:
        barrier.wait()
        mine.step_over()
    end([thread])
    assert mine.slept == dues[1:]


def test_at_its_end_a_rank_says_why_it_did_not_sleep_if_it_was_asked_itself():
    store = dist.HashStore()
    asked, other = (Suspender(store, number, 3) for number in range(2))  # the third is not there

    def ask(rank):
        rank.signals.sleeps += 1
        rank.signals.asked = True

    ask(asked)
    assert "none has ended since" in asked.why_awake
    asked.step_over()
    time.sleep(2 * sleep_agreement._LOOK_S)
    other.step_over()
    assert other.signals.asked  # it has joined
    assert "not all of them came" in asked.why_awake
    assert other.why_awake is None
    ask(other)
    assert "none has ended since" in other.why_awake
    assert asked.slept == other.slept == []


class Breaking:
    """A store that works until it is broken, and answers late if told."""

    def __init__(self):
        self.inner, self.is_broken, self.late_s = dist.HashStore(), False, 0.0

    def __getattr__(self, name):
        def act(*words):
            if self.is_broken:
                raise dist.DistStoreError("Connection reset by peer")
            time.sleep(self.late_s)
            return getattr(self.inner, name)(*words)

        return act


def test_without_the_store_a_signal_acts_on_one_rank():
    stores = [Breaking(), Breaking()]
    stores[1].inner = stores[0].inner
    ranks = [Rank(store, number, 2) for number, store in enumerate(stores)]
    stores[0].is_broken = True
    assert not any(each.end_step() for each in ranks)
    ranks[0].ask()
    assert ranks[0].end_step()
    assert ranks[0].agreement.holds()
    ranks[0].wake()
    assert not ranks[0].agreement.holds()
    assert len(ranks[0].told) == 1
    assert "send them to every rank" in ranks[0].told[0]


def asleep_in_turn(*ranks):
    """Let ranks that wait for each other sleep after their next step."""
    threads = [threading.Thread(target=each.end_step) for each in ranks]
    for each in threads:
        each.start()
    end(threads)


@pytest.mark.parametrize("asked_here", [False, True])
def test_a_rank_that_loses_the_store_before_all_have_arrived_trains_on(asked_here):
    """Else it sleeps alone, and the others wait for it in a collective; unless it was asked itself."""
    stores = [Breaking(), Breaking()]
    stores[1].inner = stores[0].inner
    ranks = [Rank(store, number, 2) for number, store in enumerate(stores)]
    ranks[0].ask()
    assert not ranks[0].end_step()
    time.sleep(2 * sleep_agreement._LOOK_S)
    if asked_here:
        ranks[1].ask()
    assert not ranks[1].end_step()
    assert ranks[1].signals.asked  # it has joined
    stores[1].is_broken = True
    assert ranks[1].end_step() == asked_here
    assert ranks[1].signals.asked == asked_here
    ranks[1].ask()
    assert ranks[1].end_step()


def test_a_store_that_is_late_while_ranks_agree_is_not_given_up(monkeypatch):
    store = Breaking()
    ranks = ranks_of(2, store)
    monkeypatch.setattr(rank_store, "_SHORT_S", 0.01)
    store.late_s = 0.1
    ranks[0].ask()
    assert not ranks[0].end_step()
    assert ranks[0].told == []
    assert ranks[0].agreement._order.step == 2


def test_a_request_to_sleep_soon_after_one_to_go_on_is_not_lost():
    """It comes to a rank that has not seen yet that the others go on."""
    ranks = ranks_of(2)
    ranks[0].ask()
    assert not ranks[0].end_step()
    time.sleep(2 * sleep_agreement._LOOK_S)
    assert not ranks[1].end_step()
    asleep_in_turn(*ranks)
    assert all(each.agreement.holds() for each in ranks)
    ranks[0].wake()
    assert not ranks[0].agreement.holds()
    ranks[0].agreement.end()
    ranks[1].ask()
    time.sleep(2 * sleep_agreement._LOOK_S)
    assert not ranks[1].agreement.holds()  # it goes on with the others
    ranks[1].agreement.end()
    assert [each.signals.asked for each in ranks] == [False, True]
    assert not ranks[1].end_step()
    assert not ranks[0].end_step()
    asleep_in_turn(*ranks)
    assert all(each.agreement.holds() for each in ranks)
    ranks[0].wake()
    assert not ranks[0].agreement.holds()
    time.sleep(2 * sleep_agreement._LOOK_S)
    assert not ranks[1].agreement.holds()
    ranks[1].agreement.end()
    assert not ranks[1].signals.asked


def test_requests_of_before_a_sleep_end_with_it():
    """All ranks were asked, one after the other, and one of them is asked to go on."""
    ranks = ranks_of(2)
    ranks[0].ask()
    assert not ranks[0].end_step()
    time.sleep(2 * sleep_agreement._LOOK_S)
    assert not ranks[1].end_step()
    ranks[1].ask()
    asleep_in_turn(*ranks)
    ranks[0].wake()
    assert not ranks[0].agreement.holds()
    time.sleep(2 * sleep_agreement._LOOK_S)
    assert not ranks[1].agreement.holds()
    ranks[1].agreement.end()
    assert not any(each.signals.asked for each in ranks)


def test_a_rank_that_loses_the_store_in_its_sleep_sleeps_until_its_own_signal():
    store = Breaking()
    ranks = ranks_of(2, store)
    ranks[0].ask()
    step = Collective(ranks)
    threads = started(ranks, step)
    assert all_asleep(ranks)
    store.is_broken = True
    ranks[0].wake()
    while ranks[0].is_asleep.is_set():
        time.sleep(0.001)
    time.sleep(0.05)
    assert ranks[1].is_asleep.is_set()
    ranks[1].wake()
    step.end(threads)
    assert ranks[0].slept == ranks[1].slept


class Hanging:
    """A store that hangs from some moment on."""

    def __init__(self):
        self.inner, self.hangs = dist.HashStore(), False
        self.ended = threading.Event()

    def __getattr__(self, name):
        def act(*words):
            if self.hangs:
                self.ended.wait()
            return getattr(self.inner, name)(*words)

        return act


def test_a_store_that_hangs_holds_up_no_step(monkeypatch):
    monkeypatch.setattr(rank_store, "PATIENCE_S", 0.05)
    monkeypatch.setattr(rank_store, "_GLANCE_S", 0.001)
    store = Hanging()
    try:
        (rank,) = [Rank(store, 0, 2)]
        store.hangs = True
        begun = time.monotonic()
        for _ in range(200):
            assert not rank.end_step()
            time.sleep(0.001)
        assert time.monotonic() - begun < 30  # not 200 times the patience with a store
        assert rank.told == []
        rank.ask()
        assert rank.end_step()
        assert len(rank.told) == 1
    finally:
        store.ended.set()


def test_an_order_of_many_ranks_is_written_and_read():
    order = SleepOrder(number=7, step=10**9, saves=True, joined=(1 << 512) - 5, arrived=1 << 511)
    assert SleepOrder.from_text(order.to_text()) == order
    assert SleepOrder.from_text("") == SleepOrder()
    assert len(order.to_text()) < 300


@pytest.mark.parametrize("seed", range(2))
def test_of_signals_at_any_moment_each_order_has_one_step(seed):
    numbers = random.Random(seed)
    ranks = ranks_of(3)
    step = Collective(ranks, every=numbers.choice([1, 2]))
    threads = started(ranks, step)
    begun = time.monotonic()
    while min(len(each.slept) for each in ranks) < SLEEPS and time.monotonic() < begun + 4 * LONG_S:
        time.sleep(numbers.random() * 0.01)
        rank = numbers.choice(ranks)
        numbers.choice([rank.ask, rank.wake])()
    while any(each.is_asleep.is_set() or each.signals.asked for each in ranks):
        for each in ranks:
            each.wake()
        time.sleep(0.02)
    step.end(threads)
    assert all(len(each.slept) >= SLEEPS for each in ranks)
    steps = {}
    for each in ranks:
        for number, slept in each.slept:
            assert steps.setdefault(number, slept) == slept
