"""The GPU-direct engine: absent without a sound, and complete over a libcufile of our own."""

import ctypes
import errno
import os
import re
import threading
from types import SimpleNamespace

import pytest

from cufile_in_python import COMPATIBLE, P2P, PythonLibrary
from penstock.core.errors import ConfigError, NoSpaceError, TransferError
from penstock.io import cufile, files
from penstock.testing.engines import PATIENCE_S, PIECE_BYTES, EngineTests, aligned, move
from penstock.testing.faults import FaultySyscalls
from penstock.testing.transfers import request, run_in_fork


@pytest.fixture
def playing(monkeypatch, tmp_path):
    """``playing(library)``: from now on that is libcufile, and nvidia-fs is loaded."""
    played = []

    def play(library):
        module = tmp_path / "version"
        module.write_text("version: 2.20\n")
        monkeypatch.setattr(cufile, "_MODULE", str(module))
        monkeypatch.setattr(cufile, "_load", lambda: library)
        played.append(library)
        return library

    yield play
    for library in played:
        if isinstance(library, PythonLibrary):
            library.close()


@pytest.fixture
def library(playing):
    return playing(PythonLibrary())


@pytest.fixture
def engine(library):
    engine = cufile.CuFileEngine(2, PIECE_BYTES)
    yield engine
    engine.close()


@pytest.fixture
def file(disk_path):
    """As a GPU-direct tier opens it."""
    file = files.open_unlinked_buffered(disk_path)
    yield file
    file.close()


def test_without_the_kernel_module_nothing_is_loaded(monkeypatch, tmp_path):
    def load():
        raise AssertionError("libcufile was loaded")

    monkeypatch.setattr(cufile, "_MODULE", str(tmp_path / "none"))
    monkeypatch.setattr(cufile, "_load", load)
    found = cufile.available()
    assert not found
    assert "nvidia-fs" in found.reason


def test_without_the_library_it_is_said_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(cufile, "LIBRARY", "libcufile-that-nobody-has.so.0")
    found = cufile.available(ask_library=True)
    assert not found
    for words in ("libcufile-that-nobody-has.so.0", "No such file", "torch"):
        assert words in found.reason
    with pytest.raises(ConfigError, match="cannot be loaded"):
        cufile.CuFileEngine()


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (SimpleNamespace(), "too old.*cuFileDriverOpen"),
        (PythonLibrary(error=5004), "initialized.*5004.*does not match libcufile"),
        (PythonLibrary(error=5099), "initialized.*5099.*cufile.log"),
        (PythonLibrary(error=errno.EACCES), "initialized.*Permission denied"),
    ],
)
def test_a_library_that_cannot_be_used(playing, library, reason):
    playing(library)
    found = cufile.available()
    assert not found
    with pytest.raises(ConfigError, match=reason) as caught:
        cufile.CuFileEngine()
    assert str(caught.value) == found.reason


@pytest.mark.parametrize(
    ("facts", "ok", "words"),
    [
        ({}, True, "nvidia-fs 2.20"),
        ({"error": 5026}, True, "nvidia-fs 2.20"),
        ({"control": COMPATIBLE}, True, "allow_compat_mode in cufile.json"),
        ({"module": (0, 0), "status": 0, "features": P2P}, True, "PCI peer-to-peer"),
        ({"module": (0, 0)}, False, "compatibility mode.*nvidia-fs is not loaded"),
        ({"status": 0}, False, "compatibility mode.*nvidia-fs 2.20 supports no file system"),
    ],
)
def test_what_a_library_says_of_itself(playing, facts, ok, words):
    playing(PythonLibrary(**facts))
    found = cufile.available()
    assert found.ok is ok
    assert re.search(words, found.reason)


def test_spec(library):
    engine = cufile.CuFileEngine(3, PIECE_BYTES)
    spec = engine.spec
    assert (spec.name, spec.workers, spec.gpu_direct) == ("cufile", 3, True)
    assert library.opened == 1
    engine.close()


def test_one_handle_a_file_given_back_with_the_engine(engine, library, file, disk_path):
    for _ in range(2):
        move(engine, "write", file, 0, aligned(4 * PIECE_BYTES)).wait(PATIENCE_S)
    (disk_path / "named").write_bytes(bytes(PIECE_BYTES))
    reader = files.open_path(disk_path / "named", "r")
    move(engine, "read", reader, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    theirs = [fd for fd, _ in library.files.values()]
    assert len(theirs) == 2
    assert file.fd not in theirs
    engine.close()
    engine.close()
    assert (len(library.files), len(library.closed)) == (0, 2)
    for fd in theirs:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    reader.close()


def test_a_handle_goes_with_its_file(engine, library, disk_path):
    """Else a spill file that was given back would go on to take space."""
    file = files.open_unlinked_buffered(disk_path)
    move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert not library.closed
    file.close()
    del file
    # The worker's frame may hold the last piece until it takes the next one.
    other = files.open_unlinked_buffered(disk_path)
    for _ in range(2):
        move(engine, "write", other, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert len(library.closed) == 1
    other.close()


def test_a_forked_child_gives_nothing_back(engine, library, file):
    """cuFile is not to be used in it."""
    move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)

    def close():
        engine.close()
        assert not library.closed

    run_in_fork(close)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ((-1, errno.ENOSPC), (errno.ENOSPC, "No space left")),
        ((-1, 0), (errno.EIO, "Input/output error")),
        ((-errno.EREMOTEIO, 0), (errno.EREMOTEIO, "Remote I/O error")),
        ((-5014, errno.ENOSPC), (errno.EIO, "cuFile error 5014.*one mapping")),
        ((-5049, 0), (errno.EIO, "cuFile error 5049")),
    ],
)
def test_errors(engine, library, file, returned, expected):
    library.refusal, library.errno = returned
    code, words = expected
    with pytest.raises(NoSpaceError if code == errno.ENOSPC else TransferError) as caught:
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert caught.value.errno == code
    assert re.search(words, str(caught.value))


def test_a_file_that_cannot_be_registered(engine, library, file, monkeypatch):
    monkeypatch.setattr(library.cuFileHandleRegister, "_call", lambda *_: cufile._Status(5008))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferError) as caught:
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert "5008" in str(caught.value)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_file_without_direct_io(engine, file, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TransferError) as caught:
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert "O_DIRECT" in str(caught.value)


@pytest.mark.parametrize("limit", [1, 4096, 12345])
def test_short_transfers_go_on_where_they_stopped(engine, library, file, limit):
    nbytes = 3 * PIECE_BYTES + 17 if limit > 1 else 99
    library.limit = limit
    source, target = aligned(nbytes, seed=1), aligned(nbytes, seed=2)
    move(engine, "write", file, 0, source).wait(PATIENCE_S)
    move(engine, "read", file, 0, target).wait(PATIENCE_S)
    assert bytes(target) == bytes(source)
    assert len(library.calls) >= 2 * (nbytes // limit)


@pytest.mark.usefixtures("library")
def test_the_device_is_made_current_in_each_worker_for_each_piece(file):
    told, owner = [], SimpleNamespace()
    engine = cufile.CuFileEngine(
        2, PIECE_BYTES, use_device=lambda owner: told.append((threading.current_thread(), owner))
    )
    buffer = aligned(5 * PIECE_BYTES)
    engine.submit(request("write", file, 0, buffer, keep_alive=owner)).wait(PATIENCE_S)
    assert len(told) == 5
    assert all(thread.name.startswith("penstock-io-") for thread, _ in told)
    assert all(what is owner for _, what in told)
    engine.close()


def test_a_device_that_cannot_be_made_current_moves_nothing(library, file):
    def refuse(_):
        raise RuntimeError("invalid device ordinal")

    engine = cufile.CuFileEngine(2, PIECE_BYTES, use_device=refuse)
    with pytest.raises(RuntimeError, match="ordinal"):
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert not library.calls
    engine.close()


def test_structures_are_as_large_as_the_interface_says():
    """On 64-bit Linux; the properties have room to spare."""
    assert ctypes.sizeof(cufile._Status) == 8
    assert ctypes.sizeof(cufile._Description) == 24
    assert cufile._Description.operations.offset == 16
    assert cufile._Properties.feature_flags.offset == 32
    assert ctypes.sizeof(cufile._Properties) >= 56


@pytest.mark.usefixtures("library")
class TestCuFileEngine(EngineTests):
    @pytest.fixture
    def file(self, disk_path):
        return files.open_unlinked_buffered(disk_path)

    def make_engine(self, *, threads, piece_bytes, syscalls):
        engine = cufile.CuFileEngine(threads, piece_bytes)
        if syscalls is not None:  # between the engine and cuFile
            last = syscalls
            while isinstance(last._inner, FaultySyscalls):
                last = last._inner
            last._inner, engine._queue._syscalls = engine._cufile, syscalls
        return engine

    def make_file(self, directory):
        return files.open_unlinked_buffered(directory)
