"""Directories, space, locks and small files, as clients ask for them."""

import errno
import os
from pathlib import Path

import pytest

from penstock.core import fs

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
