"""The thin layer over ``torch.cuda``, on a real device: what its interface promises."""

import pytest
import torch
from gpu_runs import SMALL, settings_for

from memory_nodes import node_at
from offload_runs import session_in
from penstock.core.units import MIB
from penstock.io.engine import Priority
from penstock.observe.recorder import Recorder, Stage
from penstock.observe.totals import between
from penstock.runtime.cuda.link import CudaLink
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.pinned import Slab, node_of
from penstock.store.account import Account
from penstock.store.arena import Arena

pytestmark = pytest.mark.gpu

NBYTES = 32 * MIB
LONG = 1_000_000_000
"""Cycles of the device that take about half a second."""


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def link():
    return CudaLink()


@pytest.fixture
def mover(link, device):
    budget = Account(256 * MIB, name="host")
    slabs = [
        Slab(64 * MIB, link=link, device=device, budget=budget, name=name)
        for name in ("staging", "host tier")
    ]
    mover = CudaMover(
        device=device,
        budget=Account(1 << 40),
        recorder=Recorder(),
        link=link,
        staging=slabs[0],
        host=slabs[1],
    )
    yield mover
    mover.close()
    assert budget.used_bytes == 0


@pytest.fixture
def warm(mover, device):
    """What is made when it is first used is there: lanes, kernels, memory of the allocator."""
    for _ in range(2):
        source = torch.ones(NBYTES, dtype=torch.uint8, device=device)
        ticket = mover.write(source.untyped_storage(), HostTier, "slot")
        ticket.written.wait(10)
        target = mover.allocate(ticket)
        mover.read(HostTier, ticket, target, 0).wait(10)
        mover.use(mover.finish(target))
        torch.cuda.synchronize()
        mover.discard(HostTier, ticket)


class HostTier:
    """All that the mover asks of the host tier."""

    class spec:
        name, kind, where = "host", "host", "host memory"


def test_trap_16_registered_memory_is_pinned_until_it_is_unregistered(link, device):
    arena = Arena(8 * MIB)
    assert arena.pretouch()
    block = arena.allocate(4 * MIB)
    tensor = torch.from_numpy(block.lend(0, 4 * MIB))
    assert not tensor.is_pinned()
    assert link.pin(arena.address, arena.capacity_bytes, device) == ""
    assert tensor.is_pinned()
    link.unpin(arena.address, device)
    assert not tensor.is_pinned()
    del tensor
    arena.close()


def test_a_refused_registration_says_why_and_is_not_blamed_on_the_next_kernel(link, device):
    arena = Arena(8 * MIB)
    assert arena.pretouch()
    assert link.pin(arena.address, arena.capacity_bytes, device) == ""
    assert link.pin(arena.address, arena.capacity_bytes, device)  # twice is a mistake
    assert torch.ones(8, device=device).add_(1).sum().item() == 16
    link.unpin(arena.address, device)
    link.unpin(arena.address, device)  # also a mistake
    assert torch.ones(8, device=device).add_(1).sum().item() == 16
    arena.close()


def test_bytes_survive_the_way_out_and_back(mover, device):
    source = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device=device)
    expected = source.cpu()
    ticket = mover.write(source.untyped_storage(), HostTier, "slot")
    ticket.written.wait(10)
    del source
    target = mover.allocate(ticket)
    mover.read(HostTier, ticket, target, 0).wait(10)
    storage = mover.finish(target)
    mover.use(storage)
    found = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    assert torch.equal(found.cpu(), expected)
    mover.discard(HostTier, ticket)


def keep_busy():
    """An event that the device comes to after half a second's work."""
    torch.cuda._sleep(LONG)
    done = torch.cuda.Event()
    done.record()
    return done


def test_nothing_waits_for_a_busy_device(mover, device, warm):
    source = torch.ones(NBYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    busy = keep_busy()
    ticket = mover.write(source.untyped_storage(), HostTier, "slot")
    assert not ticket.written.done
    assert not busy.query()
    ticket.written.wait(10)
    busy = keep_busy()
    target = mover.allocate(ticket)
    mover.read(HostTier, ticket, target, 0).wait(10)
    mover.use(mover.finish(target))
    assert not busy.query()
    torch.cuda.synchronize()
    mover.discard(HostTier, ticket)


def test_pinned_copies_run_at_the_pace_of_the_link_and_are_recorded_so(mover, device):
    source = torch.ones(NBYTES, dtype=torch.uint8, device=device)

    def recorded():
        """Bytes per second of a copy out, as recorded, which begins behind other work."""
        before = mover._lanes._recorder.snapshot()
        torch.cuda._sleep(LONG)  # does not count as slow copying
        ticket = mover.write(source.untyped_storage(), HostTier, "slot")
        ticket.written.wait(10)
        mover.discard(HostTier, ticket)
        flow = between(before, mover._lanes._recorder.snapshot(), {}).flow(Stage.COPY_OUT, "host")
        assert flow.nbytes == NBYTES
        return flow.bytes_per_s

    def are_fast():
        out, back = mover.measure()
        # a pageable copy is slower, the slowest link is not; an emulated device is as fast as its host
        return (SMALL or min(out, back) > 3e9) and recorded() > out / 3

    assert any(are_fast() for _ in range(10))  # what else the machine does may slow one down


def test_a_used_target_is_free_for_its_stream_at_once(mover, device, warm):
    source = torch.ones(NBYTES, dtype=torch.uint8, device=device)
    ticket = mover.write(source.untyped_storage(), HostTier, "slot")
    ticket.written.wait(10)
    del source
    torch.cuda._sleep(LONG)
    before = torch.cuda.memory_allocated()
    target = mover.allocate(ticket)
    mover.read(HostTier, ticket, target, 0).wait(10)
    storage = mover.finish(target)
    mover.use(storage)
    assert torch.cuda.memory_allocated() == before + NBYTES
    del storage, target
    assert torch.cuda.memory_allocated() == before  # although the copy has not even begun
    torch.cuda.synchronize()
    mover.discard(HostTier, ticket)


def test_it_is_known_whether_a_graph_is_being_captured(link):
    assert not link.capturing()
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert link.capturing()


@pytest.mark.parametrize("index", range(8))
def test_each_device_has_lanes_of_its_own(disk_path, index):
    if index >= torch.cuda.device_count():
        pytest.skip(f"there is no device {index}")
    device = torch.device("cuda", index)
    weight = torch.randn(1024, 1024, device=device, requires_grad=True)
    x = torch.randn(4096, 1024, device=device)

    def gradient():
        weight.grad = None
        (x @ weight).tanh().square().mean().backward()
        return weight.grad.clone()

    expected = gradient()
    with session_in(disk_path, **settings_for("flash")):
        assert torch.equal(gradient(), expected)


def test_events_are_recorded_again_once_nobody_asks_for_them(link, device):
    stream = link.current_stream(device)
    for timed in (False, True):
        event = link.record(stream, timed=timed)
        assert link.record(stream, timed=timed) is not event
        link.reuse(event)
        assert link.record(stream, timed=not timed) is not event
        assert link.record(stream, timed=timed) is event
        link.synchronize(event)


@pytest.mark.concurrent_streams
def test_a_demand_overtakes_what_is_read_ahead(mover, device, warm):
    """A copy that cannot begin does not hold up another one."""
    sources = [
        torch.full((NBYTES // 2,), number, dtype=torch.uint8, device=device) for number in (1, 2)
    ]
    tickets = [mover.write(source.untyped_storage(), HostTier, "slot") for source in sources]
    for ticket in tickets:
        ticket.written.wait(10)
    del sources

    def came_first(cycles):
        """Whether the second was there while the first still had to wait for the target."""
        main, other = torch.cuda.current_stream(), torch.cuda.Stream()
        torch.cuda._sleep(cycles)  # the target of the first is not free before
        ahead = mover.allocate(tickets[0])
        mover.read(HostTier, tickets[0], ahead, Priority.PREFETCH).wait(10)
        with torch.cuda.stream(other):
            target = mover.allocate(tickets[1])
            mover.read(HostTier, tickets[1], target, Priority.DEMAND).wait(10)
            storage = mover.finish(target)
            mover.use(storage)
            found = torch.empty(0, dtype=torch.uint8, device=device).set_(storage).clone()
            other.synchronize()
        waits = not main.query()
        assert (found == 2).all().item()
        del ahead
        torch.cuda.synchronize()
        return waits

    assert any(came_first(times * LONG) for times in (1, 4, 16))  # the host may be slow
    for ticket in tickets:
        mover.discard(HostTier, ticket)


def test_pinned_memory_is_of_the_node_that_the_device_is_at(mover, device):
    node = node_of(device)
    if node is None:
        pytest.skip("the machine does not tell at which node the device is")
    assert {node_at(slab.arena.address) for slab in mover._slabs} == {node}
