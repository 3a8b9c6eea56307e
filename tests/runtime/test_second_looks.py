"""What went raw is looked at again, one slot at a time; sparsity that appears in training is found."""

import torch

from offload_runs import same_bits
from penstock.core.units import MIB
from penstock.observe.recorder import StallCause
from penstock.plan import Action, CodecSample, Decision, Machine, Plan, Profile
from penstock.plan.machine import Budgets
from penstock.plan.profile import PassProfile, SlotProfile
from penstock.plan.slots import SlotKey
from penstock.runtime.residency import Origin, SlotRecord
from penstock.runtime.second_looks import EVERY, SecondLooks

SLOW = Machine("slow flash", 1e6, 1e6, 1e-4, 8e9, 8e9)


class Net:
    """Saves 4 storages of float64, which only codecs of zeros make shorter."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(32, 512, generator=generator, dtype=torch.float64)
        self.weight = torch.ones(512, requires_grad=True, dtype=torch.float64)

    def __call__(self, shift):
        loss = sum(((self.x + shift + n / 10).relu() * self.weight).sum() for n in range(4))
        loss.backward()
        found, self.weight.grad = self.weight.grad, None
        return found


def sampled(session):
    stall = session.recorder.snapshot().stalls.get(StallCause.SAMPLING)
    return stall.count if stall else 0


def test_sparsity_that_appears_in_training_is_found(session_for):
    net = Net()
    with session_for(machine=SLOW, device_memory=64 * MIB) as session:
        for _ in range(3):
            net(9.0)
        assert not any(each.codec for each in session.plan.decisions)
        assert sampled(session) == 4
        for _ in range(2 * EVERY):
            net(9.0)
        assert sampled(session) == 4 + 2  # one slot in every eighth pass, and no plan for that
        assert session.planner.replans == 2
        expected = Net()(-1.0)
        for _ in range(EVERY + 2):
            assert same_bits(net(-1.0), expected)
        assert all(each.codec for each in session.plan.decisions)
        assert max(each.ratio for each in session.plan.decisions) < 0.5


def a_profile(*slots):
    """Slots as (bytes, ratio of zero-value), all offloaded; a ratio of None: it was never sampled."""
    keys = [SlotKey(f"m{i}", 0, nbytes) for i, (nbytes, _) in enumerate(slots)]
    these = tuple(
        SlotProfile(
            key=key,
            pass_index=0,
            saved_at_ns=0,
            needed_at_ns=1,
            kind="ReLU",
            held_elsewhere=False,
            dtype="float32",
            codecs=() if ratio is None else (CodecSample("zero-value", ratio, 1e9, 1e9),),
        )
        for key, (_, ratio) in zip(keys, slots, strict=True)
    )
    profile = Profile("cpu", these, (PassProfile(0, 0, 1, 1),))
    decisions = tuple(Decision(key, Action.OFFLOAD, "flash", "") for key in keys)
    return profile, Plan("all", Budgets(1), decisions, tuple(keys), 0)


def record(key, ratio):
    found = SlotRecord(key, Origin("m", "ReLU", "float32"), 0, 0)
    found.codecs = (CodecSample("zero-value", ratio, 1e9, 1e9),)
    return found


def turns(looks, passes):
    return [looks.next() for _ in range(passes)]


def test_one_slot_in_every_so_many_passes_in_turn_the_largest_first():
    looks = SecondLooks()
    assert turns(looks, EVERY) == [None] * EVERY
    looks.begin(*a_profile((100, 1.0), (300, 1.0), (200, None)))
    found = turns(looks, 3 * EVERY)
    assert [key.nbytes for key in found if key] == [300, 100, 300]


def test_only_a_codec_that_does_much_better_than_it_did_is_news():
    looks = SecondLooks()
    looks.begin(*a_profile((300, 0.9)))
    key = turns(looks, EVERY)[-1]
    other = SlotKey("other", 0, 300)
    assert not looks.found([])
    assert not looks.found([record(key, 0.8), record(other, 0.1)])
    assert looks.found([record(other, 0.9), record(key, 0.7)])
    looks.next()
    assert not looks.found([record(key, 0.1)])
