"""CUDA graphs beside a session: it breaks no capture, and leaves their memory alone."""

import threading

import pytest
import torch
from gpu_runs import copied_bytes, settings_for
from torch import nn

from offload_runs import counted, session_in, wait_for_writes
from penstock import staging
from penstock.core.errors import PenstockWarning
from penstock.core.units import MIB
from penstock.data import values
from penstock.runtime.cuda import pools
from penstock.runtime.cuda.link import CudaLink

pytestmark = pytest.mark.gpu

WIDTH = 256
ROWS = 512


def look_after_copies(device):
    """What a thread of a lane does."""
    link = CudaLink()
    event = link.record(link.copy_stream(device))
    link.adopt_thread(device)

    def once():
        link.reached(event)
        link.synchronize(event)

    return once


def stage_copies(device):
    """What a thread of an optimizer or of a checkpoint does."""
    source, target = torch.ones(64, device=device), torch.empty(64)
    torch.cuda.synchronize()
    staging.free_idle()  # so that pinned memory is taken
    return lambda: staging.copy_across(source, target, None)


def pin_batches(device):
    """What the thread of a loader does."""
    return lambda: values.pinned(torch.ones(64), device.index)


@pytest.mark.parametrize("work", [look_after_copies, stage_copies, pin_batches])
def test_trap_35_threads_of_ours_break_no_capture(work):
    """In torch's default mode any thread that asks for an event's end, or pins memory, would."""
    device = torch.device("cuda", torch.cuda.current_device())
    static = torch.zeros(8, device=device)
    ready, captured, worked, ended = (threading.Event() for _ in range(4))

    def run():
        once = work(device)
        ready.set()
        captured.wait(10)
        while not ended.is_set():
            once()
            worked.set()

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    try:
        with torch.cuda.graph(graph):
            captured.set()
            for _ in range(20):
                static.add_(1)
            assert worked.wait(10)
    finally:
        ended.set()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [20.0] * 8


def test_trap_35_what_is_not_complete_yet_is_spilled_before_a_pause(disk_path):
    weight = torch.ones(4 * WIDTH, device="cuda").requires_grad_()
    x = torch.ones(2 * ROWS, 4 * WIDTH, device="cuda")
    with session_in(disk_path, **settings_for("host")) as session:
        loss = (x * weight).sum()
        assert copied_bytes(session)[0] == 0  # no other operator has saved since
        with session.paused():
            copied = copied_bytes(session)[0]
        assert copied == 4 * MIB
        loss.backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2 * ROWS))


def test_trap_35_a_graph_is_captured_while_a_session_is_open(disk_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).to("cuda")
    x, static = torch.randn(4 * ROWS, WIDTH).to("cuda"), torch.zeros(8, device="cuda")
    expected = torch.autograd.grad(torch.tanh(model(x)).square().mean(), model[0].weight)
    with session_in(disk_path, model, **settings_for("both")) as session:
        loss = torch.tanh(model(x)).square().mean()
        graph = torch.cuda.CUDAGraph()
        with session.paused(), torch.cuda.graph(graph):
            static.add_(1)
        graph.replay()
        found = torch.autograd.grad(loss, model[0].weight)
        assert torch.equal(found[0], expected[0])
        assert copied_bytes(session)[0] > 8 * MIB
    torch.cuda.synchronize()
    assert static.tolist() == [1.0] * 8


def test_trap_36_memory_of_a_cuda_graph_stays(disk_path):
    x = torch.ones(1024, 1024, device="cuda")
    weight = torch.full((1024, 1024), 3.0, device="cuda").requires_grad_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = x * 2  # in the graph's own pool
    graph.replay()
    torch.cuda.synchronize()
    link = CudaLink()
    assert not link.frees(output.untyped_storage())
    assert link.frees(x.untyped_storage())
    if pools.shared() is not None:
        assert link.frees(link.empty_target(1 << 20, x.device))
    with session_in(disk_path, **settings_for("host")) as session:
        with pytest.warns(PenstockWarning, match="memory of a CUDA graph"):
            loss = (weight * output + weight * x).sum()  # saves both; the first when it is complete
        wait_for_writes(session)
        assert counted(session, "kept.graph_memory") == 1
        assert copied_bytes(session)[0] == x.nbytes
        loss.backward()
        assert (weight.grad == 3).all().item()
