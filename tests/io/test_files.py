"""Files for direct I/O: unlinked, private, aligned as the file system says, honest when full."""

import ctypes
import errno
import fcntl
import os
import stat
import tempfile
import warnings

import pytest

import preloaded
from penstock.core.errors import (
    ClosedError,
    ConfigError,
    NoSpaceError,
    PenstockWarning,
    TransferError,
)
from penstock.io import files


def direct_here():
    with tempfile.TemporaryFile() as file:
        return files._granule(file.fileno()) > 0


DIRECT = pytest.mark.skipif(not direct_here(), reason="no direct I/O where tests run")


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())


def refuse_direct(monkeypatch):
    """As a file system without O_DIRECT: F_SETFL says EINVAL."""
    real = fcntl.fcntl

    def fake(fd, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(fd, command, argument)

    monkeypatch.setattr(files.fcntl, "fcntl", fake)


def is_direct(file):
    return bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT)


# -- creating ------------------------------------------------------------------------------------


def unlinked_by_tmpfile(directory, _):
    return files.open_unlinked(directory)


def unlinked_by_name(directory, monkeypatch):
    real = os.open

    def fake(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fake)
    return files.open_unlinked(directory)


@pytest.mark.parametrize("make", [unlinked_by_tmpfile, unlinked_by_name])
def test_an_unlinked_file_is_private_and_leaves_nothing(tmp_path, monkeypatch, make):
    umask = os.umask(0)
    try:
        file = make(tmp_path, monkeypatch)
    finally:
        os.umask(umask)
    status = os.fstat(file.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert os.listdir(tmp_path) == []
    assert not os.get_inheritable(file.fd)
    assert file.path == str(tmp_path)
    file.preallocate(8192)
    file.close()
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_unlinked_is_not_used(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, "turned read-only")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(TransferError, match="Read-only"):
        unlinked_by_name(tmp_path, monkeypatch)


def test_nothing_is_left_of_a_killed_process(tmp_path):
    code = (
        "import os, sys; from penstock.io.files import open_unlinked;"
        "f = open_unlinked(sys.argv[1]); f.preallocate(1 << 20); os.kill(os.getpid(), 9)"
    )
    killed = preloaded.run(["-c", code, tmp_path])
    assert killed.returncode == -9
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["missing", "file"])
def test_a_directory_that_is_none(tmp_path, where):
    (tmp_path / "file").touch()
    with pytest.raises(TransferError) as caught:
        files.open_unlinked(tmp_path / where)
    assert caught.value.op == "open"
    assert caught.value.path == str(tmp_path / where)
    assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR)


def test_modes_of_named_files(tmp_path):
    path = tmp_path / "data"
    with pytest.raises(TransferError, match="No such file"):
        files.open_path(path, "r")
    with pytest.raises(TransferError, match="No such file"):
        files.open_path(path, "r+")
    created = files.open_path(path, "x+")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    created.preallocate(4096)
    created.close()
    with pytest.raises(TransferError, match="File exists"):
        files.open_path(path, "x+")
    for mode, access, size in (
        ("r", os.O_RDONLY, 4096),
        ("r+", os.O_RDWR, 4096),
        ("w+", os.O_RDWR, 0),
    ):
        file = files.open_path(path, mode)
        assert fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE == access
        assert file.size_bytes == size
        assert file.path == str(path)
        file.close()
    with pytest.raises(ConfigError, match="'rw'"):
        files.open_path(path, "rw")


# -- direct or buffered --------------------------------------------------------------------------


@DIRECT
def test_direct_with_the_granule_that_the_kernel_states(tmp_path):
    file = files.open_unlinked(tmp_path)
    assert file.direct
    assert is_direct(file)
    stated = files._dio_align(file.fd)
    assert file.granule_bytes == (4096 if stated is None else max(stated))


@pytest.mark.parametrize(
    ("stated", "granule"),
    [
        (None, 4096),
        ((4, 512), 512),
        ((512, 4096), 4096),
        ((1, 1), 1),
        ((0, 0), 0),
        ((512, 0), 0),
        ((512, 65536), 0),
    ],
)
@DIRECT
def test_granule_from_statx(tmp_path, monkeypatch, stated, granule):
    monkeypatch.setattr(files, "_dio_align", lambda _: stated)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        file = files.open_unlinked(tmp_path)
    assert file.direct == is_direct(file) == (granule > 0)
    assert file.granule_bytes == max(granule, 1)
    assert len(caught) == (granule == 0)


@DIRECT
@pytest.mark.parametrize("failure", ["absent", "mask", "error"])
def test_a_kernel_whose_statx_does_not_say(tmp_path, monkeypatch, failure):
    class Libc:
        def statx(self, fd, path, flags, mask, buffer):
            return -1 if failure == "error" else 0  # and leaves the mask in the buffer empty

    monkeypatch.setattr(files, "_libc", object() if failure == "absent" else Libc())
    file = files.open_unlinked(tmp_path)
    assert file.direct
    assert file.granule_bytes == 4096


def test_fallback_warns_once_per_directory(tmp_path, monkeypatch):
    refuse_direct(monkeypatch)
    with pytest.warns(PenstockWarning, match="no direct I/O") as caught:
        first = files.open_unlinked(tmp_path)
    assert caught[0].filename == __file__
    assert str(tmp_path) in str(caught[0].message)
    assert not first.direct
    assert first.granule_bytes == 1
    files.open_unlinked(tmp_path)
    files.open_path(tmp_path / "named", "x+")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.warns(PenstockWarning):
        files.open_unlinked(other)


def test_a_warning_made_an_error_leaks_no_descriptor(tmp_path, monkeypatch):
    refuse_direct(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PenstockWarning):
        files.open_unlinked(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_buffered_by_wish_does_not_warn(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_BUFFERED_IO", "1")
    file = files.open_unlinked(tmp_path)
    assert not file.direct
    assert not is_direct(file)
    assert file.granule_bytes == 1


# -- space and closing ---------------------------------------------------------------------------


def test_preallocation_reserves(tmp_path):
    file = files.open_unlinked(tmp_path)
    file.preallocate(1 << 20)
    assert file.size_bytes == 1 << 20
    assert os.fstat(file.fd).st_blocks * 512 >= 1 << 20
    file.preallocate(4096)  # never shrinks
    assert file.size_bytes == 1 << 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_preallocation_that_fails_gives_back_what_it_got(tmp_path, monkeypatch, code):
    file = files.open_unlinked(tmp_path)
    file.preallocate(4096)

    def fail(fd, offset, nbytes):
        os.ftruncate(fd, 65536)  # as far as it got
        raise OSError(code, "injected")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(TransferError) as caught:
        file.preallocate(1 << 20)
    assert isinstance(caught.value, NoSpaceError) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert (caught.value.op, caught.value.errno) == ("allocate", code)
    assert (caught.value.offset_bytes, caught.value.nbytes) == (4096, (1 << 20) - 4096)
    assert caught.value.free_bytes > 0
    assert file.size_bytes == 4096


def test_more_than_a_file_holds(tmp_path):
    """A real refusal; more than the disk holds would fill it for everybody meanwhile."""
    file = files.open_unlinked(tmp_path)
    with pytest.raises(TransferError) as caught:
        file.preallocate(1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert os.fstat(file.fd).st_blocks == 0


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_reserve(tmp_path, monkeypatch, code):
    def fail(fd, offset, nbytes):
        raise OSError(code, "injected")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    file = files.open_unlinked(tmp_path)
    file.preallocate(1 << 20)
    assert file.size_bytes == 1 << 20
    file.preallocate(4096)
    assert file.size_bytes == 1 << 20


def test_close_is_final_and_idempotent(tmp_path):
    file = files.open_unlinked(tmp_path)
    fd = file.fd
    assert "closed" not in repr(file)
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ClosedError, match=str(tmp_path)):
        _ = file.fd
    assert "closed" in repr(file)


def test_a_dropped_file_closes_its_descriptor(tmp_path):
    fd = files.open_unlinked(tmp_path).fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# -- dropping the cache --------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["absent", errno.ENOSYS, errno.EINVAL])
def test_writing_out_without_sync_file_range(tmp_path, monkeypatch, failure):
    class Libc:
        def sync_file_range(self, *_):
            ctypes.set_errno(failure)
            return -1

    synced = []
    monkeypatch.setattr(files, "_libc", object() if failure == "absent" else Libc())
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        files.drop_cache(file.fileno(), 0, 4096, written=True)
        files.drop_cache(file.fileno(), 0, 4096, written=False)
        assert synced == [file.fileno()]


def test_a_failed_write_out_is_raised(tmp_path, monkeypatch):
    class Libc:
        def sync_file_range(self, *_):
            ctypes.set_errno(errno.EIO)
            return -1

    monkeypatch.setattr(files, "_libc", Libc())
    with (
        tempfile.TemporaryFile(dir=tmp_path) as file,
        pytest.raises(OSError, match="Input/output"),
    ):
        files.drop_cache(file.fileno(), 0, 4096, written=True)
