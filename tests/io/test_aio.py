"""The asynchronous engine: the conformance suite, the kernel's refusals, and who gets which engine."""

import ctypes
import errno
import gc
import os
import platform
import queue
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from penstock.core.errors import ConfigError, TransferError
from penstock.io import aio, context, files, transfer_jobs
from penstock.io.aio import AioEngine, KernelQueue, default_engine
from penstock.io.threads import ThreadEngine
from penstock.testing.engines import PATIENCE_S, PIECE_BYTES, EngineTests, aligned, move
from penstock.testing.faults import GatedSyscalls

try:
    AioEngine().close()
except ConfigError as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)


class SyscallRing:
    """Blocking system calls in threads, in place of the kernel's: they fail when a test says so."""

    def __init__(self, syscalls, depth):
        self.syscalls = syscalls
        self.pool = ThreadPoolExecutor(depth)
        self.results = queue.SimpleQueue()
        self.closed = 0

    def submit(self, flights):
        for token, flight in flights:
            self.pool.submit(self.move, token, flight)
        return len(flights)

    def move(self, token, flight):
        job, start, nbytes = flight.piece
        start += flight.moved
        call = self.syscalls.read if job.op == "read" else self.syscalls.write
        arguments = job.file, job.address + start, nbytes - flight.moved, job.offset_bytes + start
        try:
            result = call(*arguments)
        except OSError as error:
            result = -error.errno
        except Exception as error:  # noqa: BLE001  (an engine gets it)
            result = error
        self.results.put([(token, result)])

    def wait(self):
        return self.results.get()

    def wake(self):
        self.results.put([])

    def close(self):
        self.closed += 1
        self.pool.shutdown(wait=False)


class TestAio(EngineTests):
    def make_engine(self, *, threads, piece_bytes, syscalls):
        if syscalls is None:
            return AioEngine(threads, piece_bytes)
        return AioEngine(threads, piece_bytes, ring=partial(SyscallRing, syscalls))

    def make_file(self, directory):
        return files.open_unlinked(directory)


class TestBufferedFilesOfAio(EngineTests):
    takes_syscalls = False

    def make_engine(self, *, threads, piece_bytes, syscalls):
        return AioEngine(threads, piece_bytes)

    def make_file(self, directory):
        return files.open_unlinked_buffered(directory)


@pytest.fixture
def file(tmp_path):
    file = files.open_unlinked(tmp_path)
    if not file.direct:
        pytest.skip("no direct I/O in the directory for temporary files")
    yield file
    file.close()


def threads_now():
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-io-")]


def test_spec_and_defaults(monkeypatch):
    monkeypatch.setenv("PENSTOCK_IO_THREADS", "3")
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "64KiB")
    engine = AioEngine()
    assert (engine.spec.name, engine.spec.workers, engine.spec.piece_bytes) == ("aio", 3, 262144)
    assert not engine.spec.gpu_direct
    engine.close()


@pytest.mark.parametrize(("depth", "piece"), [(0, 4096), (-1, 4096), (1, 0), (1, 4095), (1, -1)])
def test_senseless_settings(depth, piece):
    with pytest.raises(ConfigError, match=str(depth if depth < 1 else piece)):
        AioEngine(depth, piece)


def test_one_thread_however_much_there_is_to_move(file):
    before = len(threads_now())
    engine = AioEngine(4, PIECE_BYTES)
    assert len(threads_now()) == before
    transfers = [
        move(engine, "write", file, index * 9 * PIECE_BYTES, aligned(9 * PIECE_BYTES))
        for index in range(4)
    ]
    for transfer in transfers:
        transfer.wait(PATIENCE_S)
    assert len(threads_now()) == before + 1
    engine.close()
    assert len(threads_now()) == before


def test_descriptors_and_contexts_are_given_back():
    def held():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = held()
    for _ in range(300):
        AioEngine(64).close()
    assert held() == before


def test_a_closed_file_fails_its_transfer_and_no_other(tmp_path, file):
    """They are handed over together, and only one of them cannot be."""
    closed = files.open_unlinked(tmp_path)
    gate = GatedSyscalls()
    engine = AioEngine(2, PIECE_BYTES, ring=partial(LandsInPairs, gate))
    both = move(engine, "write", file, 0, aligned(2 * PIECE_BYTES))
    good = move(engine, "write", file, 0, aligned(PIECE_BYTES))
    bad = move(engine, "write", closed, 0, aligned(PIECE_BYTES))
    closed.close()
    gate.open()
    for transfer in (both, good):
        transfer.wait(PATIENCE_S)
    with pytest.raises(RuntimeError, match="after its close"):
        bad.wait(PATIENCE_S)
    engine.close()


class LandsInPairs(SyscallRing):
    """The first time, so that two pieces leave together; and looks at the files of all that leave."""

    first = True

    def submit(self, flights):
        for _, flight in flights:
            flight.piece.job.file.fd
        return super().submit(flights)

    def wait(self):
        found = self.results.get()
        if found and self.first:
            self.first = False
            while len(found) < 2:
                found += self.results.get()
        return found


def test_the_kernel_may_take_less_than_all(file):
    """And refuse for a while: what it refused is asked for again."""

    class Reluctant(KernelQueue):
        refusals = 5

        def submit(self, flights):
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.EAGAIN, "no resources")
            return super().submit(flights[:1])

    engine = AioEngine(3, PIECE_BYTES, ring=Reluctant)
    source, target = aligned(7 * PIECE_BYTES, seed=1), aligned(7 * PIECE_BYTES)
    move(engine, "write", file, 0, source).wait(PATIENCE_S)
    move(engine, "read", file, 0, target).wait(PATIENCE_S)
    assert np.array_equal(source, target)
    engine.close()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBADF])
def test_refused_for_ever_is_an_error_in_the_end(file, monkeypatch, code):
    class Refusing(KernelQueue):
        def submit(self, flights):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(aio, "_BUSY_RETRIES", 3)
    engine = AioEngine(2, PIECE_BYTES, ring=Refusing)
    with pytest.raises(TransferError) as caught:
        move(engine, "write", file, 0, aligned(5 * PIECE_BYTES)).wait(PATIENCE_S)
    assert caught.value.errno == code
    engine.close()


def test_the_kernel_says_what_is_wrong_with_a_transfer(tmp_path):
    writable = files.open_path(tmp_path / "data", "x+")
    writable.preallocate(PIECE_BYTES)
    reader = files.open_path(tmp_path / "data", "r")
    engine = AioEngine(1, PIECE_BYTES)
    with pytest.raises(TransferError, match="Bad file descriptor") as caught:
        move(engine, "write", reader, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert caught.value.path == str(tmp_path / "data")
    engine.close()


def test_memory_that_is_not_there(file):
    """EFAULT of a piece is that request's error; the next goes on."""
    engine = AioEngine(2, PIECE_BYTES)
    buffer = aligned(PIECE_BYTES, seed=1)
    move(engine, "write", file, 0, buffer).wait(PATIENCE_S)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    gone = libc.mmap(None, ctypes.c_size_t(PIECE_BYTES), 0, 0x22, -1, ctypes.c_long(0))
    request = aio.Request(
        op="read", file=file, offset_bytes=0, address=gone, nbytes=PIECE_BYTES, keep_alive=None
    )
    with pytest.raises(TransferError) as caught:
        engine.submit(request).wait(PATIENCE_S)
    assert caught.value.errno == errno.EFAULT
    target = aligned(PIECE_BYTES)
    move(engine, "read", file, 0, target).wait(PATIENCE_S)
    assert np.array_equal(target, buffer)
    engine.close()


def interrupted_at(count):
    """What a trace function does: raise at the ``count``-th call of a function of the engine."""
    left = count

    def trace(frame, event, argument):
        nonlocal left
        if event == "call" and frame.f_code.co_filename in (aio.__file__, transfer_jobs.__file__):
            left -= 1
            if not left:
                raise KeyboardInterrupt

    return trace


def test_a_signal_does_not_end_the_thread(file):
    """Python tries most system calls again after a signal, but not this one."""
    engine = AioEngine(2, PIECE_BYTES)
    source, target = aligned(PIECE_BYTES, seed=1), aligned(PIECE_BYTES)
    move(engine, "write", file, 0, source).wait(PATIENCE_S)
    thread = engine._queue._thread
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        for _ in range(3):
            signal.pthread_kill(thread.ident, signal.SIGUSR1)
            thread.join(0.05)  # it goes to sleep again
        assert thread.is_alive()
        move(engine, "read", file, 0, target).wait(PATIENCE_S)
        assert np.array_equal(source, target)
    finally:
        signal.signal(signal.SIGUSR1, before)
    engine.close()


def test_interrupted_while_it_asks(file):
    """Ctrl-C may come anywhere in the thread that asks: what it asked for is lost or done, whole."""
    source, target = aligned(3 * PIECE_BYTES, seed=1), aligned(3 * PIECE_BYTES)
    for count in range(1, 100):
        engine = AioEngine(2, PIECE_BYTES)
        gc.disable()  # else an engine of another test may be abandoned there, and that interrupted
        sys.settrace(interrupted_at(count))
        try:
            transfer = move(engine, "write", file, 0, source)
        except KeyboardInterrupt:
            transfer = move(engine, "write", file, 0, source)
            through = False
        else:
            through = True
        finally:
            sys.settrace(None)
            gc.enable()
        transfer.wait(PATIENCE_S)
        move(engine, "read", file, 0, target).wait(PATIENCE_S)
        assert np.array_equal(source, target)
        engine.close()
        if through:
            break
    assert 5 < count < 99


# -- who gets which -------------------------------------------------------------------------------


def test_the_default_is_asynchronous_where_it_can_be(monkeypatch):
    monkeypatch.delenv("PENSTOCK_IO_ENGINE", raising=False)
    names = {}
    for choice in ("auto", "aio", "threads"):
        monkeypatch.setenv("PENSTOCK_IO_ENGINE", choice)
        engine = default_engine(2, 4096)
        names[choice] = engine.spec.name, engine.spec.workers, engine.spec.piece_bytes
        engine.close()
    assert names == {
        "auto": ("aio", 2, 4096),
        "aio": ("aio", 2, 4096),
        "threads": ("threads", 2, 4096),
    }


@pytest.mark.parametrize("lacking", ["architecture", "context", "descriptor"])
def test_where_it_cannot_be_had_threads_do_it(lacking, monkeypatch, file):
    if lacking == "architecture":
        monkeypatch.setattr(platform, "machine", lambda: "pdp11")
        reason = "pdp11"
    elif lacking == "descriptor":

        def refuse(*_):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "eventfd", refuse)
        reason = "eventfd: Too many open files"
    else:  # no such system call, as where a sandbox forbids it
        numbers = context.NUMBERS[platform.machine()]._replace(setup=10_000)
        monkeypatch.setitem(context.NUMBERS, platform.machine(), numbers)
        reason = "io_setup: Function not implemented"
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setenv("PENSTOCK_IO_ENGINE", "aio")
    with pytest.raises(ConfigError, match=reason):
        default_engine()
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setenv("PENSTOCK_IO_ENGINE", "auto")
    engine = default_engine(2, PIECE_BYTES)
    assert isinstance(engine, ThreadEngine)
    move(engine, "write", file, 0, aligned(3 * PIECE_BYTES)).wait(PATIENCE_S)
    engine.close()
