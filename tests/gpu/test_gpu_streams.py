"""Programs with several streams, late ones: what would be wrong if a copy waited for too little."""

import pytest
import torch
from gpu_runs import copied_bytes, settings_for
from torch import nn

from offload_runs import Trace, session_in, wait_for_writes
from penstock.core.units import MIB

pytestmark = pytest.mark.gpu

LONG = 200_000_000
"""Cycles of the device that take about a tenth of a second."""
WIDTH = 256
ROWS = 512


def both(run, disk_path, **settings):
    """What ``run`` notes without a session, and under one that spills to host memory."""
    expected, found = Trace(), Trace()
    run(expected, None)
    settings = settings_for("host", **settings)
    with session_in(disk_path, **settings) as session:
        run(found, session)
    found.assert_same_bits(expected)
    return session


class TwoChains(nn.Module):
    """Two chains, joined at the end; the second on a stream of its own, another one in each step."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, more, late):
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        x.record_stream(side)
        left = right = x
        with torch.cuda.stream(side):
            if late:
                torch.cuda._sleep(LONG)
            for layer in self.second:
                right = torch.tanh(layer(right))
        for layer in self.first:
            left = torch.tanh(layer(left))
        extra = 0.0 if more is None else torch.tanh(more).square().mean()
        main.wait_stream(side)
        right.record_stream(main)
        return (left * right).square().mean() + extra


def test_trap_33_what_was_kept_is_spilled_when_its_stream_has_done_it(disk_path):
    """The plan keeps it; a step that saves more has it spilled, while another stream is current."""

    def run(trace, session):
        torch.manual_seed(0)
        model = TwoChains().to("cuda")
        for step in range(5):
            x = torch.randn(ROWS, WIDTH).to("cuda")
            more = torch.randn(16 * ROWS, WIDTH, requires_grad=True) if step >= 3 else None
            more_there = None if more is None else more.to("cuda")
            loss = model(x, more_there, late=step >= 3)
            loss.backward()
            trace.note(f"step {step}, loss", loss)
            trace.note_gradients(step, model)
            torch.cuda.synchronize()  # some gradients are memory of the other stream
            model.zero_grad()
            del loss
            if session is not None and step == 2:
                spilled.append(copied_bytes(session)[0])

    spilled = []
    session = both(run, disk_path, policy="auto", device_memory=10 * MIB)
    assert copied_bytes(session)[0] > spilled[0]


def test_trap_33_a_batch_of_a_loaders_stream_is_not_refilled_while_it_is_read(disk_path):
    """It is spilled while its reader waits; then its memory is the loader's, for the next batch."""

    def run(trace, session):
        torch.manual_seed(0)
        weight = torch.randn(WIDTH, WIDTH).to("cuda").requires_grad_()
        # an input that requires a gradient is complete before its operator runs, so goes at once
        hosts = [torch.randn(16 * ROWS, WIDTH).pin_memory().requires_grad_() for _ in range(6)]
        main, loader = torch.cuda.current_stream(), torch.cuda.Stream()
        torch.cuda.synchronize()

        def fetch(step):
            with torch.cuda.stream(loader):
                return hosts[step].to("cuda", non_blocking=True) * 2.0

        batches = [fetch(0)]
        for step in range(5):
            main.wait_stream(loader)
            late = batches.pop() @ weight  # saves the batch, and is enqueued after its copy
            if session is not None:
                wait_for_writes(session)
            batches.append(fetch(step + 1))
            loss = (late * 2).square().mean()
            loss.backward(retain_graph=True)
            trace.note(f"step {step}, loss", loss)
            trace.note(f"step {step}, gradient", weight.grad)
            weight.grad = None
            main.synchronize()
            del late, loss  # and the graph, which has held the batch

    session = both(run, disk_path)
    assert copied_bytes(session)[0] > 16 * MIB


def test_a_small_view_is_copied_when_its_stream_has_done_it(disk_path):
    """It is copied when its operator has returned; another stream is current by then."""

    def run(trace, session):
        torch.manual_seed(0)
        weight, other = (torch.randn(ROWS, WIDTH).to("cuda").requires_grad_() for _ in range(2))
        source = torch.randn(16 * ROWS, WIDTH).to("cuda")
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for step in range(3):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(LONG)
                part = (source * (step + 1))[:ROWS]
                loss = (weight * part).sum()
                del part
            more = (other * 1.5).sin().sum()
            main.wait_stream(side)
            (loss + more).backward()
            trace.note(f"step {step}, gradient", weight.grad)
            torch.cuda.synchronize()
            weight.grad = other.grad = None
            del loss, more

    both(run, disk_path)
