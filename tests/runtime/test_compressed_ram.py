"""Host memory that is too small for bytes as they are, and enough for encoded ones."""

import pytest
import torch

from offload_runs import (
    MACHINE,
    assert_within_budget,
    counted,
    same_bits,
    unwrapped,
)
from penstock.core.units import MIB

DEPTH = 24
HOST_ONLY = {"flash": (), "flash_capacity": None, "machine": MACHINE}
LITTLE = {"device_memory": 20 * MIB, "host_memory": 20 * MIB} | HOST_ONLY


class Net:
    """Saves 24 storages of 2 MiB, as sparse as ``shift`` makes them; of 48 MiB a tenth is not zero."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1024, 512, generator=generator)
        self.weight = torch.ones(512, requires_grad=True)

    def __call__(self, shift=-1.5):
        loss = sum(((self.x + shift + n / 100).relu() * self.weight).sum() for n in range(DEPTH))
        loss.backward()
        found, self.weight.grad = self.weight.grad, None
        return found


def train(net, shift, expected, *, steps):
    for _ in range(steps):
        assert same_bits(net(shift), expected)


def most_ratio(plan):
    return max(decision.ratio for decision in plan.decisions if decision.codec)


class Most:
    """The most that a tier ever held."""

    def __init__(self, session):
        self.tier, self.nbytes = unwrapped(session._stores.tiers["host"]), 0
        take = self.tier._take

        def watched(nbytes):
            place = take(nbytes)
            self.nbytes = max(self.nbytes, self.tier.taken_bytes)
            return place

        self.tier._take = watched


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


def test_what_comes_to_compress_less_stays_in_memory_and_a_plan_follows(session_for):
    """Frames come to be four times as long: no bit is lost, and the next plan keeps the budget again."""
    net, sparse, dense = Net(), Net()(-1.5), Net()(-0.3)
    with session_for(policy="auto", **LITTLE) as session:
        train(net, -1.5, sparse, steps=3)
        before = most_ratio(session.plan)
        with pytest.warns(UserWarning, match="cannot be spilled|budget is exceeded"):
            train(net, -0.3, dense, steps=3)
        assert most_ratio(session.plan) > before + 0.1
        assert session.plan.feasible
        exceeded = counted(session, "budget.overflow")
        train(net, -0.3, dense, steps=2)
        assert counted(session, "budget.overflow") == exceeded
    assert session.budget.used_bytes == 0
