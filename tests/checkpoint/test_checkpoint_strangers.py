"""Files that something else has put into a checkpoint are never removed with it."""

import functools
import os
import warnings

import pytest
import torch

from penstock import checkpoint
from penstock.checkpoint import Checkpointer, tensors
from penstock.checkpoint.api import CheckpointStore
from penstock.core.errors import CheckpointError, PenstockWarning


def state(value=1.0):
    return {"x": torch.full((64, 64), value), "step": 3}


def put(path, name):
    """Put something of a user's there; what must still be there afterwards."""
    if name.endswith("/"):
        (path / name).mkdir()
        (path / name / "inner").write_text("mine")
        return path / name / "inner"
    (path / name).write_text("mine")
    return path / name


NAMES = ("notes.txt", "folder/", ".hidden", "data-00000.safetensors.bak", "data-00099.safetensors/")


@pytest.mark.parametrize("name", NAMES)
def test_a_save_to_the_same_name_is_refused_before_anything_is_written(name, disk_path):
    checkpoint.save(disk_path / "c", state(1.0))
    mine = put(disk_path / "c", name)
    with pytest.raises(CheckpointError, match="no part of the checkpoint") as raised:
        checkpoint.save(disk_path / "c", state(2.0))
    assert name.rstrip("/") in str(raised.value)
    assert mine.read_text() == "mine"
    assert os.listdir(disk_path) == ["c"]
    assert checkpoint.load(disk_path / "c")["x"][0, 0] == 1.0
    mine.unlink()
    if mine.parent != disk_path / "c":
        mine.parent.rmdir()
    checkpoint.save(disk_path / "c", state(2.0))
    assert checkpoint.load(disk_path / "c")["x"][0, 0] == 2.0


def test_a_file_that_comes_during_the_save_stops_it(disk_path):
    checkpoint.save(disk_path / "c", state(1.0))

    class Late(type(CheckpointStore().disk)):
        """Puts a file there at the last moment at which that can be done."""

        def exchange(self, parent, name, other):
            if not (disk_path / "c" / "late.txt").exists():
                put(disk_path / "c", "late.txt")
            return super().exchange(parent, name, other)

    with pytest.raises(CheckpointError, match=r"late\.txt"):
        CheckpointStore(disk=Late()).save(disk_path / "c", state(2.0))
    assert (disk_path / "c" / "late.txt").read_text() == "mine"
    assert checkpoint.load(disk_path / "c")["x"][0, 0] == 1.0
    assert os.listdir(disk_path) == ["c"]


@pytest.mark.parametrize("how", [{}, {"reuse": False}, {"incremental": True}])
def test_a_checkpointer_keeps_what_has_a_file_of_the_user(how, disk_path):
    with Checkpointer(disk_path / "all", keep=1, **how) as saver:
        saver.save(1, state(1.0))
        mine = put(disk_path / "all" / "step-000000000001", "notes.txt")
        for step in (2, 3):
            saver.save(step, state(step), wait=False)
            with pytest.warns(PenstockWarning, match=r"is saved, but .*'notes\.txt'"):
                saver.wait()
        assert [each.step for each in saver.checkpoints()] == [3, 1]
        with pytest.raises(CheckpointError, match=r"notes\.txt"):
            saver.save(1, state(9.0))
        assert mine.read_text() == "mine"
        mine.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            saver.save(4, state(4.0))
        assert [each.step for each in saver.checkpoints()] == [4]
    with Checkpointer(disk_path / "all") as saver:
        assert saver.load()["x"][0, 0] == 4.0


def test_files_of_another_writer_are_known_by_the_manifest(disk_path, monkeypatch):
    monkeypatch.setattr(tensors, "pack", functools.partial(tensors.pack, prefix="weights"))
    checkpoint.save(disk_path / "c", state(1.0))
    assert (disk_path / "c" / "weights-00000.safetensors").exists()
    monkeypatch.undo()
    checkpoint.save(disk_path / "c", state(2.0))
    assert checkpoint.load(disk_path / "c")["x"][0, 0] == 2.0
