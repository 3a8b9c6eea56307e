"""Sampling in sessions, and codecs that are not to be had; the rules are in ``test_planner``."""

import subprocess
import sys

import pytest
import torch

from offload_runs import MACHINE, counted, same_bits, wait_for_writes
from penstock.core.errors import BudgetError
from penstock.core.units import KIB, MIB
from penstock.observe.recorder import StallCause
from penstock.plan import Machine

SLOW = Machine("slow flash", 1e6, 1e6, 1e-4, 8e9, 8e9)
AUTO = {"machine": SLOW, "device_memory": 64 * MIB}


def sampled(session):
    """Storages that were sampled so far."""
    stall = session.recorder.snapshot().stalls.get(StallCause.SAMPLING)
    return stall.count if stall else 0


def marks(session, name):
    return [event for event in session.recorder.events() if getattr(event, "name", None) == name]


class Net:
    """What a pass saves is as sparse as ``shift`` makes it."""

    def __init__(self):
        self.weight = torch.ones(512, requires_grad=True)

    def __call__(self, session, *, shift=-1.0):
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
        loss = sum(((x + shift + n / 10).relu() * self.weight).sum() for n in range(3))
        wait_for_writes(session)
        loss.backward()
        found, self.weight.grad = self.weight.grad, None
        return found


def most_ratio(session):
    return max(each.ratio for each in session.plan.decisions)


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


# -- settings --------------------------------------------------------------------------------------


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
