"""The loader: each sample once, state, bounded memory, bad records, and worlds that come and go."""

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from data_runs import epoch_of, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

import preloaded
from penstock.core.errors import (
    BudgetError,
    ChecksumError,
    ClosedError,
    ConfigError,
    DatasetError,
    PenstockWarning,
    ShortTransferError,
    TransferError,
    WorkerError,
)
from penstock.data import FlashDataset, FlashIterable, FlashLoader, Order, open_index, pack
from penstock.data.decode import gather
from penstock.io.engine import EngineSpec, Priority, Transfer
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.store.account import host_account

WINDOW = Order(kind="window", chunk_samples=8, window_chunks=16, seed=3)
ORDERS = ("sequential", "full", "window", WINDOW)


class BadSector(Syscalls):
    """Reads that touch some bytes of the file fail."""

    def __init__(self, *bad):
        self.bad = bad

    def read(self, file, address, nbytes, offset_bytes):
        if any(offset_bytes <= each < offset_bytes + nbytes for each in self.bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, address, nbytes, offset_bytes)


def world_of(path, world, state=None, **settings):
    loaders = [
        FlashLoader(FlashDataset(path, memory="1MiB"), rank=rank, world=world, **settings)
        for rank in range(world)
    ]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(state)
    return loaders


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("length", [100, 4096])
def test_each_sample_once_with_its_bytes(rows, order, length):
    path, array = rows(1000, length)
    with FlashLoader(FlashDataset(path, memory="2MiB"), 32, order=order) as loader:
        assert len(loader) == 32
        first = []
        for batch in loader:
            assert batch.dtype == torch.uint8
            assert np.array_equal(batch.numpy(), array[numbers(batch)])
            first += numbers(batch)
        second = epoch_of(loader)
        assert loader.epoch == 2
        assert sorted(first) == sorted(second) == list(range(1000))
        assert (first == second) == (order == "sequential")
        loader.set_epoch(0)
        assert epoch_of(loader) == first
        assert loader.stats()["samples"] == 3000
        assert loader.demand_bytes_per_s > 0
    with pytest.raises(ClosedError):
        next(iter(loader))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_state_of_a_few_bytes_goes_on_at_the_exact_sample(rows, order):
    path, _ = rows(500)
    with FlashLoader(FlashDataset(path, memory="1MiB"), 16, order=order, seed=9) as loader:
        whole = [numbers(batch) for batch in loader]
        loader.set_epoch(0)
        for _, batch in zip(range(11), loader, strict=False):
            last = numbers(batch)
        state = loader.state_dict()
        assert last == whole[10]
    assert len(pickle.dumps(state)) < 250
    with FlashLoader(FlashDataset(path, memory="4MiB"), 16) as other:
        other.load_state_dict(state)
        assert [numbers(batch) for batch in other] == whole[11:]
        assert other.state_dict()["epoch"] == 1


@settings(max_examples=12)
@given(
    data=st.data(),
    order=st.sampled_from(ORDERS),
    worlds=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=3),
)
def test_worlds_that_come_and_go_deliver_each_sample_once(tmp_path_factory, data, order, worlds):
    """With real reads: what ranks have trained on, in step, is counted; the rest is delivered later."""
    folder = tmp_path_factory.getbasetemp() / "worlds"
    path = folder / "rows.npy"
    if not folder.exists():
        folder.mkdir()
        array = np.zeros((211, 64), np.uint8)
        array[:, :4] = np.arange(211, dtype="<u4")[:, None].view(np.uint8)
        np.save(path, array)
    seen, state = [], None
    for world, batch_size in [*worlds, (2, 16)]:
        loaders = world_of(path, world, state, batch_size=batch_size, order=order)
        last = (world, batch_size) == (2, 16)
        steps = 10**6 if last else data.draw(st.integers(0, 4))
        for loader in loaders:
            for _, batch in zip(range(steps), loader, strict=False):
                seen += numbers(batch)
        states = [loader.state_dict() for loader in loaders]
        assert all(each["epoch"] == states[0]["epoch"] for each in states)
        state = max(states, key=lambda each: each["consumed"])
        for loader in loaders:
            loader.close()
        if state["epoch"]:
            break
    assert sorted(seen) == list(range(211))


def test_who_counts_batches_and_does_not_ask_for_more_has_the_next_epoch(rows):
    """As Lightning does: the last batch ends the epoch, for the next pass and for the state."""
    path, _ = rows(40)
    with FlashLoader(FlashDataset(path), 8, order="full", seed=1) as loader:
        expected = [epoch_of(loader) for _ in range(3)]
        loader.set_epoch(0)
        for epoch in range(2):
            batches = iter(loader)
            counted = [numbers(next(batches)) for _ in range(len(loader))]
            assert flat(counted) == expected[epoch]
        state = loader.state_dict()
        assert (state["epoch"], state["consumed"]) == (2, 0)
        loader.load_state_dict(state)
        assert epoch_of(loader) == expected[2]
    stream = FlashIterable(FlashDataset(path), 8)
    assert stream.state_after(5)["epoch"] == 1
    assert stream.state_after(4)["consumed"] == 32


def test_a_state_of_another_data_set_is_refused(rows):
    path, _ = rows(10)
    loader = FlashLoader(FlashDataset(path), 2)
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="of 11 samples, this one has 10"):
        loader.load_state_dict({**state, "samples": 11})
    with pytest.raises(ConfigError, match="version 2"):
        loader.load_state_dict({**state, "version": 2})
    loader.close()


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sequential", "full", "window"])
def test_what_is_held_is_what_was_given(rows, order):
    path, _ = rows(4000, 4096)
    with FlashLoader(FlashDataset(path, memory="2MiB"), 16, order=order) as loader:
        most = 0
        for _ in loader:
            most = max(most, loader.held_bytes)
        assert most <= 2 << 20
        assert loader.stats()["read_bytes"] >= 4000 * 4096


RESIDENT = """
import sys
from penstock.data import FlashDataset, FlashLoader

def resident_bytes():
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return 1024 * int(found["RssAnon"].split()[0])

path, size, order, memory = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
settings = {"format": "tokens", "decode": "raw", "dtype": "uint8", "extra": 0, "context": size}
batch = max(4, min(64, (1 << 20) // size))
with FlashLoader(FlashDataset(path, memory="4MiB", **{**settings, "context": 4096}), 4) as small:
    next(iter(small))  # code is not what a loader holds
before, most = resident_bytes(), 0
with FlashLoader(FlashDataset(path, memory=memory, **settings), batch, order=order) as loader:
    for epoch in range(2):
        for held in loader:
            most = max(most, resident_bytes() - before)
print(most)
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["sequential", "window", "full"])
@pytest.mark.parametrize("size", [4096, 102400, 1 << 20])
def test_what_is_resident_is_what_was_given(disk_path, size, order):
    """The system's figure, batches in use included: no more than was given, to within a twentieth."""
    memory = 64 << 20
    path = disk_path / "rows.bin"
    np.random.default_rng(0).integers(0, 256, 2 * memory, np.uint8).tofile(path)
    command = [sys.executable, "-c", RESIDENT, *map(str, (path, size, order, memory))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert 0.5 * memory < int(done.stdout) <= 1.05 * memory


def test_nothing_stays_in_the_page_cache(rows):
    path, _ = rows(2000, 4096)
    with FlashLoader(FlashDataset(path, memory="1MiB"), 16, order="window") as loader:
        if not loader._resources.reader._open(0).direct:
            pytest.skip("no direct I/O in the directory for temporary files")
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert len(epoch_of(loader)) == 2000
        cached = pages_in_cache(descriptor, os.path.getsize(path))
        os.close(descriptor)
    assert cached <= 8  # the header, and what the kernel reads with it


def pages_in_cache(descriptor, nbytes):
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        pages = -(-nbytes // 4096)
        found = (ctypes.c_ubyte * pages)()
        view = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        assert libc.mincore(address, ctypes.c_size_t(nbytes), found) == 0
        del view
        return sum(each & 1 for each in found)


def test_a_record_longer_than_the_memory_is_named(disk_path):
    """Where it is, how long, and the least that would do: with that, it does."""
    path = disk_path / "long.npy"
    np.save(path, np.zeros((3, 1 << 21), np.uint8))
    with pytest.raises(BudgetError, match=r"sample 2 of .*long.npy', 2097152 bytes: give"):
        FlashDataset(path, memory="1MiB")[2]
    with pytest.raises(BudgetError, match="longest sample is 0, of 2097152 bytes"):
        FlashLoader(FlashDataset(path, memory="1MiB"), 1)
    told = BudgetError("", slot="", limit_bytes=0, least_bytes=1 << 20)
    for _ in range(5):
        dataset = FlashDataset(path, memory=told.least_bytes, decode=head)
        with FlashLoader(dataset, 1, order="full") as loader:
            try:
                assert len(list(loader)) == 3
                break
            except BudgetError as error:
                told = error
    else:
        pytest.fail("the least that would do does not do")


def test_memory_that_the_process_has_not_is_named_with_what_holds_it(disk_path, monkeypatch):
    path = disk_path / "long.npy"
    np.save(path, np.zeros((3, 1 << 21), np.uint8))
    memory = host_account()
    before = memory.used_bytes
    with FlashLoader(FlashDataset(path, memory="16MiB", decode=head), 1) as loader:
        monkeypatch.setattr(memory, "limit_bytes", before + (3 << 20))
        assert len(list(loader)) == 3
        assert memory.peak_bytes >= memory.used_bytes >= before + (2 << 20)
    memory.force(2 << 20, "others")
    with (
        FlashLoader(FlashDataset(path, memory="16MiB", decode=head), 1) as loader,
        pytest.raises(BudgetError, match=r"do not fit in the memory budget.*others 2.00 MiB"),
    ):
        list(loader)
    memory.free(2 << 20, "others")
    assert memory.used_bytes == before


def test_batches_that_turn_out_large_leave_less_to_read_into(rows):
    path, _ = rows(64, 512)
    dataset = FlashDataset(path, memory="1MiB", decode=lambda sample: np.zeros(1 << 12, np.uint8))
    with FlashLoader(dataset, 32, order="full") as loader:
        assert sum(len(batch) for batch in loader) == 64
        assert loader._resources.waiting_bytes >= 3 * 32 << 12
        assert loader.held_bytes <= 1 << 20
    dataset = FlashDataset(path, memory="1MiB", decode=lambda sample: np.zeros(1 << 14, np.uint8))
    with FlashLoader(dataset, 32) as loader, pytest.raises(BudgetError, match="batches that wait"):
        list(loader)


# -- bad records ----------------------------------------------------------------------------------


def bad_engine(*rows_that_fail, length=4096):
    """The device fails where these rows are; ``.npy`` headers take 128 bytes."""
    where = [128 + row * length + length // 2 for row in rows_that_fail]
    return ThreadEngine(2, 1 << 20, syscalls=BadSector(*where))


@pytest.mark.parametrize("order", ["sequential", "full", "window"])
def test_one_bad_sector_is_one_bad_sample(rows, order):
    """Also where it was read together with its neighbours."""
    path, _ = rows(600, 4096)
    engine = bad_engine(77, 301)
    dataset = FlashDataset(path, memory="1MiB", on_error="skip", engine=engine)
    with FlashLoader(dataset, 10, order=order) as loader:
        seen = epoch_of(loader)
        lost = sorted(set(range(600)) - set(seen))
        assert len(seen) == len(set(seen))
        assert {77, 301} <= set(lost)
        assert len(lost) <= 6  # a sector is shared with the row before it, or the one after
        assert loader.stats()["skipped"] == len(lost)
        assert "Input/output error" in loader.stats()["last_errors"][0]
        assert "reading sample" in loader.stats()["last_errors"][0]
    dataset = FlashDataset(path, memory="1MiB", engine=engine)
    with (
        FlashLoader(dataset, 10, order=order) as loader,
        pytest.raises(TransferError, match="Input/output error") as told,
    ):
        list(loader)
    assert "reading sample" in told.value.__notes__[0]
    with pytest.raises(TransferError):
        dataset[77]
    assert dataset[500][0] == 500 & 255
    dataset.close()
    engine.close()


def test_a_batch_of_bad_samples_only_is_no_batch_for_torchs_loader(rows):
    """It has to return something: it is told why there is nothing, and not that a list has no item 0."""
    path, _ = rows(40, 8192)
    engine = bad_engine(7, length=8192)
    dataset = FlashDataset(path, on_error="skip", engine=engine)
    assert len(dataset.__getitems__([6, 7, 9])) == 2
    assert dataset.skipped == 1
    with pytest.raises(TransferError, match="Input/output error") as told:
        list(DataLoader(dataset, batch_size=1))
    assert "none of the 1 samples" in told.value.__notes__[-1]
    dataset.close()
    engine.close()


def test_a_bad_checksum_is_raised_or_skipped(rows, disk_path):
    path, array = rows(100, 777)
    written = pack(open_index(path), disk_path / "a.pstk")
    opened = open_index(written.path)
    place = int(opened.index.locate(np.array([42])).offset[0, 0])
    times = os.stat(written.path)
    with open(written.path, "r+b") as file:
        file.seek(place + 300)
        byte = file.read(1)[0]
        file.seek(place + 300)
        file.write(bytes([byte ^ 1]))
    os.utime(written.path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ChecksumError, match=r"sample 42 of .*a.pstk'"):
        FlashDataset(written.path)[42]
    with FlashLoader(FlashDataset(written.path, on_error="skip"), 10) as loader:
        assert sorted(epoch_of(loader)) == [i for i in range(100) if i != 42]
    found = FlashDataset(written.path, verify=False)[42].numpy()
    assert (found != array[42]).sum() == 1


def test_a_file_that_goes_or_shrinks_while_it_is_read(rows):
    for name in ("a.npy", "b.npy"):
        path, _ = rows(50, 4096, name=name)
    dataset = FlashDataset(path.parent)
    os.truncate(path, 4096 * 20)
    with pytest.raises(ShortTransferError, match="the file ends there"):
        dataset[95]
    os.unlink(path.parent / "a.npy")
    with pytest.raises(DatasetError, match=r"a.npy' is missing: it was there"):
        dataset[0]


def explode(sample):
    raise ValueError(f"no sense in {sample.index}")


def test_what_a_function_raises_is_raised(rows):
    path, _ = rows(50)
    with (
        FlashLoader(FlashDataset(path, decode=explode), 5) as loader,
        pytest.raises(ValueError, match="no sense in"),
    ):
        list(loader)


# -- threads and processes ------------------------------------------------------------------------


def head(sample):
    return np.frombuffer(sample.data[:8], np.uint8).copy()


def die(sample):
    os.kill(os.getpid(), signal.SIGKILL)


def test_decoding_in_threads_and_processes_gives_the_same(rows):
    path, _ = rows(40)
    found = []
    for lanes in ({}, {"decode_threads": 3}, {"decode_processes": 2}):
        with FlashLoader(FlashDataset(path, decode=head), 16, order="full", **lanes) as loader:
            found.append(epoch_of(loader))
    assert found[0] == found[1] == found[2]
    assert sorted(found[0]) == list(range(40))


def test_a_decoding_process_that_is_killed_is_an_error_that_says_so(rows):
    path, _ = rows(40)
    with (
        FlashLoader(FlashDataset(path, decode=die), 16, decode_processes=1) as loader,
        pytest.raises(WorkerError, match="was killed"),
    ):
        list(loader)


def test_no_thread_is_left(rows):
    path, _ = rows(200)
    before = set(threading.enumerate())
    loader = FlashLoader(FlashDataset(path), 5)
    for _ in loader:
        break
    loader.close()
    loader.close()
    assert set(threading.enumerate()) <= before
    loader = FlashLoader(FlashDataset(path), 5)
    batches = iter(loader)
    next(batches)
    del batches, loader
    gc.collect()
    left = [t for t in threading.enumerate() if t not in before and t.name == "penstock-data"]
    for thread in left:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_pinned_memory_without_a_device_is_told(rows):
    path, _ = rows(4)
    with pytest.warns(PenstockWarning, match="no CUDA device"):
        FlashLoader(FlashDataset(path), 2, pin_memory=True).close()


def test_a_driver_that_pins_no_more_is_told_once(rows, monkeypatch):
    """TRAPS rule 16: a failed pin degrades, with a warning."""
    path, array = rows(40)

    def refuse(value, device):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("penstock.data.loader.pinned", refuse)
    with FlashLoader(FlashDataset(path), 8) as loader:
        loader._pin = True
        with pytest.warns(PenstockWarning, match="plain memory from now on") as told:
            found = list(loader)
        assert len(told) == 1
    assert np.array_equal(np.concatenate(found), array[flat(map(numbers, found))])


def test_a_gpu_direct_engine_is_refused(rows):
    """It takes addresses of device memory, and samples are decoded in host memory."""
    path, _ = rows(4)

    class Direct(ThreadEngine):
        spec = EngineSpec(name="direct", workers=1, piece_bytes=4096, gpu_direct=True)

    engine = Direct(1, 4096)
    with pytest.raises(ConfigError, match="device memory"):
        FlashLoader(FlashDataset(path, engine=engine), 2)
    engine.close()


class Urged(ThreadEngine):
    """Reads that nobody waits for do not end, or late."""

    urged = given_up = 0

    def submit_batch(self, batch):
        inner = super().submit_batch(batch)

        def end():
            inner.add_done_callback(lambda done: outer.done or outer.settle(done.error))

        def promote(_, priority):
            self.urged += priority is Priority.DEMAND
            end()

        def give_up():
            self.given_up += not outer.done
            end()

        outer = Transfer(inner.nbytes, promote=promote)
        timer = threading.Timer(5, give_up)
        timer.daemon = True
        timer.start()
        return outer


@pytest.mark.parametrize("early", [False, True])
def test_reads_become_demands_when_training_waits_for_them(rows, early):
    """Whether it asked before the loader came to them, or after."""
    path, _ = rows(64, 4096)
    engine = Urged(2, 1 << 20)
    with FlashLoader(FlashDataset(path, engine=engine), 8) as loader:
        if early:
            assert sorted(epoch_of(loader)) == list(range(64))
        else:
            batches = iter(loader)
            time.sleep(0.1)  # the loader waits already
            assert len(next(batches)) == 8
        assert engine.urged > 0
        assert engine.given_up == 0
    engine.close()


def test_memory_is_pinned_on_the_device_of_whoever_iterates(rows, monkeypatch):
    """A thread's own first device is another: there it would take memory from whoever trains on that."""
    path, _ = rows(16)
    chosen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with FlashLoader(FlashDataset(path), 8, pin_memory=True) as loader:
        assert len(list(loader)) == 2
    assert set(chosen) == {3}


@pytest.mark.gpu
def test_pinned_memory(rows):
    path, array = rows(40)
    with FlashLoader(FlashDataset(path), 8, pin_memory=True) as loader:
        for batch in loader:
            assert batch.is_pinned()
            on_device = batch.to("cuda", non_blocking=True)
            assert np.array_equal(on_device.cpu().numpy(), array[numbers(batch)])


# -- torch's own loader ---------------------------------------------------------------------------


def flat(batches):
    return [number for batch in batches for number in batch]


def of_torch(dataset, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        return [numbers(batch) for batch in DataLoader(dataset, **settings)]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_by_number(rows, workers):
    """The parent has read, too: workers make what reads anew."""
    path, _ = rows(60)
    dataset = FlashDataset(path, memory="4MiB")
    assert dataset[5][0] == 5
    generator = torch.Generator().manual_seed(0)
    found = of_torch(dataset, batch_size=8, num_workers=workers, shuffle=True, generator=generator)
    assert sorted(flat(found)) == list(range(60))
    shares = [DistributedSampler(dataset, num_replicas=2, rank=rank, seed=1) for rank in (0, 1)]
    both = [flat(of_torch(dataset, batch_size=8, sampler=share)) for share in shares]
    assert sorted(both[0] + both[1]) == list(range(60))
    dataset.close()


def test_torchs_loader_with_spawned_workers(rows):
    path, _ = rows(30)
    found = of_torch(
        FlashDataset(path), batch_size=8, num_workers=1, multiprocessing_context="spawn"
    )
    assert flat(found) == list(range(30))


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_as_a_stream(rows, workers):
    """Workers in turns deliver what the loader of our own does, and go on from a state."""
    path, _ = rows(90)
    dataset = FlashDataset(path, memory="4MiB")
    with FlashLoader(dataset, 8, order=WINDOW) as loader:
        expected = [numbers(batch) for batch in loader]
    stream = FlashIterable(dataset, 8, order=WINDOW)
    assert len(stream) == 12
    assert of_torch(stream, batch_size=None, num_workers=workers) == expected
    stream.load_state_dict(stream.state_after(5))
    assert of_torch(stream, batch_size=None, num_workers=workers) == expected[5:]
    dataset.close()


def test_workers_that_stay_have_the_next_epoch(rows):
    path, _ = rows(60)
    dataset = FlashDataset(path, memory="4MiB")
    with FlashLoader(dataset, 8, order="full") as loader:
        expected = [[numbers(batch) for batch in loader] for _ in range(2)]
    stream = FlashIterable(dataset, 8, order="full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
        for epoch in range(2):
            stream.set_epoch(epoch)
            assert [numbers(batch) for batch in loader] == expected[epoch]
    dataset.close()


def test_a_stream_knows_its_rank_as_the_loader_does(rows, monkeypatch):
    path, _ = rows(60)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    stream = FlashIterable(FlashDataset(path), 8)
    assert (stream.share.rank, stream.share.world) == (1, 3)
    with FlashLoader(FlashDataset(path), 8) as loader:
        assert loader.share == stream.share


KILLED_WORKER = """
import os, signal, sys
from torch.utils.data import DataLoader
from penstock.data import FlashDataset

class Dies(FlashDataset):
    def __getitems__(self, samples):
        if 17 in samples:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(samples)

if __name__ == "__main__":
    list(DataLoader(Dies(sys.argv[1]), batch_size=8, num_workers=1))
"""


def test_a_worker_of_torchs_loader_that_is_killed(rows, tmp_path):
    """An error, and no hang. Which one is torch's affair: it raises wherever the process happens to be,
    which may be in the midst of a tensor from that very worker.
    """
    path, _ = rows(60)
    script = tmp_path / "dies.py"
    script.write_text(KILLED_WORKER)
    done = preloaded.run([script, path], timeout=120)
    assert done.returncode != 0
    assert "Error" in done.stderr


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1, "order": "random"}, "none of"),
        ({"batch_size": 1, "rank": 3, "world": 2}, "rank 3"),
        ({"batch_size": 1, "decode_threads": 0}, "cannot decode"),
    ],
)
def test_what_makes_no_sense_is_refused(rows, settings, says):
    path, _ = rows(4)
    with pytest.raises(ConfigError, match=says):
        FlashLoader(FlashDataset(path), **settings)


def test_an_unknown_policy_is_refused(rows):
    path, _ = rows(4)
    with pytest.raises(ConfigError, match="on_error is 'ignore'"):
        FlashDataset(path, on_error="ignore")


# -- large batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["window", "full"])
def test_batches_that_are_kept_keep_their_bytes(rows, order):
    """Their memory is used again only when they are dropped; also after the loader is closed."""
    path, array = rows(96, 65536)
    with FlashLoader(FlashDataset(path, memory="32MiB"), 16, order=order) as loader:
        kept = list(loader)
        dropped = [numbers(batch) for batch in loader]
        reused = loader._resources._batches
        assert reused.used_bytes == 96 * 65536
    for batch in kept:
        assert np.array_equal(batch.numpy(), array[numbers(batch)])
    assert sorted(flat(dropped)) == sorted(flat(map(numbers, kept))) == list(range(96))
    del batch, kept
    gc.collect()
    assert reused.used_bytes == reused.touched_bytes == 0


@pytest.fixture
def blocks(disk_path):
    """A set of 512 raw rows of 4 KiB that begin with their number, whole blocks of the file; rows."""
    array = np.random.default_rng(1).integers(0, 256, (512, 4096), np.uint8)
    array[:, :4] = np.arange(512, dtype="<u4")[:, None].view(np.uint8)
    array.tofile(disk_path / "blocks.bin")
    raw = {"format": "tokens", "decode": "raw", "dtype": "uint8", "extra": 0, "context": 4096}
    return lambda **settings: FlashDataset(disk_path / "blocks.bin", **{**raw, **settings}), array


@pytest.mark.parametrize("chosen", ["sequential", Order(kind="window", window_chunks=16), "full"])
def test_batches_are_the_memory_that_was_read_to(blocks, chosen, monkeypatch):
    """Nothing is copied where samples are blocks of their own; who drops batches reuses their memory."""
    dataset, array = blocks
    copied = []
    monkeypatch.setattr("penstock.data.decode.gather", lambda *args: copied.append(gather(*args)))
    settings = {"order": chosen, "ready": 1}
    with FlashLoader(dataset(memory="2MiB", context=32768), 1, **settings) as loader:
        memory = loader._resources.memory
        for _ in range(4):
            for batch in loader:
                first = int.from_bytes(bytes(batch[0, :4].tolist()), "little")
                assert np.array_equal(batch.numpy().reshape(-1, 4096), array[first : first + 8])
                batch[:] = 255  # it is whoever's it is
        assert len(copied) < 16  # of 256: where the read memory begins again, or two are neighbours
        assert loader._resources.reader.lends
        assert memory.held_bytes <= 2 << 20


def test_who_keeps_batches_has_their_memory(blocks):
    """The loader goes on with other memory: nothing is overwritten, and only what is kept is kept."""
    dataset, array = blocks
    with FlashLoader(dataset(memory="1MiB"), 16, order="sequential") as loader:
        memory = loader._resources.memory
        batches = iter(loader)
        kept = [next(batches)]
        old = weakref.ref(memory.arena._mapping)
        kept += batches
        assert not loader._resources.reader.lends
        assert old() is not None
        assert memory.held_bytes <= 1 << 20
        assert epoch_of(loader) == list(range(512))
        for place, batch in enumerate(kept):
            assert np.array_equal(batch.numpy(), array[16 * place : 16 * place + 16])
        del batch, kept
        gc.collect()
        assert old() is None


@pytest.mark.parametrize("memory", range(2200 << 10, 2600 << 10, 48 << 10))
def test_who_keeps_an_epoch_has_the_next_one(blocks, memory):
    """Also where what is left of the read memory is too little to begin with."""
    dataset, _ = blocks
    with FlashLoader(dataset(memory=memory), 16, order="sequential") as loader:
        kept = list(loader)
        assert epoch_of(loader) == flat(map(numbers, kept)) == list(range(512))


def test_a_batch_outlives_its_loader(blocks):
    dataset, array = blocks
    with FlashLoader(dataset(memory="2MiB"), 16, order="sequential") as loader:
        batch = next(iter(loader))
        mapping = weakref.ref(loader._resources.memory.arena._mapping)
        assert loader._resources.reader.lends
    assert np.array_equal(batch.numpy(), array[:16])
    del batch, loader
    gc.collect()
    assert mapping() is None


@pytest.mark.parametrize(
    ("settings", "tail"), [({"context": 16384, "extra": 1}, "uneven"), ({"context": 32768}, "pad")]
)
def test_a_byte_of_two_samples_is_in_two_batches(blocks, settings, tail):
    """Samples that overlap, and such as are there twice, are copied: a batch may be written to."""
    dataset, array = blocks
    stream, length = array.reshape(-1), settings["context"] + settings.get("extra", 0)
    loaders = [
        FlashLoader(dataset(memory="8MiB", **settings), 3, rank=r, world=2, tail=tail, order="sequential")
        for r in range(2)
    ]  # fmt: skip
    for loader in loaders:
        with loader:
            for batch in loader:
                for row in batch:
                    first = int.from_bytes(bytes(row[:4].tolist()), "little") * 4096
                    assert np.array_equal(row.numpy(), stream[first : first + length])
                batch[:] = 255


def test_small_batches_are_made_together(rows):
    """Each is a tensor of its own: of its own length, and written to without touching others."""
    path, array = rows(400, 1024)
    with FlashLoader(FlashDataset(path, memory="4MiB"), 8, order="window") as loader:
        assert loader._lump == 8
        batches = list(loader)
    for batch in batches:
        assert batch.untyped_storage().nbytes() == 8 * 1024
        assert np.array_equal(batch.numpy(), array[numbers(batch)])
        batch[:, 4:] = 0
