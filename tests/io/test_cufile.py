"""The GPU-direct engine: absent without a sound, and complete over a kvikio that is played here."""

import ctypes
import errno
import os
import sys
from types import SimpleNamespace

import pytest

from penstock.core.errors import ConfigError, TransferError
from penstock.io import cufile, files
from penstock.testing.engines import PATIENCE_S, PIECE_BYTES, EngineTests, aligned, move


class FakeCuFile:
    """``kvikio.CuFile`` over ``preadv``: it copies by address, as the real one does."""

    opened = ()

    def __init__(self, path, flags):
        self.fd = os.open(path, os.O_RDWR if "+" in flags else os.O_RDONLY)
        self.flags, self.closed = flags, False
        type(self).opened = (*type(self).opened, self)

    def pread(self, buf, size, file_offset, *, task_size):
        return self.call(os.preadv, buf, size, file_offset, task_size)

    def pwrite(self, buf, size, file_offset, *, task_size):
        return self.call(os.pwritev, buf, size, file_offset, task_size)

    def call(self, function, buf, size, offset, task_size):
        interface = buf.__cuda_array_interface__
        address, readonly = interface["data"]
        assert (interface["shape"], interface["typestr"], interface["version"]) == (
            (size,),
            "|u1",
            3,
        )
        assert not readonly
        assert task_size == size
        memory = (ctypes.c_char * size).from_address(address)
        return SimpleNamespace(get=lambda: function(self.fd, [memory], offset))

    def close(self):
        if not self.closed:
            os.close(self.fd)
        self.closed = True


def new_kvikio(*, compat=False, gds=True, threads=1):
    """As of 25.04."""
    settings = {"num_threads": threads}
    return SimpleNamespace(
        __version__="25.04",
        CuFile=FakeCuFile,
        defaults=SimpleNamespace(
            is_compat_mode_preferred=lambda: compat,
            get=settings.__getitem__,
            set=settings.__setitem__,
        ),
        cufile_driver=SimpleNamespace(get={"is_gds_available": gds}.__getitem__),
    )


def old_kvikio(*, compat=False, gds=True, threads=1):
    """As of 24.10; ``compat`` may be an enum, as of 24.12."""
    settings = [threads]
    return SimpleNamespace(
        CuFile=FakeCuFile,
        defaults=SimpleNamespace(
            compat_mode=lambda: compat,
            get_num_threads=lambda: settings[0],
            num_threads_reset=lambda count: settings.__setitem__(0, count),
        ),
        cufile_driver=SimpleNamespace(
            DriverProperties=lambda: SimpleNamespace(is_gds_available=gds)
        ),
    )


@pytest.fixture
def kvikio(monkeypatch):
    module = new_kvikio()
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setattr(FakeCuFile, "opened", ())
    return module


def test_absence_is_said_and_not_raised(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    found = cufile.available()
    assert not found
    assert "penstock[gds]" in found.reason
    with pytest.raises(ConfigError, match="kvikio"):
        cufile.KvikioEngine()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (new_kvikio(compat=True), "compatibility mode"),
        (old_kvikio(compat=True), "compatibility mode"),
        (old_kvikio(compat=SimpleNamespace(name="ON")), "compatibility mode"),
        (new_kvikio(gds=False), "nvidia-fs"),
        (old_kvikio(gds=False), "nvidia-fs"),
        (SimpleNamespace(), "does not answer"),
    ],
)
def test_kvikio_that_cannot(monkeypatch, module, reason):
    monkeypatch.setitem(sys.modules, "kvikio", module)
    found = cufile.available()
    assert not found.ok
    assert reason in found.reason
    with pytest.raises(ConfigError, match=reason):
        cufile.KvikioEngine()


def test_kvikio_that_fails_to_load(monkeypatch):
    def fail(_):
        raise OSError(errno.ENOENT, "libcufile.so.0")

    monkeypatch.setattr(cufile.importlib, "import_module", fail)
    assert "libcufile" in cufile.available().reason


@pytest.mark.parametrize(
    "module", [new_kvikio(), old_kvikio(), old_kvikio(compat=SimpleNamespace(name="OFF"))]
)
def test_kvikio_that_can(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "kvikio", module)
    assert cufile.available()
    engine = cufile.KvikioEngine(3, PIECE_BYTES)
    spec = engine.spec
    assert (spec.name, spec.workers, spec.gpu_direct) == ("gds", 3, True)
    engine.close()


@pytest.mark.parametrize(("before", "after"), [(1, 4), (8, 8)])
@pytest.mark.parametrize("make", [new_kvikio, old_kvikio])
def test_its_pool_is_as_large_as_ours(monkeypatch, make, before, after):
    module = make(threads=before)
    monkeypatch.setitem(sys.modules, "kvikio", module)
    cufile.KvikioEngine(4).close()
    defaults = module.defaults
    found = defaults.get("num_threads") if hasattr(defaults, "get") else defaults.get_num_threads()
    assert found == after


def test_one_handle_a_file_closed_with_the_engine(kvikio, tmp_path):
    engine = cufile.KvikioEngine(2, PIECE_BYTES)
    file = files.open_unlinked(tmp_path)
    for _ in range(2):
        move(engine, "write", file, 0, aligned(4 * PIECE_BYTES)).wait(PATIENCE_S)
    (tmp_path / "named").write_bytes(bytes(PIECE_BYTES))
    reader = files.open_path(tmp_path / "named", "r")
    move(engine, "read", reader, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert [handle.flags for handle in FakeCuFile.opened] == ["r+", "r"]
    assert not any(handle.closed for handle in FakeCuFile.opened)
    engine.close()
    engine.close()
    assert all(handle.closed for handle in FakeCuFile.opened)


@pytest.mark.usefixtures("kvikio")
def test_errors_of_cuda_are_transfer_errors(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise RuntimeError("cuFileRead: CUDA_ERROR_INVALID_CONTEXT")

    monkeypatch.setattr(FakeCuFile, "pread", fail)
    engine = cufile.KvikioEngine(2, PIECE_BYTES)
    file = files.open_unlinked(tmp_path)
    with pytest.raises(TransferError) as caught:
        move(engine, "read", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert caught.value.errno == errno.EIO
    assert "INVALID_CONTEXT" in str(caught.value.__cause__)
    engine.close()


@pytest.mark.usefixtures("kvikio")
class TestKvikioEngine(EngineTests):
    takes_syscalls = False

    def make_engine(self, *, threads, piece_bytes, syscalls):
        assert syscalls is None
        return cufile.KvikioEngine(threads, piece_bytes)

    def make_file(self, directory):
        return files.open_unlinked(directory)
