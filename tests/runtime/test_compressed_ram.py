"""Host memory that is too small for bytes as they are, and enough for encoded ones."""

import warnings
from dataclasses import replace

import pytest
import torch

from offload_runs import (
    MACHINE,
    assert_within_budget,
    counted,
    same_bits,
    wait_for_writes,
    written_bytes,
)
from penstock.core.errors import PenstockWarning
from penstock.core.units import MIB
from penstock.runtime.sampling import Sampler
from penstock.store.wrappers import WrapperTier
from recompute_plans import following

DEPTH = 24
HOST_ONLY = {"flash": (), "flash_capacity": None, "machine": MACHINE}
LITTLE = {"device_memory": 20 * MIB, "host_memory": 20 * MIB} | HOST_ONLY


class Net:
    """Saves 24 storages of 2 MiB, as sparse as ``shift`` makes them; of 48 MiB a tenth is not zero.

    With a session, each has been written before the next one is saved.
    """

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1024, 512, generator=generator)
        self.weight = torch.ones(512, requires_grad=True)

    def __call__(self, shift=-1.5, session=None):
        loss = 0
        for n in range(DEPTH):
            loss = loss + ((self.x + shift + n / 100).relu() * self.weight).sum()
            if session is not None:
                wait_for_writes(session)
        loss.backward()
        found, self.weight.grad = self.weight.grad, None
        return found


def train(net, shift, expected, *, steps):
    for _ in range(steps):
        assert same_bits(net(shift), expected)


def most_ratio(plan):
    return max(decision.ratio for decision in plan.decisions if decision.codec)


def unwrapped(tier):
    while isinstance(tier, WrapperTier):
        tier = tier.inner
    return tier


class Most:
    """The most that a tier ever held."""

    def __init__(self, session):
        self.tier, self.nbytes = unwrapped(session._stores.tiers["host"]), 0
        allocate = self.tier._allocate

        def watched(nbytes):
            place = allocate(nbytes)
            self.nbytes = max(self.nbytes, self.tier.taken_bytes)
            return place

        self.tier._allocate = watched


def assert_no_overflow(session):
    assert counted(session, "budget.overflow") == 0
    assert counted(session, "spill.full.host") == 0
    assert counted(session, "spill.failed.host") == 0
    assert_within_budget(session)


@pytest.mark.parametrize("policy", ["auto", "all"])
def test_more_than_host_memory_holds_is_promised_to_it_and_kept(session_for, policy):
    """From the first pass on, which has no plan; 20 MiB on either side, so that raw it could not be."""
    net, expected = Net(), Net()()
    with session_for(policy=policy, **LITTLE) as session:
        most = Most(session)
        for _ in range(5):
            assert same_bits(net(), expected)
            assert_no_overflow(session)
        gone = [each for each in session.plan.decisions if each.tier == "host"]
        assert sum(each.key.nbytes for each in gone) > 20 * MIB > session.plan.encoded_bytes
        assert session.plan.feasible
        assert any("margin included" in note for note in session.summary().warnings)
        assert 0 < most.nbytes <= 20 * MIB
    assert session.budget.used_bytes == 0


def test_without_codecs_it_would_not_do(session_for):
    """So that the test above tests something: the budget is exceeded, with a warning."""
    net, expected = Net(), Net()()
    with session_for(codec="none", **LITTLE) as session:
        with pytest.warns(UserWarning, match="cannot be spilled|budget is exceeded"):
            train(net, -1.5, expected, steps=3)
        assert not session.plan.feasible


def test_a_host_tier_that_is_large_enough_is_left_as_it_is(session_for):
    """No codec comes into it, nor what codecs work in."""
    net = Net()
    with session_for(
        policy="auto", device_memory=20 * MIB, host_memory=128 * MIB, **HOST_ONLY
    ) as s:
        for _ in range(4):
            net()
        assert counted(s, "encoded.source_bytes") == 0
        assert s.budget.used_by("scratch") == 0


@pytest.fixture
def slow_codecs(monkeypatch):
    """Codecs take so long, as far as plans know, that no more is encoded than must be."""
    measure = Sampler._measure

    def slow(self, *args):
        return replace(measure(self, *args), encode_bytes_per_s=2e7, decode_bytes_per_s=4e7)

    monkeypatch.setattr(Sampler, "_measure", slow)


@pytest.mark.parametrize("shift", [-0.3, 0.0])
def test_what_comes_to_compress_less_is_encoded_more_and_a_plan_follows(
    session_for, slow_codecs, shift
):
    """Frames come to be four times as long, and more: no bit is lost, and the next plan keeps the budget.

    Until then it depends on measured times: where the plan has what goes as it is go first, host memory
    may be full before a frame tells, and the budget then is exceeded, which is counted.
    """
    net, sparse, dense = Net(), Net()(-1.5), Net()(shift)
    with session_for(policy="auto", **LITTLE) as session, warnings.catch_warnings():
        train(net, -1.5, sparse, steps=3)
        before = most_ratio(session.plan)
        assert_within_budget(session)
        warnings.simplefilter("ignore", PenstockWarning)  # some stay
        for _ in range(3):
            assert same_bits(net(shift, session), dense)
        exceeded = counted(session, "budget.overflow")
        if not exceeded:
            assert_within_budget(session)
        assert counted(session, "shortage") > 0
        assert most_ratio(session.plan) > before + 0.1
        assert session.plan.feasible
        short = counted(session, "shortage")
        session.budget.reset_peak()
        train(net, shift, dense, steps=2)
        assert counted(session, "shortage") == short  # the plan knows
        assert counted(session, "budget.overflow") == exceeded
        assert_within_budget(session)
    assert session.budget.used_bytes == 0


def test_where_everything_is_full_the_budget_is_exceeded_and_the_warning_says_what_to_do(
    session_for,
):
    """Nothing is zero any more: 48 MiB cannot be in 40, and to go wrong would be worse."""
    net, sparse, dense = Net(), Net()(-1.5), Net()(5.0)
    with session_for(policy="auto", **LITTLE) as session:
        train(net, -1.5, sparse, steps=3)
        with pytest.warns(PenstockWarning) as caught:
            train(net, 5.0, dense, steps=3)
        (told,) = [str(each.message) for each in caught if "is exceeded" in str(each.message)]
        assert "host holds" in told
        assert "give more host_memory" in told
        assert not session.plan.feasible


def test_a_warning_that_is_an_error_is_raised_after_the_step_and_stops_no_transfer(session_for):
    """Threads that write have to warn, of a tier that is full: to raise it there would end them."""
    net, sparse, dense = Net(), Net()(-1.5), Net()(5.0)
    warnings.simplefilter("error")
    with session_for(policy="auto", **LITTLE) as session:
        train(net, -1.5, sparse, steps=3)
        assert same_bits(net(5.0, session), dense)  # waits for each write
        with pytest.raises(PenstockWarning, match=r"cannot be spilled|is exceeded"):
            session.step()
        assert same_bits(net(5.0, session), dense)
        told = []
        for _ in range(4):  # a topic each, and each once
            try:
                session.step()
            except PenstockWarning as error:
                told.append(str(error))
        assert len(told) == len(set(told)) < 4
        assert len(session.recorder.steps()) == 5  # all of them, also those that raised
    assert session.budget.used_bytes == 0


def test_what_is_left_to_be_raised_is_raised_when_the_session_is_closed(session_for):
    net, dense = Net(), Net()(5.0)
    warnings.simplefilter("error")
    session = session_for(policy="all", codec="none", **LITTLE)
    with pytest.raises(PenstockWarning, match=r"cannot be spilled|is exceeded"), session:
        assert same_bits(net(5.0, session), dense)
    assert session.budget.used_bytes == 0
    session = session_for(policy="all", codec="none", **LITTLE)
    with pytest.raises(ZeroDivisionError), session:
        net(5.0, session).div_(1 // 0)


def test_what_full_tiers_have_refused_goes_once_they_hold_less(session_for):
    """A graph fills host memory, so another one stays. The first one dies; then something needs room."""

    def graph(count, rows):
        x = torch.ones(rows, 512, requires_grad=True)
        return [(x + n).relu().sum() for n in range(count)]

    with session_for(
        codec="none",
        device_memory="10MiB",
        host_memory="4MiB",
        floor="2MiB",
        flash=(),
        flash_capacity=None,
    ) as session:
        first = graph(2, 1024)
        wait_for_writes(session)
        with pytest.warns(PenstockWarning, match="cannot be spilled"):
            second = graph(4, 1024)
        assert counted(session, "spill.full.host") == 4
        del first
        small = graph(3, 512)
        assert counted(session, "budget.overflow") == 0
        assert_within_budget(session)
        del second, small


def by_hand(session_for, **settings):
    """A plan that has everything go to host memory, by a codec."""
    with session_for(policy="all", host_memory="64MiB", machine=MACHINE) as session:
        Net()()
        plan = session.plan
    moved = [replace(d, tier="host", codec="zero-value", ratio=0.2) for d in plan.decisions]
    return replace(plan, policy="by hand", decisions=tuple(moved))


def test_a_given_plan_s_codecs_are_used(session_for, disk_path):
    plan, net, expected = by_hand(session_for), Net(), Net()()
    with following(disk_path, plan, None, host_memory="64MiB") as session:
        assert same_bits(net(-1.5, session), expected)
        assert counted(session, "encoded.source_bytes.zero-value") == DEPTH * 2 * MIB
        assert written_bytes(session, "host") < 0.2 * DEPTH * 2 * MIB


def test_what_finds_one_tier_full_goes_to_the_next_as_it_was_encoded(session_for, disk_path):
    """It was planned for a host tier that has no room for its frames; flash has, and is slow."""
    plan, net, expected = by_hand(session_for), Net(), Net()(-0.3)
    with following(disk_path, plan, None, host_memory="8MiB") as session:
        with pytest.warns(UserWarning, match="cannot be spilled"):
            assert same_bits(net(-0.3, session), expected)
        assert 0 < written_bytes(session, "flash") < 0.5 * (DEPTH * 2 - 8) * MIB
        frames = counted(session, "encoded.frame_bytes.zero-value")
        assert written_bytes(session, "host") + written_bytes(session, "flash") < 1.1 * frames
