"""Directories, space, locks and small files, as clients ask for them."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.core import fs
from penstock.core.errors import ConfigError, NoSpaceError

# -- what a directory lies on --------------------------------------------------------------------

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:22 / /dev/shm rw - tmpfs tmpfs rw,size=1k
24 22 0:40 / /data\\040disk rw - xfs /dev/nvme0n1 rw
25 22 0:41 / /data rw - nfs4 server:/x rw
26 25 0:42 / /data/fast rw - ramfs none rw
27 22 0:43 / /dev/shm rw - btrfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_memory"),
    [
        ("/", "ext4", False),
        ("/home/x", "ext4", False),
        ("/data disk/y", "xfs", False),
        ("/data/other", "nfs4", False),
        ("/datafast", "ext4", False),
        ("/data/fast/z", "ramfs", True),
        ("/dev/shm/penstock", "btrfs", False),  # mounted over the tmpfs
    ],
)
def test_file_system_of_a_path(monkeypatch, path, kind, is_memory):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: MOUNTS)
    assert fs.filesystem_of(path) == fs.FileSystem(kind, is_memory)


def test_file_system_without_proc(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOENT, "no /proc")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert fs.filesystem_of("/") == fs.FileSystem("unknown", False)


def test_file_system_follows_links_and_is_real(tmp_path):
    (tmp_path / "link").symlink_to("/proc/self")
    assert fs.filesystem_of(tmp_path / "link").kind == "proc"
    shm = Path("/dev/shm")
    if shm.is_dir() and os.path.ismount(shm):
        assert fs.filesystem_of(shm).is_memory


# -- directories ---------------------------------------------------------------------------------


def test_a_directory_on_a_disk_that_can_be_written_to_will_do(disk_path):
    fs.check_directory(str(disk_path), "flash directory")
    assert fs.check_directories(disk_path, "flash directory") == (str(disk_path),)


def test_paths_become_absolute_and_keep_their_order(disk_path, monkeypatch):
    for name in ("b", "a"):
        (disk_path / name).mkdir()
    monkeypatch.chdir(disk_path)
    found = fs.check_directories(["b", Path("a")], "flash directory")
    assert found == (str(disk_path / "b"), str(disk_path / "a"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", r"^--dir '.*none' does not exist; create it or name another$"),
        ("file", r"^--dir '.*file' is not a directory; name one$"),
    ],
)
def test_what_is_no_directory_is_refused(disk_path, name, message):
    (disk_path / "file").touch()
    with pytest.raises(ConfigError, match=message):
        fs.check_directory(str(disk_path / name), "--dir")


def test_a_directory_that_cannot_be_written_to_is_refused(disk_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=f"is not writable for user {os.geteuid()}; change"):
        fs.check_directory(str(disk_path), "--dir")


def test_a_directory_in_memory_is_refused_unless_it_will_do(disk_path, monkeypatch):
    monkeypatch.setattr(fs, "filesystem_of", lambda _: fs.FileSystem("tmpfs", True))
    with pytest.raises(ConfigError, match=r"is on tmpfs, so .* name a directory on a disk"):
        fs.check_directory(str(disk_path), "--dir")
    fs.check_directory(str(disk_path), "--dir", allow_memory_filesystem=True)


def test_no_directory_and_one_named_twice_are_refused(disk_path):
    (disk_path / "link").symlink_to(disk_path)
    with pytest.raises(ConfigError, match=r"^no --dir is named; name one$"):
        fs.check_directories([], "--dir")
    with pytest.raises(ConfigError, match=r"--dir '.*' is named twice"):
        fs.check_directories([disk_path, disk_path / "link"], "--dir")


# -- space ---------------------------------------------------------------------------------------


def two(folder):
    paths = [str(folder / name) for name in "ab"]
    for each in paths:
        os.mkdir(each)
    return paths


def test_directories_of_one_file_system_share_its_space(tmp_path, monkeypatch):
    a, b = two(tmp_path)
    monkeypatch.setattr(fs, "free_space_bytes", lambda _: 3 << 20)
    fs.check_space([(a, 1 << 20), (b, 2 << 20)], "delete some")
    with pytest.raises(NoSpaceError) as caught:
        fs.check_space([(a, 1 << 20), (b, (2 << 20) + 1)], "delete some")
    error = caught.value
    assert (error.errno, error.op, error.path) == (errno.ENOSPC, "allocate", f"{a}, {b}")
    assert (error.nbytes, error.free_bytes) == ((3 << 20) + 1, 3 << 20)
    assert str(error).endswith("; 3.00 MiB are needed there, 3.00 MiB are free; delete some")


def test_each_file_system_is_asked_for_itself(tmp_path, monkeypatch):
    a, b = two(tmp_path)
    real = os.stat
    monkeypatch.setattr(fs.os, "stat", lambda path: real("/proc/self" if path == b else path))
    monkeypatch.setattr(fs, "free_space_bytes", lambda path: 10 if path == a else 5)
    fs.check_space([(a, 10), (b, 5)], "")
    with pytest.raises(NoSpaceError, match=r"allocate of 6 bytes .*b'"):
        fs.check_space([(a, 10), (b, 6)], "")


def test_advice_may_depend_on_the_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "free_space_bytes", lambda _: 4)
    with pytest.raises(NoSpaceError, match=r"^save of 9 bytes .*; 9 and 4$"):
        fs.check_space([(str(tmp_path), 9)], lambda needed, free: f"{needed} and {free}", op="save")


def test_a_file_system_that_does_not_know_is_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "free_space_bytes", lambda _: -1)
    fs.check_space([(str(tmp_path), 1 << 60)], "")


# -- locks ---------------------------------------------------------------------------------------


def lock(path):
    return fs.FileLock(os.open(path, os.O_RDONLY), f"directory {str(path)!r}", "name another")


def test_a_lock_is_held_until_it_is_closed(tmp_path):
    with lock(tmp_path) as held:
        files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match=r"is in use by (this|another) process; name another"):
            lock(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == files
    held.close()
    lock(tmp_path).close()


def test_the_process_that_holds_it_is_named(tmp_path):
    program = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY);"
        " fcntl.flock(fd, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        other.stdout.readline()
        known = f":{os.stat(tmp_path).st_ino} " in Path("/proc/locks").read_text()
        who = f"process {other.pid}" if known else "another process"
        with pytest.raises(ConfigError, match=f"is in use by {who}; name another"):
            lock(tmp_path)
        other.stdin.close()
    lock(tmp_path).close()


@pytest.mark.parametrize(
    ("line", "who"),
    [
        ("1: FLOCK  ADVISORY  WRITE 4711 {place} 0 EOF", "process 4711"),
        ("1: -> FLOCK  ADVISORY  WRITE 4711 {place} 0 EOF", "another process"),
        ("1: FLOCK  ADVISORY  WRITE 0 {place} 0 EOF", "another process"),  # outside the container
        ("1: POSIX  ADVISORY  WRITE 4711 {place} 0 EOF", "another process"),
        ("nothing of the kind", "another process"),
    ],
)
def test_how_the_kernel_lists_locks(tmp_path, monkeypatch, line, who):
    fd = os.open(tmp_path, os.O_RDONLY)
    facts = os.fstat(fd)
    place = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: line.format(place=place) + "\n")
    assert fs._holder(fd) == who
    os.close(fd)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads
def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path):
    held = lock(tmp_path)
    wait, go_on = os.pipe()
    child = os.fork()
    if not child:  # as a data loader's worker: it lives on, and closes nothing itself
        os.close(go_on)
        os.read(wait, 1)
        os._exit(0)
    with pytest.raises(ConfigError, match="is in use"):  # the parent has it still
        lock(tmp_path)
    held.close()
    deadline = time.monotonic() + 20
    while True:
        try:
            lock(tmp_path).close()
            break
        except ConfigError:
            assert time.monotonic() < deadline, "the child holds it"
            time.sleep(0.01)
    os.close(wait)
    os.close(go_on)
    os.waitpid(child, 0)


def test_a_file_system_without_locks_is_no_lock_that_is_taken(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No locks available"):
        lock(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == files


# -- small files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("in_directory", [False, True])
def test_a_small_file_is_replaced_and_nothing_else_is_left(tmp_path, is_shared, in_directory):
    fd = os.open(tmp_path, os.O_RDONLY) if in_directory else None
    path = "record" if in_directory else str(tmp_path / "record")
    for data in (b"old", b"newer", b""):
        fs.write_durably(path, data, permissions=0o600, dir_fd=fd, is_shared=is_shared)
        assert (tmp_path / "record").read_bytes() == data
        assert os.listdir(tmp_path) == ["record"]
    assert (tmp_path / "record").stat().st_mode & 0o777 == 0o600
    if fd is not None:
        os.close(fd)


def test_content_is_on_the_device_before_the_name_and_then_the_name(tmp_path, monkeypatch):
    order = []
    for name in ("write", "fsync", "rename"):
        real = getattr(os, name)

        def noted(*args, name=name, real=real, **kwargs):
            order.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, noted)
    fs.write_durably(str(tmp_path / "record"), b"x")
    assert order == ["write", "fsync", "rename", "fsync"]
    del order[:]
    fs.write_durably(str(tmp_path / "record"), b"x", sync_name=False)
    assert order == ["write", "fsync", "rename"]


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_if_it_fails_the_old_one_stays_and_nothing_is_left(tmp_path, monkeypatch, failing):
    path = tmp_path / "record"
    path.write_bytes(b"old")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, refuse)
        with pytest.raises(OSError, match="No space"):
            fs.write_durably(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["record"]


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:2]))
    fs.write_durably(str(tmp_path / "record"), b"12345")
    assert (tmp_path / "record").read_bytes() == b"12345"


def test_a_file_that_is_written_gets_its_name(tmp_path, monkeypatch):
    (tmp_path / "a.tmp").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    fs.replace_durably("a.tmp", "a")
    assert os.listdir(tmp_path) == ["a"]
