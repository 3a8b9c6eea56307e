"""On a GPU, what is run again is compared with its first run, on the device, and gives the same bits."""

import pytest
import torch
from gpu_runs import DEVICE, settings_for
from torch import nn
from torch.nn import functional as F

from cuda_runs import assert_nothing_held
from offload_runs import Trace, session_in
from penstock.core.errors import HookError
from penstock.hooks import recompute
from penstock.runtime import digests
from recompute_plans import Block, following, profiled, recomputing, runs_again

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*determinis"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream"),
]

WIDTH = 64
HOST = {"host_memory": "64MiB", "flash": (), "flash_capacity": None}


class Stack(nn.Module):
    """A stem, what is run again, and a head."""

    def __init__(self, block):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = block
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, features):
        return self.head(self.block(F.gelu(self.stem(features))))


CALLS = []
"""Of ``Unsteady``; its own attributes would be put back."""


class Unsteady(nn.Module):
    """Computes something else each time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        CALLS.append(1)
        return F.gelu(self.linear(features) * len(CALLS))


class Aside(nn.Module):
    """Computes on a stream of its own, late, and is waited for only when that is needed."""

    def __init__(self):
        super().__init__()
        self.block = Block(WIDTH)
        self.side = torch.cuda.Stream()

    def forward(self, features):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(10**6)
            made = self.block(features)
        features = torch.tanh(features)  # is saved on the first stream, which has not waited
        main.wait_stream(self.side)
        made.record_stream(main)
        return made + features


class Fork(nn.Module):
    """What one stream has made is saved there and on another one, which backward comes to first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.side = torch.cuda.Stream()

    def forward(self, features):
        main = torch.cuda.current_stream()
        fork = torch.tanh(self.first(features))
        left = fork * fork.abs()
        self.side.wait_stream(main)
        fork.record_stream(self.side)
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(10**6)
            right = torch.tanh(self.second(fork))
        main.wait_stream(self.side)
        right.record_stream(main)
        return left + right


def built(block):
    torch.manual_seed(0)
    return Stack(block()).to(DEVICE)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(512, WIDTH, generator=generator).to(DEVICE)


def train(model, steps=3):
    trace = Trace()
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        trace.note(f"step {step}, loss", loss)
        trace.note_gradients(step, model)
        model.zero_grad()
    torch.cuda.synchronize()
    return trace


def plan_for(path, block):
    model = built(block)

    def session_for(model, optimizer=None, **settings):
        return session_in(path, model, optimizer, **settings_for("host"), **settings)

    plan, profile = profiled(session_for, model, lambda: train(model, steps=1))
    assert "Stack.block" not in profile.unrepeatable
    return recomputing(plan, profile, "Stack.block")


@pytest.fixture
def made(monkeypatch):
    """Devices of the digests that were made."""
    seen, digest_of = [], digests.digest_of
    monkeypatch.setattr(
        digests, "digest_of", lambda data: seen.append(data.device.type) or digest_of(data)
    )
    return seen


def test_a_later_pass_tells_as_much_of_what_can_be_run_again_as_the_first(disk_path, small_knobs):
    """The thread that ends backward, and asks for the next pass to be observed, is the device's own."""
    model = built(lambda: Block(WIDTH))
    settings = settings_for("host", device_memory="256KiB", floor="8KiB", recompute=True)
    with session_in(disk_path, model, **settings) as session:
        for rows in (256, 512, 512, 512):
            model(torch.randn(rows, WIDTH, device=DEVICE)).square().mean().backward()
        first, last = session.profile.passes
    producers = {
        one.index: [slot.producer for slot in session.profile.slots if slot.pass_index == one.index]
        for one in (first, last)
    }
    assert "Stack.block" in producers[first.index]
    assert producers[last.index] == producers[first.index]


@pytest.mark.parametrize("block", [lambda: Block(WIDTH), Aside], ids=["one stream", "two streams"])
def test_what_is_run_again_is_compared_once_and_is_the_same(disk_path, small_knobs, made, block):
    expected = train(built(block))
    plan = plan_for(disk_path, block)
    assert not made
    model = built(block)
    with following(disk_path, plan, model, **HOST) as session:
        train(model, steps=1)
        compared = len(made)
        assert compared >= 4  # twice for each of two that are dropped, at the least
        assert set(made) == {DEVICE}
        again = train(model)
        assert len(made) == compared
        assert runs_again(session) == 4
        assert_nothing_held(session)
    again.assert_same_bits(expected)


def test_trap_39_what_one_stream_makes_again_others_wait_for(disk_path, small_knobs):
    expected = train(built(Fork))
    plan = plan_for(disk_path, Fork)
    model = built(Fork)
    with following(disk_path, plan, model, **HOST) as session:
        again = train(model)
        assert runs_again(session) == 3
        assert_nothing_held(session)
    again.assert_same_bits(expected)


def test_what_computes_something_else_is_noticed_the_first_time(
    disk_path, small_knobs, monkeypatch
):
    raised, check = [], recompute._Recomputation.check

    def noting(made):
        try:
            return check(made)
        except HookError as error:
            raised.append(str(error))
            raise

    monkeypatch.setattr(recompute._Recomputation, "check", noting)
    plan = plan_for(disk_path, Unsteady)
    model = built(Unsteady)
    # where memory is traced (``torch._C._activate_gpu_trace``), torch loses an error that is on its way
    # out of the thread of backward, and says so
    errors = pytest.raises((HookError, SystemError))
    with following(disk_path, plan, model, **HOST), errors:
        train(model, steps=1)
    (error,) = raised
    assert "recomputing Stack.block gave a different result" in error
