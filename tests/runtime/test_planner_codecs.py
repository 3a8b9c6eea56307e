"""When the planner has slots sampled, when it does so again, and when codecs are not to be had."""

import subprocess
import sys

import pytest
import torch

from offload_runs import MACHINE, counted, same_bits, wait_for_writes
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.units import KIB, MIB
from penstock.observe.recorder import StallCause
from penstock.plan import Machine
from penstock.runtime import codec_choice, planner

SLOW = Machine("slow flash", 1e6, 1e6, 1e-4, 8e9, 8e9)
AUTO = {"machine": SLOW, "device_memory": 64 * MIB}


def sampled(session):
    """Storages that were sampled so far."""
    stall = session.recorder.snapshot().stalls.get(StallCause.SAMPLING)
    return stall.count if stall else 0


def marks(session, name):
    return [event for event in session.recorder.events() if getattr(event, "name", None) == name]


class Net:
    """What a pass saves is as sparse as ``shift`` makes it, and ``depth`` storages."""

    def __init__(self, rows=64):
        self.weight = torch.ones(512, requires_grad=True)
        self.rows = rows

    def __call__(self, session, *, shift=-1.0, depth=3, extra=0):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, 512, generator=generator)
        loss = sum(((x + shift + n / 10).relu() * self.weight).sum() for n in range(depth))
        for n in range(extra):
            loss = loss + ((x.repeat(n + 3, 1) + shift).relu() * self.weight).sum()
        wait_for_writes(session)
        loss.backward()
        found, self.weight.grad = self.weight.grad, None
        return found


def most_ratio(session):
    return max(each.ratio for each in session.plan.decisions)


# -- how often -------------------------------------------------------------------------------------


def test_a_network_that_stays_the_same_is_sampled_in_one_pass(session_for):
    net = Net()
    with session_for(**AUTO) as session:
        counts = []
        for _ in range(8):
            net(session)
            counts.append(sampled(session))
        assert counts == [0, *[3] * 7]
        assert session.planner.replans == 2
        assert all(each.codec for each in session.plan.decisions)


def test_what_is_less_sparse_than_foreseen_is_sampled_again(session_for):
    """Three quarters are zero at first, then nothing: what was planned for the one fits not the other."""
    net = Net()
    with session_for(**AUTO) as session:
        for _ in range(4):
            net(session)
        assert most_ratio(session) < 0.4
        for _ in range(4):
            net(session, shift=10.0)
        assert sampled(session) == 6
        assert min(each.ratio for each in session.plan.decisions) > 0.7
        settled = session.planner.replans
        for _ in range(4):
            net(session, shift=10.0)
        assert (sampled(session), session.planner.replans) == (6, settled)


def test_what_is_more_sparse_than_foreseen_is_sampled_again(session_for):
    net = Net()
    with session_for(**AUTO) as session:
        for shift in (0.0, 0.0, 0.0, 0.0, -3.0, -3.0, -3.0):
            net(session, shift=shift)
        assert sampled(session) == 6
        assert most_ratio(session) < 0.2


def test_noise_is_no_reason_to_sample_again(session_for):
    net = Net()
    with session_for(**AUTO) as session:
        for step in range(10):
            net(session, shift=-1.0 + 0.01 * step)
        assert sampled(session) == 3


def test_passes_are_sampled_so_often_and_no_more(session_for, monkeypatch):
    """A network that is never twice the same."""
    monkeypatch.setattr(codec_choice, "MAX_SAMPLED_PASSES", 4)
    monkeypatch.setattr(planner, "FREE_REPLANS", 100)
    net = Net()
    with session_for(**AUTO) as session:
        for step in range(40):
            net(session, shift=(-2.0, 0.2)[step // 3 % 2])
        assert sampled(session) == 4 * 3


def test_no_pass_is_sampled_whose_plan_would_not_be_made(session_for):
    """Plans are made ever more rarely where shapes change for ever; samples with them."""
    with session_for(**AUTO) as session:
        passes = 0
        for step in range(60):
            before = sampled(session)
            Net(rows=16 + 3 * step)(session)
            passes += sampled(session) > before
        assert 0 < passes <= session.planner.replans + 1
        assert passes < 15


def test_slots_that_appear_later_are_sampled_as_well(session_for):
    """Most of the pass is known, so that it counts as the same kind of pass."""
    net = Net()
    with session_for(**AUTO) as session:
        for _ in range(4):
            net(session, depth=6)
        for _ in range(4):
            net(session, depth=6, extra=2)
        assert len(session.plan.decisions) == 8
        assert all(each.codec for each in session.plan.decisions)


def test_what_no_codec_takes_is_not_waited_for(session_for):
    """Nothing can be sampled: the session goes on, raw, and plans no more than once."""
    weight = torch.ones(4096, dtype=torch.complex64, requires_grad=True)
    with session_for(**AUTO) as session:
        for _ in range(40):
            ((weight * 2) * (weight * 3)).abs().sum().backward()
        assert session.planner.replans == 1
        assert not any(each.codec for each in session.plan.decisions)
        assert not session.executor.orders.samples


def test_another_threads_stall_does_not_upset_a_plan(session_for):
    """Compute time is the clock's less all stalls, so one that ends elsewhere takes it back."""
    weight = torch.ones(8192, requires_grad=True)
    with session_for(**AUTO) as session:
        for _ in range(3):
            loss = ((weight * 2) * (weight * 3)).sum()
            session.executor.time.stalled_ns += 10**10
            loss.backward()
        assert all(each.codec for each in session.plan.decisions)


def test_a_machine_whose_flash_is_fast_gets_no_codecs(session_for):
    fast = Machine("fast", 1e13, 1e13, 0.0, 1e13, 1e13)
    net = Net()
    with session_for(machine=fast, device_memory=64 * MIB) as session:
        for _ in range(6):
            net(session)
        assert sampled(session) == 0  # transfers hide behind the network: not even looked at
        assert not any(each.codec for each in session.plan.decisions)
        assert session.budget.used_by("scratch") == 0
        assert counted(session, "encoded.source_bytes") == 0


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["zip", "zero-value+zip"])
def test_an_unknown_codec_is_refused_at_once_with_those_there_are(session_for, codec):
    session = session_for(codec=codec, **AUTO)
    with pytest.raises(ConfigError, match=r"zip.*there are zero-value.*bfloat16"), session:
        pass
    with session_for(**AUTO):  # nothing of the refused one is left
        pass


def test_signs_alone_are_not_to_be_forced(session_for):
    session = session_for(codec="positive", **AUTO)
    with pytest.raises(ConfigError, match=r"'positive' keeps only signs.*codec='auto'"), session:
        pass


def test_a_codec_on_a_budget_without_room_says_which_would_do(session_for):
    """And following its advice works."""
    session = session_for(codec="zero-value", machine=MACHINE, device_memory=4 * MIB)
    with (
        pytest.raises(BudgetError, match="has no room for what codec 'zero-value'") as caught,
        session,
    ):
        pass
    least = caught.value.least_bytes
    assert str(least // MIB) in str(caught.value)
    session = session_for(codec="zero-value", machine=MACHINE, device_memory=least - 64 * KIB)
    with pytest.raises(BudgetError), session:
        pass
    with session_for(codec="zero-value", machine=MACHINE, device_memory=least) as session:
        assert session.budget.used_by("scratch") > 0


def test_without_room_for_codecs_bytes_go_as_they_are(session_for):
    """``auto`` says so in a mark and nowhere else."""
    net = Net()
    expected = None
    with session_for(machine=SLOW, device_memory=4 * MIB) as session:
        for _ in range(6):
            found = net(session)
            expected = found if expected is None else expected
            assert same_bits(found, expected)
        assert counted(session, "encoded.source_bytes") == 0
        assert not any(each.codec for each in session.plan.decisions)
        (mark,) = marks(session, "no_codecs")
        assert "no room" in mark.fields["reason"]
        assert sampled(session) == 0  # it would be for nothing
        assert session.budget.peak_bytes <= session.budget.limit_bytes


# -- what is loaded --------------------------------------------------------------------------------

LOADED = """
import sys, torch, penstock
from penstock.plan import Machine
def run(**settings):
    weight = torch.ones(4096, requires_grad=True)
    config = penstock.OffloadConfig(flash=sys.argv[1], flash_capacity="64MiB", floor="8KiB", **settings)
    with penstock.Session(config, machine=Machine("slow", 1e6, 1e6, 0, 1e9, 1e9)) as session:
        for _ in range(5):
            ((weight * 2) * (weight * 3)).sum().backward()
        return session.plan.offloaded_bytes
def numba():
    print("numba" in sys.modules, end=" ")
numba()
assert run(codec="none", device_memory="64MiB", policy="all"); numba()
assert not run(device_memory="64MiB"); numba()
assert not run(); numba()
assert run(device_memory="64MiB", policy="all"); numba()
"""


def test_numba_is_loaded_only_where_something_is_encoded(disk_path):
    """Not by the import, nor with codec 'none', nor for a network that fits; else when it is sampled."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(disk_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "False", "False", "True"]
