"""The engine over a compiled libcufile: structures by value, errno and 64-bit offsets are as in C."""

import errno
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, TransferError
from penstock.io import cufile, files
from penstock.testing.engines import PATIENCE_S, PIECE_BYTES, aligned, move

SOURCE = Path(__file__).parents[1] / "device" / "runtime" / "cufile.cpp"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The library's path."""
    given = shlex.split(os.environ.get("CXX", ""))
    compiler = given or [path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))]
    if not compiler:
        pytest.skip("there is no C++ compiler on this machine")
    path = tmp_path_factory.mktemp("library") / "libcufile.so.0"
    command = [
        *(given or compiler[:1]),
        "-std=c++17",
        "-shared",
        "-fPIC",
        str(SOURCE),
        "-o",
        str(path),
    ]
    subprocess.run([*command, "-ldl"], check=True)
    return str(path)


@pytest.fixture
def engine(compiled, monkeypatch):
    monkeypatch.setattr(cufile, "LIBRARY", compiled)
    engine = cufile.CuFileEngine(3, PIECE_BYTES)
    yield engine
    engine.close()


@pytest.fixture
def file(disk_path):
    file = files.open_unlinked_buffered(disk_path)
    yield file
    file.close()


def test_it_is_available(compiled, monkeypatch):
    monkeypatch.setattr(cufile, "LIBRARY", compiled)
    found = cufile.available(ask_library=True)
    assert (found.ok, found.reason) == (True, "libcufile over nvidia-fs 2.20")


@pytest.mark.parametrize("nbytes", [1, 4095, 3 * PIECE_BYTES, 7 * PIECE_BYTES + 1001])
@pytest.mark.parametrize("offset", [0, 4096, 5 << 32])
def test_what_is_written_is_read(engine, file, nbytes, offset):
    source, target = aligned(nbytes + 8, seed=1), aligned(nbytes + 8, seed=2)
    around = bytes(target)
    move(engine, "write", file, offset, source[3 : 3 + nbytes]).wait(PATIENCE_S)
    move(engine, "read", file, offset, target[5 : 5 + nbytes]).wait(PATIENCE_S)
    assert bytes(target[5 : 5 + nbytes]) == bytes(source[3 : 3 + nbytes])
    assert bytes(target[:5]) == around[:5]
    assert bytes(target[5 + nbytes :]) == around[5 + nbytes :]


def test_errno_is_that_of_the_call(engine, disk_path):
    """It is read in another thread than this one, and after the GIL was taken again."""
    (disk_path / "named").write_bytes(bytes(PIECE_BYTES))
    reader = files.open_path(disk_path / "named", "r")
    with pytest.raises(TransferError) as caught:
        move(engine, "write", reader, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert caught.value.errno == errno.EBADF
    reader.close()


def test_errors_of_its_own(engine, file, monkeypatch):
    monkeypatch.setenv("CUFILE_MAPPING_BYTES", "4096")
    with pytest.raises(TransferError) as caught:
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)
    assert "cuFile error 5014" in str(caught.value)


def test_statuses_of_its_own(engine, file, disk_path):
    """The file itself would not do: hence it is opened anew."""
    library = engine._cufile._library
    with pytest.raises(OSError, match="cuFile error 5019"):  # O_TMPFILE
        library.register(file.fd)
    with (
        (disk_path / "named").open("w+b") as named,
        pytest.raises(OSError, match="cuFile error 5020"),  # no O_DIRECT
    ):
        library.register(named.fileno())


def test_a_library_that_lacks_functions(compiled, monkeypatch):
    monkeypatch.setattr(cufile, "LIBRARY", "libc.so.6")
    with pytest.raises(ConfigError, match=r"too old.*cuFileDriverOpen"):
        cufile.CuFileEngine()
