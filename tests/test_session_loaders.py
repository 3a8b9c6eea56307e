"""Data loaders that share the engine of a session: who goes first, and what plans leave to them."""

import threading
import weakref

import numpy as np
import pytest
import torch

import penstock
from offload_runs import MACHINE, Trace, counted, wait_until
from penstock.core.errors import ClosedError
from penstock.data import FlashDataset, FlashLoader
from penstock.data.reader import Pending
from penstock.io.engine import Priority, ReadBatch
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.observe.counters import PLANS
from penstock.store.engine import shared_engine

LAYERS = 6


class Feeds:
    """A loader that needs so much."""

    def __init__(self, bytes_per_s):
        self.read_demand_bytes_per_s = bytes_per_s

    def rest(self):
        pass


def network():
    torch.manual_seed(0)
    layers = [
        layer for _ in range(LAYERS) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())
    ]
    return torch.nn.Sequential(*layers)


def train(net, batches, trace=None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step, batch in enumerate(batches):
        net(batch).square().mean().backward()
        if trace is not None:
            trace.note_gradients(step, net)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def floats(disk_path, monkeypatch):
    """A set of rows for ``network``, and the rows."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(disk_path / "indexes"))
    array = np.random.default_rng(0).random((640, 256), np.float32)
    np.save(disk_path / "rows.npy", array)
    return disk_path / "rows.npy", array


def some(rows, steps):
    return [torch.from_numpy(rows[:64])] * steps


def test_a_loader_and_a_session_share_an_engine(session_for, floats, monkeypatch):
    """All goes through one line, and training is the same to the last bit."""
    path, _ = floats
    plain, shared, priorities = Trace(), Trace(), set()
    with FlashLoader(FlashDataset(path, memory="1MiB"), 64, seed=2) as loader:
        train(network(), loader, plain)
    net = network()
    with session_for(net, device_memory="256KiB", policy="auto", codec="none") as session:
        engine = shared_engine()
        submit = engine.submit_batch

        def noted(batch: ReadBatch):
            priorities.add(batch.priority)
            return submit(batch)

        monkeypatch.setattr(engine, "submit_batch", noted)
        assert session._stores.tiers["flash"].engine is engine
        with FlashLoader(FlashDataset(path, memory="1MiB"), 64, seed=2, session=session) as loader:
            assert loader._resources.engine is engine
            train(net, loader, shared)
            assert loader.read_demand_bytes_per_s >= loader.demand_bytes_per_s > 0
            assert session.summary().loaders_bytes_per_s > 0
        assert session._loaders.demand_bytes_per_s == 0
    plain.assert_same_bits(shared)
    assert priorities == {Priority.BACKGROUND}


@pytest.mark.parametrize("order", ["sequential", "full"])
def test_a_loader_rests_while_its_session_is_suspended(session_for, floats, order):
    """Its memory goes, too; then the epoch goes on at the same sample, and training to the same bits."""
    path, rows = floats
    settings = {"order": order, "seed": 2}
    dataset = FlashDataset(path, memory="2MiB")
    plain, slept, maps = Trace(), Trace(), []
    with FlashLoader(dataset, 64, **settings) as loader:
        train(network(), loader, plain)
    net = network()
    with (
        session_for(net, device_memory="256KiB", codec="none") as session,
        FlashLoader(dataset, 64, session=session, **settings) as loader,
    ):

        def with_rests(*after):
            for number, batch in enumerate(loader, 1):
                yield batch
                if number not in after:
                    continue
                state, stats, kept = loader.state_dict(), loader.stats(), batch.clone()
                maps.append(weakref.ref(loader._resources.memory.arena._mapping))
                assert penstock.suspend(session).nbytes > 0
                assert loader.held_bytes == 0
                assert loader._resources is loader._stream is None
                assert loader.stats()["read_bytes"] == stats["read_bytes"]
                assert torch.equal(batch, kept)
                penstock.resume(session)
                assert loader.state_dict() == state

        train(net, with_rests(3, 7), slept)
        assert loader.epoch == 1
        penstock.suspend(session)  # between two epochs
        penstock.resume(session)
        assert sum(len(batch) for batch in loader) == len(rows)
        assert loader.epoch == 2
        assert [each() for each in maps] == [None, None]
    plain.assert_same_bits(slept)
    with pytest.raises(ClosedError, match="loader is closed"):
        next(iter(loader))


def test_plans_leave_loaders_what_they_need(session_for, floats):
    """Known beforehand, it is in the first plan; a change makes another, and noise does not."""
    _, rows = floats
    net = network()
    with session_for(net, device_memory="256KiB", policy="auto", codec="none") as session:
        feeds = Feeds(1e9)
        session.add_loader(feeds)
        train(net, some(rows, 6))
        machine = session.planner.machine
        assert machine.flash_read_bytes_per_s == pytest.approx(2e9)
        assert machine.flash_write_bytes_per_s == MACHINE.flash_write_bytes_per_s
        plans = session.planner.replans
        feeds.read_demand_bytes_per_s = 1.1e9
        train(net, some(rows, 2))
        assert session.planner.replans == plans
        feeds.read_demand_bytes_per_s = 1.5e9
        train(net, some(rows, 4))
        assert session.planner.machine.flash_read_bytes_per_s == pytest.approx(1.5e9)
        assert counted(session, f"{PLANS}.demand") == 1
        assert "data loaders need 1.50 GB/s of flash; the plan leaves them 1.50 GB/s" in str(
            session.summary()
        )
        session.remove_loader(feeds)
        train(net, some(rows, 4))
        assert session.planner.machine == MACHINE
        assert counted(session, f"{PLANS}.demand") == 2


def test_a_demand_that_is_declared_counts_until_it_is_measured(session_for, floats):
    path, _ = floats
    with session_for(network(), device_memory="256KiB") as session:
        settings = {"session": session, "demand": 7e8}
        with FlashLoader(FlashDataset(path, memory="1MiB"), 64, **settings) as loader:
            assert session._loaders.demand_bytes_per_s == 7e8
            list(loader)
            assert loader.read_demand_bytes_per_s != 7e8


def test_only_what_the_training_waits_for_is_urgent(floats, monkeypatch):
    """Reads that nobody waits for keep their place behind all others, until somebody does."""
    gate, urged = threading.Event(), []

    class Gate(Syscalls):
        def read(self, *args):
            assert gate.wait(60)
            return super().read(*args)

    def noted(pending):
        urged.append(pending)

    monkeypatch.setattr(Pending, "urge", noted)
    engine = ThreadEngine(1, 1 << 20, syscalls=Gate())
    path, _ = floats
    with FlashLoader(FlashDataset(path, memory="1MiB", engine=engine), 64) as loader:
        batches, found = iter(loader), []
        stream = loader._stream
        wait_until(lambda: stream._awaited is not None, "the loader waits for its first read")
        assert urged == []
        taker = threading.Thread(target=lambda: found.append(next(batches)))
        taker.start()
        wait_until(lambda: urged == [stream._awaited], "the training has made it urgent")
        gate.set()
        taker.join(60)
        assert len(found[0]) == 64
        batches.close()
    engine.close()


def test_a_loader_joins_open_sessions_only(session_for, floats):
    """One whose session has ended goes on reading."""
    path, _ = floats
    dataset = FlashDataset(path, memory="1MiB")
    session = session_for(network(), device_memory="256KiB")
    with pytest.raises(ClosedError, match="session is new"):
        FlashLoader(dataset, 64, session=session)
    with session:
        loader = FlashLoader(dataset, 64, session=session)
    assert len(list(loader)) == 10
    loader.close()
    with pytest.raises(ClosedError, match="session is closed"):
        FlashLoader(dataset, 64, session=session)


def test_a_loader_joins_a_session_without_flash(session_for, floats):
    path, _ = floats
    fields = {"flash": (), "flash_capacity": None, "host_memory": "1MiB", "device_memory": "256KiB"}
    with (
        session_for(network(), **fields) as session,
        FlashLoader(FlashDataset(path, memory="1MiB"), 64, session=session) as loader,
    ):
        assert len(list(loader)) == 10
