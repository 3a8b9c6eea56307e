"""Many short reads at once: every engine, the end of a file, entries that fail, and who goes first."""

import errno
from concurrent.futures import CancelledError

import numpy as np
import pytest

from penstock.core.errors import ClosedError, ConfigError, ShortTransferError, TransferError
from penstock.io import batch as batches
from penstock.io import files
from penstock.io.aio import AioEngine
from penstock.io.engine import Priority, ReadBatch
from penstock.io.threads import ThreadEngine
from penstock.testing.faults import Fail, FaultySyscalls, GatedSyscalls
from penstock.testing.transfers import PATIENCE_S, aligned, move, run_in_fork

PAGE = 4096


def aio(depth=2):
    try:
        return AioEngine(depth, 16 * PAGE)
    except ConfigError as unavailable:
        pytest.skip(str(unavailable))


def threads(depth=2):
    return ThreadEngine(depth, 16 * PAGE)


@pytest.fixture(params=[aio, threads])
def engine(request):
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def content(tmp_path):
    """A file of 700 pages and a bit, and its bytes."""
    data = np.random.default_rng(0).integers(0, 256, 700 * PAGE + 1234, np.uint8)
    (tmp_path / "data").write_bytes(data.tobytes())
    file = files.open_path(tmp_path / "data", "r")
    yield file, data
    file.close()


def batch_of(file, pages, memory, *, least=None, files=None, which=None, **more):
    count = len(pages)
    return ReadBatch(
        files=[file] if files is None else files,
        which=np.zeros(count, np.int64) if which is None else np.asarray(which),
        offset_bytes=np.asarray(pages, np.int64) * PAGE,
        address=memory.ctypes.data + np.arange(count, dtype=np.int64) * PAGE,
        nbytes=np.full(count, PAGE),
        least_bytes=np.full(count, PAGE) if least is None else np.asarray(least),
        keep_alive=memory,
        **more,
    )


@pytest.mark.parametrize("count", [1, 63, 64, 65, 700])
def test_every_entry_lands_in_its_place(engine, content, count):
    file, data = content
    pages = np.random.default_rng(count).permutation(700)[:count]
    memory = aligned(count * PAGE)
    batch = batch_of(file, pages, memory)
    assert engine.submit_batch(batch).wait(PATIENCE_S) == count * PAGE
    assert not batch.errors
    assert np.array_equal(memory.reshape(count, PAGE), data[: 700 * PAGE].reshape(-1, PAGE)[pages])


def test_the_last_granule_may_be_short(engine, content):
    """What the file has of it is whole, and one byte more is an error that says so."""
    file, data = content
    memory = aligned(2 * PAGE)
    batch = batch_of(file, [700, 3], memory, least=[1234, PAGE])
    engine.submit_batch(batch).wait(PATIENCE_S)
    assert not batch.errors
    assert np.array_equal(memory[:1234], data[700 * PAGE :])
    beyond = batch_of(file, [700, 3], memory, least=[1235, PAGE])
    engine.submit_batch(beyond).wait(PATIENCE_S)
    assert list(beyond.errors) == [0]
    assert isinstance(beyond.errors[0], ShortTransferError)


def test_an_entry_that_fails_is_one_entry(content, tmp_path):
    """Beyond the end, and of a file that was closed: the others arrive."""
    file, data = content
    engine = aio()
    closed = files.open_path(tmp_path / "data", "r")
    memory = aligned(200 * PAGE)
    pages = list(range(200))
    pages[77] = 5000
    batch = batch_of(file, pages, memory)
    engine.submit_batch(batch).wait(PATIENCE_S)
    assert list(batch.errors) == [77]
    assert np.array_equal(memory[100 * PAGE :], data[100 * PAGE : 200 * PAGE])
    mixed = batch_of(None, range(200), memory, files=[file, closed], which=[0] * 199 + [1])
    closed.close()
    engine.submit_batch(mixed).wait(PATIENCE_S)
    assert list(mixed.errors) == [199]
    assert isinstance(mixed.errors[199], ClosedError)
    engine.close()


def test_a_device_error_names_its_place(content):
    file, _ = content
    engine = ThreadEngine(1, PAGE, syscalls=FaultySyscalls({5: Fail(errno.EIO)}))
    batch = batch_of(file, range(10, 20), aligned(10 * PAGE))
    engine.submit_batch(batch).wait(PATIENCE_S)
    assert [(e.errno, e.offset_bytes, e.path) for e in batch.errors.values()] == [
        (errno.EIO, 15 * PAGE, file.path)
    ]
    assert isinstance(batch.errors[5], TransferError)
    engine.close()


def test_what_the_kernel_does_not_take_is_asked_for_again(content, monkeypatch):
    file, data = content
    calls = []

    class Reluctant(batches.Context):
        def __init__(self, depth):
            super().__init__(depth)
            self._taken, self.submit = self.submit, self._reluctant

        def _reluctant(self, count, pointers):
            calls.append(count)
            return -1 if len(calls) % 3 == 0 else self._taken(min(count, 5), pointers)

    engine = aio()
    monkeypatch.setattr(batches, "Context", Reluctant)
    memory = aligned(300 * PAGE)
    batch = batch_of(file, range(300), memory)
    engine.submit_batch(batch).wait(PATIENCE_S)
    assert not batch.errors
    assert np.array_equal(memory, data[: 300 * PAGE])
    engine.close()


def test_where_there_is_no_second_context_requests_do_it(content, monkeypatch):
    def refused(slices, bell):
        raise ConfigError("all are taken")

    file, data = content
    engine = aio()
    monkeypatch.setattr("penstock.io.aio.BatchContext", refused)
    memory = aligned(9 * PAGE)
    engine.submit_batch(batch_of(file, range(9), memory)).wait(PATIENCE_S)
    assert np.array_equal(memory, data[: 9 * PAGE])
    engine.close()


@pytest.mark.parametrize(
    ("field", "value"), [("nbytes", 0), ("nbytes", 100), ("offset_bytes", 5), ("address", 1)]
)
def test_what_a_file_cannot_be_asked_for_is_refused(content, field, value):
    file, _ = content
    engine = aio()
    batch = batch_of(file, range(3), aligned(3 * PAGE))
    getattr(batch, field)[1] = value
    with pytest.raises(ConfigError, match=rf"entry 1 .*{field}={value}"):
        engine.submit_batch(batch)
    engine.close()


def test_a_demand_goes_before_what_waits_of_a_batch(content):
    """With one worker, at a gate: one entry is under way, the demand is next."""
    file, _ = content
    gate = GatedSyscalls()
    engine = ThreadEngine(1, PAGE, syscalls=gate)
    order = []
    batch = engine.submit_batch(batch_of(file, range(4), aligned(4 * PAGE)))
    demand = move(engine, "read", file, 0, aligned(PAGE), priority=Priority.DEMAND)
    demand.add_done_callback(lambda _: order.append("demand"))
    batch.add_done_callback(lambda _: order.append("batch"))
    gate.open()
    batch.wait(PATIENCE_S)
    assert order == ["demand", "batch"]
    engine.close()


def test_close_ends_what_has_not_begun(content):
    file, _ = content
    gate = GatedSyscalls()
    engine = ThreadEngine(1, PAGE, syscalls=gate)
    batch = batch_of(file, range(4), aligned(4 * PAGE))
    transfer = engine.submit_batch(batch)
    gate.open()
    engine.close()
    transfer.wait(PATIENCE_S)
    assert all(isinstance(error, CancelledError) for error in batch.errors.values())


def test_closing_in_the_midst_of_many_batches(content):
    """Each is settled, and each entry has arrived or has an error."""
    file, data = content
    engine = aio()
    made = [(batch_of(file, range(600), m), m) for m in (aligned(600 * PAGE) for _ in range(8))]
    transfers = [engine.submit_batch(batch) for batch, _ in made]
    engine.close()
    for transfer, (batch, memory) in zip(transfers, made, strict=True):
        transfer.wait(PATIENCE_S)
        arrived = np.ones(600, bool)
        arrived[list(batch.errors)] = False
        expected = data[: 600 * PAGE].reshape(-1, PAGE)
        assert np.array_equal(memory.reshape(-1, PAGE)[arrived], expected[arrived])
    with pytest.raises(ClosedError):
        engine.submit_batch(made[0][0])


def test_a_forked_child_is_refused(content):
    file, _ = content
    engine = aio()
    memory = aligned(PAGE)
    engine.submit_batch(batch_of(file, [0], memory)).wait(PATIENCE_S)

    def child():
        with pytest.raises(ClosedError):
            engine.submit_batch(batch_of(file, [0], memory))

    run_in_fork(child)
    engine.close()
