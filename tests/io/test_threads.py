"""The thread engine: the conformance suite, direct and buffered, and what is its own."""

import errno
import os
import random
import threading
import time

import pytest

from penstock.core.errors import ConfigError, TransferError
from penstock.io import files
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.testing.engines import (
    PATIENCE_S,
    PIECE_BYTES,
    EngineTests,
    aligned,
    move,
)
from penstock.testing.faults import FaultySyscalls, GatedSyscalls


class ThreadEngineTests(EngineTests):
    def make_engine(self, *, threads, piece_bytes, syscalls):
        return ThreadEngine(threads, piece_bytes, syscalls=syscalls)


class TestDirect(ThreadEngineTests):
    def make_file(self, directory):
        file = files.open_unlinked(directory)
        if not file.direct:
            pytest.skip("no direct I/O in the directory for temporary files")
        return file


class TestBuffered(ThreadEngineTests):
    def make_file(self, directory):
        return buffered_file(directory)


def buffered_file(directory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_BUFFERED_IO", "1")
        return files.open_unlinked(directory)


@pytest.fixture
def file(tmp_path):
    file = files.open_unlinked(tmp_path)
    yield file
    file.close()


def threads_now():
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-io-")]


def test_spec_and_defaults(monkeypatch):
    monkeypatch.setenv("PENSTOCK_IO_THREADS", "3")
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "64KiB")
    spec = ThreadEngine().spec
    assert (spec.name, spec.workers, spec.piece_bytes) == ("threads", 3, 65536)
    assert not spec.gpu_direct


@pytest.mark.parametrize(("threads", "piece"), [(0, 4096), (-1, 4096), (1, 0), (1, 4095), (1, -1)])
def test_senseless_settings(threads, piece):
    with pytest.raises(ConfigError, match=str(threads if threads < 1 else piece)):
        ThreadEngine(threads, piece)


def test_threads_start_when_there_is_work_and_no_more_than_needed(file):
    before = len(threads_now())
    engine = ThreadEngine(3, PIECE_BYTES)
    assert len(threads_now()) == before
    move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert len(threads_now()) == before + 1
    for _ in range(5):
        while engine._queue._idle != 1:  # the worker settles first and goes idle then
            time.sleep(0.001)
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert len(threads_now()) == before + 1
    move(engine, "write", file, 0, aligned(9 * PIECE_BYTES)).wait(PATIENCE_S)
    assert len(threads_now()) == before + 3
    assert all(thread.daemon for thread in threads_now())
    engine.close()
    assert len(threads_now()) == before


def test_one_idle_worker_is_not_counted_twice(file):
    gate = GatedSyscalls()
    engine = ThreadEngine(2, PIECE_BYTES, syscalls=gate)
    gate.let_through()
    move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    gate.wait_for_call()
    transfers = [move(engine, "write", file, 0, aligned(PIECE_BYTES)) for _ in range(2)]
    gate.wait_for_call()
    gate.wait_for_call()  # both are in flight: the second did not queue behind the first
    gate.open()
    for transfer in transfers:
        transfer.wait(PATIENCE_S)
    engine.close()


def test_pieces_of_one_request_run_side_by_side(file):
    gate = GatedSyscalls()
    engine = ThreadEngine(3, PIECE_BYTES, syscalls=gate)
    transfer = move(engine, "write", file, 0, aligned(3 * PIECE_BYTES))
    for _ in range(3):
        gate.wait_for_call()
    gate.open()
    transfer.wait(PATIENCE_S)
    engine.close()


def test_fewer_threads_than_wanted_do_it(file, monkeypatch):
    engine = ThreadEngine(2, PIECE_BYTES)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        move(engine, "write", file, 0, aligned(4 * PIECE_BYTES)).wait(PATIENCE_S)
    engine.close()


def test_busy_for_ever_is_an_error_in_the_end(file, monkeypatch):
    class Busy(Syscalls):
        def write(self, *_):
            raise BlockingIOError(errno.EAGAIN, "busy")

    monkeypatch.setattr("penstock.io.threads._BUSY_RETRIES", 3)
    engine = ThreadEngine(1, PIECE_BYTES, syscalls=Busy())
    with pytest.raises(TransferError) as caught:
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert caught.value.errno == errno.EAGAIN
    engine.close()


def test_a_closed_file_fails_the_transfer_and_not_another_file(tmp_path):
    """A descriptor that is reused would send the bytes into somebody else's file."""
    file = files.open_unlinked(tmp_path)
    engine = ThreadEngine(1, PIECE_BYTES)
    file.close()
    with pytest.raises(RuntimeError, match="after its close"):
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    engine.close()


def test_buffered_pages_do_not_stay_in_the_cache(disk_path):
    path = disk_path / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_BUFFERED_IO", "1")
        file = files.open_path(path, "w+")
    engine = ThreadEngine(2, 65536, syscalls=Unsteady())
    buffer = aligned(1 << 20, seed=0)
    for op in ("write", *["read"] * 6):
        move(engine, op, file, 0, buffer).wait(PATIENCE_S)
        assert cached_bytes(file.fd, len(buffer)) == 0
    os.pread(file.fd, len(buffer), 0)
    assert cached_bytes(file.fd, len(buffer)) == len(buffer)  # the probe does see cached pages
    engine.close()
    file.close()


def test_a_failed_write_out_fails_the_write(tmp_path):
    file = buffered_file(tmp_path)
    engine = ThreadEngine(1, PIECE_BYTES, syscalls=FaultySyscalls(drop_faults=[1]))
    with pytest.raises(TransferError) as caught:
        move(engine, "write", file, 0, aligned(3 * PIECE_BYTES)).wait(PATIENCE_S)
    assert (caught.value.errno, caught.value.offset_bytes) == (errno.EIO, PIECE_BYTES)
    engine.close()
    file.close()


def test_the_cause_of_a_failure_is_kept(tmp_path):
    file = files.open_path(tmp_path / "data", "x+")
    file.preallocate(PIECE_BYTES)
    reader = files.open_path(tmp_path / "data", "r")
    engine = ThreadEngine(1, PIECE_BYTES)
    with pytest.raises(TransferError, match="Bad file descriptor") as caught:
        move(engine, "write", reader, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.path == str(tmp_path / "data")
    engine.close()


class Unsteady(Syscalls):
    """Neighbours finish in any order, so that reading ahead would bring back what is let go."""

    delays_s = random.Random(0)

    def read(self, file, address, nbytes, offset_bytes):
        time.sleep(self.delays_s.choice([0, 0, 0, 0, 0.001, 0.005, 0.02, 0.05]))
        return super().read(file, address, nbytes, offset_bytes)


def cached_bytes(fd, nbytes):
    """How much of a file is in the page cache, by ``mincore``."""
    import ctypes
    import mmap

    libc = ctypes.CDLL(None)
    with mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        start = ctypes.c_char.from_buffer(view)
        pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert libc.mincore(address, ctypes.c_size_t(nbytes), pages) == 0
        del start
        return sum(page & 1 for page in pages) * mmap.PAGESIZE
