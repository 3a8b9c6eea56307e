"""Many checkpoints in one directory: the latest that is whole, so many kept, one writer."""

import errno
import json
import os
import random
import time

import numpy as np
import pytest
import torch
from checkpoint_runs import Fuse, Stopped, assert_same, fused_store, no_space, small_store, state

from penstock import (
    CheckpointError,
    ClosedError,
    ConfigError,
    DamagedError,
    MismatchError,
    PenstockWarning,
    TransferError,
    checkpoint,
)
from penstock.checkpoint import Checkpointer, Rng, disk, listing, reader, staging, training_state
from penstock.checkpoint.checkpointer import Interval
from penstock.cli import main


def checkpointer(path, **settings):
    return Checkpointer(path, **{"store": small_store(), **settings})


def damage(path):
    file = sorted(path.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def test_the_latest_is_loaded_and_so_many_stay(disk_path):
    with checkpointer(disk_path / "run", keep=2) as ours:
        assert ours.latest() is None
        assert ours.load() is None
        for step in (1, 2, 3):
            ours.save(step, state(step))
        assert [each.step for each in ours.checkpoints()] == [3, 2]
        assert_same(ours.load(), state(3))
        assert_same(ours.load(step=2), state(2))
        assert ours.latest().facts["step"] == 3
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 1 .* steps \[3, 2\]"):
            ours.load(step=1)
        assert ours.stats.saves == 3
        assert ours.stats.stall_s > 0
    assert len(os.listdir(disk_path / "run")) == 2
    with pytest.raises(ClosedError):
        ours.save(4, state(4))


def test_a_damaged_one_is_named_and_the_one_before_is_loaded(disk_path):
    with checkpointer(disk_path, keep=3) as ours:
        for step in (1, 2, 3):
            ours.save(step, state(step))
        file = damage(disk_path / "step-000000000003")
        with pytest.raises(DamagedError, match=r"before it is .*step-000000000002") as caught:
            ours.load(fall_back=False)
        assert caught.value.path == str(file)
        with pytest.warns(PenstockWarning, match=f"{file.name}.*before it is"):
            assert_same(ours.load(), state(2))
        (disk_path / "step-000000000002" / "manifest.json").write_text("{}")
        assert [each.ok for each in ours.checkpoints()] == [True, False, True]
        with pytest.warns(PenstockWarning, match="before it is"):
            assert_same(ours.load(), state(1))
        damage(disk_path / "step-000000000001")
        with pytest.warns(PenstockWarning), pytest.raises(DamagedError, match="none before it"):
            ours.load()


def test_a_mismatch_is_not_passed_over(disk_path):
    with checkpointer(disk_path) as ours:
        ours.save(1, state(1))
        with pytest.raises(MismatchError):
            ours.load({"other": 1})


def test_damaged_ones_do_not_count_among_those_that_stay(disk_path):
    with checkpointer(disk_path, keep=1) as ours:
        ours.save(1, state(1))
        ours.save(2, state(2))
        (disk_path / "step-000000000002" / "manifest.json").write_text("torn")
        ours.save(3, state(3))
        assert [each.step for each in ours.checkpoints()] == [3]


def test_one_whose_file_is_gone_does_not_count_among_those_that_stay(disk_path):
    with checkpointer(disk_path, keep=2) as ours:
        for step in (1, 2):
            ours.save(step, state(step))
        next((disk_path / "step-000000000002").glob("*.safetensors")).unlink()
        ours.save(3, state(3))
        assert [(each.step, each.ok) for each in ours.checkpoints()] == [
            (3, True), (2, False), (1, True)
        ]  # fmt: skip


def test_what_was_saved_last_stays_whatever_its_step(disk_path):
    with checkpointer(disk_path, keep=1) as ours:
        for step in (6, 3):
            ours.save(step, state(step))
        assert [each.step for each in ours.checkpoints()] == [6, 3]


class Drawing:
    """What draws numbers as it is loaded."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        torch.rand(3), random.random()


def test_what_draws_numbers_as_it_is_loaded_changes_no_generator(disk_path):
    saved = training_state(part=Drawing(), zoo=Drawing())
    store = small_store()
    store.save(disk_path / "a", saved)
    expected = torch.rand(2), random.random()
    store.load(disk_path / "a", saved)
    assert torch.equal(torch.rand(2), expected[0])
    assert random.random() == expected[1]


def test_two_writers_of_a_directory_are_refused(disk_path):
    with checkpointer(disk_path), pytest.raises(ConfigError, match="held by another"):
        checkpointer(disk_path)
    checkpointer(disk_path).close()


@pytest.mark.parametrize("way", ["closed", "ended"])
def test_a_child_that_was_forked_meanwhile_does_not_hold_the_directory(disk_path, way):
    """As a data loader's worker that persists, or lives a little longer than who was killed."""
    ours = checkpointer(disk_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        if way == "closed":
            ours.close()
        else:
            os.close(ours._root.fd)  # all that the kernel does for a process that ends
            ours._root.fd = -1
        deadline = time.monotonic() + 20
        while True:  # until the child has got so far
            try:
                checkpointer(disk_path).close()
                break
            except ConfigError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_dead_writers_leftovers_are_removed(disk_path):
    (disk_path / ".step-000000000007.saving").mkdir()
    (disk_path / ".step-000000000007.saving" / "data-00000.safetensors").write_bytes(b"x")
    with checkpointer(disk_path):
        assert os.listdir(disk_path) == []


def test_what_another_saves_there_now_is_no_leftover(disk_path):
    with small_store().claimed(str(disk_path / "mine")):
        with checkpointer(disk_path) as ours:
            ours.save(1, state(1))
        assert (disk_path / ".mine.saving").is_dir()


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("reuse", [True, False])
def test_what_is_called_a_checkpoint_and_is_no_directory_holds_up_nobody(kind, reuse, disk_path):
    """Somebody has put an old checkpoint elsewhere, and left a link."""
    there, here = disk_path / "archive", disk_path / "run" / "step-000000000001"
    with checkpointer(disk_path / "run", keep=1, reuse=reuse) as ours:
        ours.save(1, state(1))
        here.rename(there)
        here.symlink_to(there) if kind == "link" else here.write_text("x")
        for step in (2, 3):
            ours.save(step, state(step))
        assert [each.step for each in ours.checkpoints()] == [3]
    assert os.listdir(disk_path / "run") == ["step-000000000003"]
    assert checkpoint.verify(there).ok
    (disk_path / "run" / ".step-000000000001.saving").symlink_to(there)
    with checkpointer(disk_path / "run"):
        assert os.listdir(disk_path / "run") == ["step-000000000003"]
    assert checkpoint.verify(there).ok


def test_only_names_that_a_checkpointer_gives_are_its_own(disk_path):
    names = ["step-0000000000001", "step-00000000000\u0661", "step-1", "step-000000000001.old"]
    for name in names:
        (disk_path / name).mkdir()
    with checkpointer(disk_path, keep=1) as ours:
        ours.save(2, state(2))
        ours.save(10**15, state(3))
        assert [each.step for each in ours.checkpoints()] == [10**15]
    assert sorted(os.listdir(disk_path)) == sorted([*names, f"step-{10**15}"])


def test_where_no_file_may_be_opened_no_checkpoint_is_called_damaged(disk_path, monkeypatch):
    with checkpointer(disk_path) as ours:
        for step in (1, 2):
            ours.save(step, state(step))

        def refused(*_, **__):
            raise TransferError(errno=errno.EMFILE, op="open", path="x", offset_bytes=0, nbytes=0)

        monkeypatch.setattr(reader, "open_at", refused)
        with pytest.raises(TransferError, match="Too many open files"):
            ours.load()


def test_a_directory_is_listed_while_its_owner_retires_what_is_in_it(disk_path, monkeypatch):
    with checkpointer(disk_path, keep=1) as ours:
        for step in (1, 2):
            ours.save(step, state(step))
        was_there = staging.has_spare(disk.Disk().open(disk_path))
        monkeypatch.setattr(listing, "has_spare", lambda _: was_there)
        names = listing.steps_in(disk_path)
        monkeypatch.setattr(listing, "steps_in", lambda _: names)
        assert listing.spare_bytes(disk_path) > 0
        ours.save(3, state(3))
        assert [each.step for each in listing.listing(disk_path)] == []
        with disk.Disk().open(disk_path) as root:
            disk.Disk().remove(root, staging.SPARE)
        assert listing.spare_bytes(disk_path) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"keep": 0},
        {"every": 0},
        {"every": 1.5},
        {"keep": "2"},
        {"every": 3, "overhead": 0.1},
        {"overhead": 2.0},
    ],
)
def test_settings_without_sense_are_refused(settings, disk_path):
    with pytest.raises(ConfigError):
        checkpointer(disk_path, **settings)


def test_steps_are_whole_numbers_or_refused(disk_path):
    """One that is none had a name by which it was never found again."""
    with checkpointer(disk_path) as ours:
        for step in (1.5, "3", True, -1, 10**18):
            with pytest.raises(ConfigError, match="no whole number"):
                ours.save(step, {"x": 1})
        ours.save(np.int64(7), {"x": 1})
        assert [(each.step, type(each.step)) for each in ours.checkpoints()] == [(7, int)]


def test_a_kill_at_every_change_leaves_a_latest_that_loads(disk_path):
    """Three saves of which two stay, so that one is retired."""

    def run(path, fuse):
        ours = checkpointer(path, keep=1, store=fused_store(fuse))
        try:
            for step in (1, 2):
                ours.save(step, state(step))
        finally:
            ours._root.close()

    fuse = Fuse()
    run(disk_path / "count", fuse)
    first = next(i for i, (what, _) in enumerate(fuse.calls) if what == "rename")
    second = next(i for i, (what, _) in enumerate(fuse.calls) if what == "rename" and i > first)
    for at in range(len(fuse.calls)):
        path = disk_path / f"c{at}"
        with pytest.raises(Stopped):
            run(path, Fuse(at))
        with checkpointer(path, keep=1) as ours:
            expected = 0 if at <= first else 1 if at <= second else 2
            found = ours.load()
            assert found is None if not expected else found["numbers"]["step"] == expected
            ours.save(9, state(9))
        assert os.listdir(path) == ["step-000000000009"]


def test_a_failure_during_a_save_keeps_the_last_one(disk_path):
    fuse = Fuse()
    checkpointer(disk_path / "count", store=fused_store(fuse)).save(1, state(1))
    middle = next(i for i, (what, _) in enumerate(fuse.calls) if what == "block") + 2
    with checkpointer(disk_path / "a", store=fused_store(Fuse(middle, no_space()))) as ours:
        with pytest.raises(OSError, match="No space left"):
            ours.save(1, state(1))
        assert os.listdir(disk_path / "a") == []
        ours.save(1, state(1))
        assert (ours.stats.saves, ours.stats.failures) == (1, 1)
        assert_same(ours.load(), state(1))


@pytest.mark.parametrize("reuse", [True, False])
def test_what_cannot_be_retired_is_told_and_the_save_is_good(disk_path, monkeypatch, reuse):
    """It was raised, as if the save had failed."""
    retire, spans = Checkpointer._retire, []

    def noted(self, *args):
        begin = len(fuse.calls)
        retire(self, *args)
        spans.append(range(begin, len(fuse.calls)))

    monkeypatch.setattr(Checkpointer, "_retire", noted)
    fuse = Fuse()
    with checkpointer(disk_path / "count", keep=1, reuse=reuse, store=fused_store(fuse)) as ours:
        ours.save(1, state(1))
        ours.save(2, state(2))
    assert spans[1]
    for at in spans[1]:
        path, fuse = disk_path / f"a{at}", Fuse(at, no_space())
        with checkpointer(path, keep=1, reuse=reuse, store=fused_store(fuse)) as ours:
            ours.save(1, state(1))
            with pytest.warns(
                PenstockWarning, match="step-000000000002' is saved, but what is older"
            ):
                ours.save(2, state(2))
            assert (ours.stats.saves, ours.stats.failures) == (2, 0)
            assert_same(ours.load(), state(2))
            ours.save(3, state(3))
            assert [each.step for each in ours.checkpoints()] == [3]


def test_what_did_not_change_is_shared(disk_path):
    with checkpointer(disk_path, keep=1, incremental=True) as ours:
        old = state(1)
        first = ours.save(1, old)
        assert ours.save(2, old).written_bytes == 0
        old["model"]["weight"][8000] += 1
        last = ours.save(3, old)
        assert 0 < last.written_bytes < first.written_bytes
        assert [each.step for each in ours.checkpoints()] == [3]
        assert checkpoint.verify(ours.latest().path).ok
        assert_same(ours.load(), old)
    with checkpointer(disk_path, keep=1) as ours:
        assert ours.save(4, old).written_bytes == first.nbytes


def test_file_systems_that_share_blocks_write_only_those_that_differ(disk_path, monkeypatch):
    def copy(_, source, target):
        data = os.pread(os.open(source.path, os.O_RDONLY), source.size_bytes, 0)
        fd = os.open(target.path, os.O_WRONLY)
        os.pwrite(fd, data, 0)
        os.fsync(fd)
        return True

    monkeypatch.setattr("penstock.checkpoint.disk.Disk.clone", copy)
    with checkpointer(disk_path, incremental=True) as ours:
        old = state(1)
        ours.save(1, old)
        old["model"]["weight"][8000] += 1
        assert ours.save(2, old).written_bytes == small_store().block_bytes
        assert_same(ours.load(), old)
        assert_same(ours.load(step=1), state(1))


def test_an_interval_follows_what_was_measured():
    interval = Interval(0.01, first_steps=5)
    assert interval.steps == 5
    interval.saved(stall_s=0.5, busy_s=1.0)
    interval.stepped(0.1)
    assert interval.steps == 500  # 0.5 s in 50 s
    for _ in range(60):
        interval.stepped(1.0)
    assert interval.steps == 50
    for _ in range(60):
        interval.saved(stall_s=0.0, busy_s=7.5)
    assert interval.steps == 8  # one save at a time
    with pytest.raises(ConfigError):
        Interval(0.01, first_steps=0)


def test_a_checkpointer_says_when(disk_path):
    now = [0.0]
    with checkpointer(disk_path / "a", every=3) as ours:
        assert [step for step in range(7) if ours.due(step)] == [3, 6]
    with checkpointer(disk_path / "b", overhead=0.5, clock=lambda: now[0]) as ours:
        assert ours.interval_steps == 10
        for step in range(3):
            assert not ours.due(step)
            now[0] += 2.0
        ours.save(3, state(1))
        assert ours.interval_steps == 1  # the clock stood still: it cost nothing


class Data:
    """A loader with a position."""

    def __init__(self):
        self.at = 0

    def batch(self):
        self.at += 1
        generator = torch.Generator().manual_seed(self.at)
        return torch.randn(8, 20, generator=generator)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]


def parts(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 50),
        torch.nn.BatchNorm1d(50),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(50, 20),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": Data()}


def run(found, first, last, save=None):
    losses = []
    for step in range(first, last):
        noise = random.random() + float(np.random.rand())
        found["optimizer"].zero_grad()
        loss = found["model"](found["data"].batch() + noise).square().mean()
        loss.backward()
        found["optimizer"].step()
        found["scheduler"].step()
        losses.append(loss.item())
        if save is not None:
            save(step + 1, training_state(**found, step=step + 1))
    return losses


@pytest.mark.parametrize("wait", [True, False])
def test_a_resumed_run_is_the_one_that_never_stopped(wait, disk_path):
    whole = parts(0)
    random.seed(1), np.random.seed(2)
    with checkpointer(disk_path, keep=20) as ours:
        losses = run(whole, 0, 12, lambda step, made: ours.save(step, made, wait=wait))
    for step in (1, 5, 9):
        resumed = parts(99)
        run(resumed, 0, 3)
        with checkpointer(disk_path, keep=20) as ours:
            loaded = ours.load(training_state(**resumed), step=step)
        assert loaded["step"] == step == resumed["data"].at
        assert run(resumed, step, 12) == losses[step:]
        for key in ("model", "optimizer", "scheduler"):
            assert_same(dict(resumed[key].state_dict()), dict(whole[key].state_dict()))


def test_generators_of_other_devices_are_refused():
    saved = Rng().state_dict()
    with pytest.raises(MismatchError, match="CUDA devices"):
        Rng().load_state_dict({**saved, "cuda": [saved["torch"]] * (len(saved["cuda"]) + 1)})
    with pytest.raises(CheckpointError, match="call yours otherwise"):
        training_state(model=None, **{"rng": Rng()})


def test_the_command_line_tells_what_is_there(disk_path, capsys):
    with checkpointer(disk_path, keep=3) as ours:
        for step in (1, 2):
            ours.save(step, state(step))
    path = str(disk_path / "step-000000000002")
    assert main(["checkpoint", "list", str(disk_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["step"] for each in listed] == [2, 1]
    assert main(["checkpoint", "list", str(disk_path)]) == 0
    assert "not verified" in capsys.readouterr().out
    assert main(["checkpoint", "info", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parts"]["optimizer"]["tensors"] == 2
    assert told["facts"]["step"] == 2
    assert main(["checkpoint", "info", path]) == 0
    assert "optimizer" in capsys.readouterr().out
    assert main(["checkpoint", "verify", path]) == 0
    assert "intact" in capsys.readouterr().out
    file = damage(disk_path / "step-000000000002")
    assert main(["checkpoint", "verify", path, str(disk_path / "step-000000000001"), "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["checkpoints"]
    assert file.name in first["damage"][0]
    assert second["ok"]
    file.unlink()
    assert main(["checkpoint", "list", str(disk_path)]) == 1
    assert main(["checkpoint", "info", path]) == 1
    assert main(["checkpoint", "list", str(disk_path / "none")]) == 1


def test_list_is_told_of_a_checkpoint_and_of_a_directory_without_any(disk_path, capsys):
    with checkpointer(disk_path / "run") as ours:
        path = ours.save(1, state(1)).path
    assert main(["checkpoint", "list", str(path)]) == 1
    assert f"{str(path)!r} is a checkpoint" in capsys.readouterr().err
    assert main(["checkpoint", "list", str(disk_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {str(disk_path)!r}\n"


@pytest.mark.parametrize("what", ["info", "verify"])
def test_the_directory_of_a_run_is_no_checkpoint_and_its_latest_is_named(disk_path, capsys, what):
    """It was said to be damaged, and that another should be loaded."""
    with checkpointer(disk_path, keep=3) as ours:
        for step in (1, 2):
            ours.save(step, state(step))
    assert main(["checkpoint", what, str(disk_path)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{str(disk_path)!r} contains checkpoints but is not one: name one of" in told.err
    assert repr(str(disk_path / "step-000000000002")) in told.err


def test_the_help_of_list_keeps_the_name_of_a_checkpointer(capsys):
    with pytest.raises(SystemExit):
        main(["checkpoint", "list", "--help"])
    assert "the checkpoints in the directory of a Checkpointer" in capsys.readouterr().out


@pytest.mark.parametrize("wait", [True, False])
def test_states_on_flash_are_saved_and_resumed(wait, disk_path, small_knobs):
    from penstock.optim import FlashAdamW

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(40, 30)
        return model, FlashAdamW(model.parameters(), flash=disk_path, tile=4096)

    def train(model, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(5, 40, generator=generator)).square().mean().backward()
            optimizer.step()

    model, optimizer = make(0)
    train(model, optimizer, range(3))
    other, its = make(1)
    train(other, its, range(2))
    with checkpointer(disk_path / "run") as ours:
        ours.save(3, {"model": model, "optimizer": optimizer}, wait=wait)
        train(model, optimizer, range(3, 6))
        ours.load({"model": other, "optimizer": its})
    train(other, its, range(3, 6))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(its.state_dict()["state"], optimizer.state_dict()["state"])
    optimizer.close()
    its.close()


def saved(ours, step, *, wait):
    ours.save(step, state(step), wait=wait)
    ours.wait()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("how", ["removed", "replaced", "linked elsewhere"])
def test_a_directory_that_is_another_by_now_is_not_saved_into(disk_path, how, wait):
    where, real = disk_path / "run", disk_path / "real"
    real.mkdir()
    where.symlink_to("real")
    with checkpointer(where, keep=1) as ours:
        for step in (1, 2):
            ours.save(step, state(step))
        real.rename(disk_path / "away")
        if how == "replaced":
            real.mkdir()
        elif how == "linked elsewhere":
            (disk_path / "other").mkdir()
            where.unlink()
            where.symlink_to("other")
        with pytest.raises(CheckpointError, match=r"not the directory any more .* put it back"):
            saved(ours, 3, wait=wait)
        assert ours.stats.failures == 1
        if how != "removed":
            assert os.listdir(where) == []
            with checkpointer(where) as another:  # that is nobody's
                another.save(7, state(7))
            (where / "step-000000000007").rename(disk_path / "seven")
            where.unlink()
            where.symlink_to("away")
        else:
            (disk_path / "away").rename(real)
        ours.save(4, state(4))
        assert [each.step for each in ours.checkpoints()] == [4]


def test_on_a_disk_that_has_become_read_only_the_last_one_loads(disk_path, monkeypatch):
    with checkpointer(disk_path, keep=1) as ours:
        for step in (1, 2):
            ours.save(step, state(step))
        (disk_path / "..spare.saving").rename(disk_path / "away")
    (disk_path / "away").rename(disk_path / "..spare.saving")  # as a killed process leaves it

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(disk, "renameat2", refuse)
    with checkpointer(disk_path) as ours:
        assert_same(ours.load(), state(2))
        with pytest.raises(TransferError, match=r"rename .*Read-only file system") as caught:
            ours.save(3, state(3))
        assert caught.value.path.startswith(str(disk_path))
    assert (disk_path / "..spare.saving").exists()


def test_what_a_failed_save_could_not_remove_does_not_take_the_room_of_the_next(
    disk_path, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        "penstock.checkpoint.api.check_fits", lambda *_: seen.append(os.listdir(disk_path))
    )
    with checkpointer(disk_path) as ours:
        left = disk_path / ".step-000000000001.saving"
        left.mkdir()
        (left / "data-00000.safetensors").write_bytes(bytes(10**6))
        ours.save(2, state(2))
    assert seen == [[".step-000000000002.saving"]]


@pytest.mark.parametrize("clock", [-3e9, 5e11])
def test_a_clock_that_is_wrong_changes_nothing_but_what_is_said_of_the_time(
    disk_path, monkeypatch, capsys, clock
):
    with checkpointer(disk_path) as ours:
        ours.save(1, state(1))
        monkeypatch.setattr(time, "time", lambda: clock)
        ours.save(2, state(2))
        monkeypatch.undo()
        assert [each.step for each in ours.checkpoints()] == [2, 1]
        assert_same(ours.load(), state(2))
    assert main(["checkpoint", "list", str(disk_path)]) == 0
    assert capsys.readouterr().out.count("present") == 2
