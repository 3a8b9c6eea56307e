"""States, and disks that fail, for the tests of checkpoints."""

import errno
import json
import os
import random

import numpy as np
import torch
import xxhash

from penstock.checkpoint.api import CheckpointStore
from penstock.checkpoint.disk import Disk, failed
from penstock.io.threads import Syscalls, ThreadEngine

BLOCK = 16384


def state(seed=0, size=9000):
    """Of several files and blocks in a small store; all kinds of tensors."""
    torch.manual_seed(seed)
    table = torch.randn(30, 20)
    return {
        "model": {
            "weight": torch.randn(size),
            "tied": table,
            "again": table,
            "part": table[3:9, 2:7],
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, size)}}},
        "numbers": {
            "step": seed,
            "loss": float("nan"),
            "seen": (1, [2.5, None], True),
            "k": b"\0\xff",
        },
        "python": random.Random(seed).getstate(),
        "array": np.arange(11, dtype=np.uint32) + seed,
        "empty": torch.empty(0, 3),
    }


def assert_same(ours, theirs, path="state"):
    assert type(ours) is type(theirs), path
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), path
        both = (each.contiguous().reshape(-1).view(torch.uint8) for each in (ours, theirs))
        assert torch.equal(*both), path
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype, path
        assert np.array_equal(ours, theirs), path
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            assert_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{path}.{i}")
    elif isinstance(ours, set | frozenset):
        assert sorted(map(repr, ours)) == sorted(map(repr, theirs)), path
    else:
        assert repr(ours) == repr(theirs), path  # nan is not nan


def is_same(ours, theirs):
    try:
        assert_same(ours, theirs)
    except AssertionError:
        return False
    return True


class Stopped(BaseException):
    """The process is killed: nothing after this runs, not even what tidies up."""


class Fuse:
    """Counts every call that changes a disk; at one of them something happens."""

    def __init__(self, at=None, error=None):
        self.at, self.error, self.calls = at, error, []
        self.dead = False

    def burn(self, what):
        if self.dead:
            raise Stopped
        self.calls.append(what)
        if len(self.calls) - 1 == self.at:
            if self.error is not None:
                raise self.error
            self.dead = True
            raise Stopped


class FusedDisk(Disk):
    """Burns the fuse before each change; a kill in the middle of one leaves half of it."""

    def __init__(self, fuse):
        self._fuse = fuse

    def make_directory(self, parent, name):
        self._burn("make", parent.join(name))
        return super().make_directory(parent, name)

    def create(self, directory, name, nbytes):
        self._burn("create", directory.join(name))
        return super().create(directory, name, nbytes)

    def reuse(self, directory, name, nbytes):
        self._burn("reuse", directory.join(name))
        return super().reuse(directory, name, nbytes)

    def link(self, source, directory, name):
        self._burn("link", directory.join(name))
        return super().link(source, directory, name)

    def write(self, directory, name, data):
        try:
            self._burn("write", directory.join(name))
        except BaseException:
            super().write(directory, name, data[: len(data) // 2])
            raise
        return super().write(directory, name, data)

    def sync_file(self, directory, name):
        self._burn("sync_file", directory.join(name))
        return super().sync_file(directory, name)

    def finish(self, file, nbytes):
        self._burn("finish", file.path)
        return super().finish(file, nbytes)

    def sync(self, directory):
        self._burn("sync", directory.path)
        return super().sync(directory)

    def rename(self, parent, name, to):
        self._burn("rename", parent.join(name))
        return super().rename(parent, name, to)

    def exchange(self, parent, name, other):
        self._burn("exchange", parent.join(name))
        return super().exchange(parent, name, other)

    def clear(self, directory):
        for name in directory.names():
            self._burn("clear", directory.join(name))
            os.unlink(name, dir_fd=directory.fd)

    def drop(self, directory, name):
        self._burn("drop", directory.join(name))
        super().drop(directory, name)

    def remove(self, parent, name):
        self._burn("remove", parent.join(name))
        return super().remove(parent, name)

    def _burn(self, what, path):
        try:
            self._fuse.burn((what, os.path.basename(path)))
        except OSError as error:
            raise failed(what, path, error) from error


class FusedSyscalls(Syscalls):
    """The same for what engines move; a write that is cut short by a kill leaves half of it."""

    def __init__(self, fuse):
        self._fuse = fuse

    def write(self, file, address, nbytes, offset_bytes):
        try:
            self._fuse.burn(("block", os.path.basename(file.path)))
        except BaseException:
            half = nbytes // 2 // file.granule_bytes * file.granule_bytes
            if half:
                super().write(file, address, half, offset_bytes)
            raise
        return super().write(file, address, nbytes, offset_bytes)


def fused_store(fuse, **settings):
    """A store of small blocks and files whose every change burns the fuse; one thread: in order."""
    return small_store(
        disk=FusedDisk(fuse),
        make_engine=lambda: ThreadEngine(1, syscalls=FusedSyscalls(fuse)),
        **settings,
    )


def small_store(**settings):
    return CheckpointStore(**{"block_bytes": BLOCK, "file_bytes": 4 * BLOCK, **settings})


def no_space():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sealed(document):
    """A manifest's bytes, whose checksum is right whatever it says."""
    data = document if isinstance(document, bytes) else json.dumps(
        {key: value for key, value in document.items() if key != "sum"}, separators=(",", ":")
    ).encode()[:-1]  # fmt: skip
    return data + b',"sum":"%s"}\n' % xxhash.xxh3_128_hexdigest(data).encode()


def rewrite(path, change):
    """Have a manifest say something else, by a function that changes its document."""
    file = path / "manifest.json"
    document = json.loads(file.read_bytes())
    change(document)
    file.write_bytes(sealed(document))
