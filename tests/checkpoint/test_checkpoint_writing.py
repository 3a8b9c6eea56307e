"""Files on their way: each is waited for, however many there are, and none is written of two moments."""

import os
import threading
import time

import pytest
import torch
from checkpoint_runs import BLOCK, assert_same, small_store

from penstock import CheckpointError
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.writer import _MOST_OPEN, FilesWriter

FILES = 100
"""More than are kept open at once."""


def many(fill=0.0):
    return {f"t{i}": torch.full((BLOCK // 4,), fill + i) for i in range(FILES)}


def test_of_more_files_than_are_open_at_once_each_is_waited_for(disk_path, monkeypatch):
    finish, finished = Disk.finish, []

    def noted(self, file, nbytes):
        finished.append(file.path)
        finish(self, file, nbytes)

    monkeypatch.setattr(Disk, "finish", noted)
    store = small_store(file_bytes=BLOCK)
    store.save(disk_path / "a", many())
    assert len(finished) == len(set(finished)) == FILES
    assert_same(store.load(disk_path / "a"), many())


def test_of_many_files_that_changed_few_are_open_at_once(disk_path, monkeypatch):
    clone, opened = Disk.clone, []

    def noted(self, source, target):
        opened.append(len(os.listdir("/proc/self/fd")))
        return clone(self, source, target)

    store = small_store(file_bytes=BLOCK)
    store.save(disk_path / "a", many())
    monkeypatch.setattr(Disk, "clone", noted)
    store.save(disk_path / "b", many(1.0), base=disk_path / "a")
    assert len(opened) == FILES
    assert max(opened) - opened[0] <= _MOST_OPEN
    assert_same(store.load(disk_path / "b"), many(1.0))


def syncs_after_ctrl_c(disk_path, monkeypatch, state, at, *, is_started):
    """Save, with Ctrl-C as a sync's thread starts; return the syncs that still run then.

    ``at``: 0 for the first file's, which is before the manifest is written; else a number from then on.
    """
    start, write = threading.Thread.start, Disk.write
    since, running, interrupted = [], [], []

    def start_or_stop(self):
        if self.name == "penstock-sync" and not interrupted:
            if len(since) == at:
                interrupted.append(self)
                if is_started:
                    start(self)
                raise KeyboardInterrupt
            if since:
                since.append(self)
        start(self)

    def noted(self, *words):
        write(self, *words)
        since.append(None)

    def slow(name):
        sync = getattr(Disk, name)

        def slowly(*words):
            running.append(name)
            time.sleep(0.2)
            sync(*words)
            running.remove(name)

        return slowly

    for name in ("finish", "sync_file"):
        monkeypatch.setattr(Disk, name, slow(name))
    monkeypatch.setattr(Disk, "write", noted)
    monkeypatch.setattr(threading.Thread, "start", start_or_stop)
    with pytest.raises(KeyboardInterrupt):
        small_store(file_bytes=BLOCK).save(disk_path / "a", state)
    assert interrupted
    assert not list(disk_path.iterdir())
    return running


@pytest.mark.parametrize("is_started", [True, False])
def test_a_files_sync_that_is_interrupted_as_it_begins_is_waited_for(
    disk_path, monkeypatch, is_started
):
    assert not syncs_after_ctrl_c(disk_path, monkeypatch, many(), 0, is_started=is_started)


@pytest.mark.parametrize("is_started", [True, False])
def test_after_ctrl_c_the_manifests_sync_is_waited_for(disk_path, monkeypatch, is_started):
    state = {"x": torch.ones(9)}
    assert not syncs_after_ctrl_c(disk_path, monkeypatch, state, 2, is_started=is_started)


@pytest.mark.parametrize("fails", [0, 30, FILES - 1])
def test_a_file_that_cannot_be_waited_for_fails_the_save(disk_path, monkeypatch, fails):
    finish, finished = Disk.finish, []

    def refused(self, file, nbytes):
        finished.append(file.path)
        if len(finished) == fails + 1:
            raise CheckpointError("not durable")
        finish(self, file, nbytes)

    monkeypatch.setattr(Disk, "finish", refused)
    with pytest.raises(CheckpointError, match="not durable"):
        small_store(file_bytes=BLOCK).save(disk_path / "a", many())
    assert not list(disk_path.iterdir())


def test_what_changes_between_being_compared_and_being_written_is_refused(disk_path, monkeypatch):
    store, x = small_store(), torch.zeros(BLOCK)
    store.save(disk_path / "a", {"x": x})
    x[-1] = 1  # in the last block: those before it are compared, and written only then
    make = FilesWriter.make

    def changing(*words):
        x[0] = 2
        return make(*words)

    monkeypatch.setattr(FilesWriter, "make", changing)
    with pytest.raises(CheckpointError, match="changed while it was saved"):
        store.save(disk_path / "b", {"x": x}, base=disk_path / "a")
    assert [each.name for each in disk_path.iterdir()] == ["a"]


@pytest.mark.parametrize("codec", [None, "exponent"])
@pytest.mark.parametrize("shares", [False, True])
def test_a_file_of_the_base_that_is_cut_during_the_save_is_written(
    codec, shares, disk_path, monkeypatch
):
    store, x = small_store(), {"x": torch.randn(9 * BLOCK)}
    store.save(disk_path / "a", x, codec=codec)
    (data,) = (disk_path / "a").glob("*.safetensors")
    link = Disk.link

    def cut(*words):
        os.truncate(data, BLOCK)
        return link(*words)

    def copy(self, source, target):
        with open(source.path, "rb") as shared, open(target.path, "r+b") as file:
            file.write(shared.read())
        return True

    monkeypatch.setattr(Disk, "link", cut)
    if shares:
        monkeypatch.setattr(Disk, "clone", copy)
    done = store.save(disk_path / "b", x, codec=codec, base=disk_path / "a")
    assert done.written_bytes == done.nbytes
    assert_same(store.load(disk_path / "b"), x)
    assert store.verify(disk_path / "b").ok
