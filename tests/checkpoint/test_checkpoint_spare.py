"""The files of a retired checkpoint are written over by the next save, unless somebody may miss them."""

import json
import mmap
import os

import pytest
from checkpoint_runs import Fuse, Stopped, assert_same, fused_store, no_space, small_store, state
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import ConfigError, NoSpaceError, checkpoint
from penstock.checkpoint import Checkpointer
from penstock.checkpoint.checkpointer import shares_of
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.reader import OpenCheckpoint
from penstock.checkpoint.staging import SPARE
from penstock.cli import main
from penstock.core.units import MIB


def checkpointer(path, **chosen):
    return Checkpointer(path, **{"store": small_store(), "keep": 1, **chosen})


def files_of(path):
    return {each.name: each.stat().st_ino for each in path.glob("*.safetensors")}


def step(path, number):
    return path / f"step-{number:012}"


def test_the_third_save_has_the_files_of_the_first(disk_path):
    with checkpointer(disk_path) as ours:
        first = ours.save(1, state(1))
        inodes = files_of(step(disk_path, 1))
        assert ours.save(2, state(2)).reused_bytes == 0
        assert sorted(os.listdir(disk_path)) == [SPARE, "step-000000000002"]
        assert [each.step for each in ours.checkpoints()] == [2]
        assert ours.save(3, state(3)).reused_bytes == first.nbytes
        assert files_of(step(disk_path, 3)) == inodes
        assert_same(ours.load(), state(3))
        assert checkpoint.verify(step(disk_path, 3)).ok
        assert ours.stats.reused_bytes == first.nbytes
        ours.save(4, state(4), wait=False)
        ours.wait()
        assert_same(ours.load(), state(4))
        assert ours.stats.reused_bytes == 2 * first.nbytes
    assert os.listdir(disk_path) == ["step-000000000004"]


def two(seed):
    """Of six files."""
    return {"a": state(seed, 30_000), "b": state(seed + 100, 30_000)}


def test_whoever_has_a_file_open_or_mapped_keeps_what_is_in_it(disk_path):
    with checkpointer(disk_path) as ours:
        ours.save(1, two(1))
        names = sorted(files_of(step(disk_path, 1)))
        before = {name: (step(disk_path, 1) / name).read_bytes() for name in names}
        with open(step(disk_path, 1) / names[0], "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        opened = OpenCheckpoint(str(step(disk_path, 1)))
        number = next(i for i, each in enumerate(opened.manifest.files) if each.name == names[1])
        held = opened.file(number)
        os.link(step(disk_path, 1) / names[2], disk_path / "linked")
        for number in (2, 3, 4):
            ours.save(number, two(number))
            assert_same(ours.load(), two(number))
        assert ours.stats.reused_bytes > 0
        assert mapped[:] == before[names[0]]
        found = os.pread(os.open(f"/proc/self/fd/{held.fd}", os.O_RDONLY), 10**6, 0)
        assert found == before[names[1]]
        assert (disk_path / "linked").read_bytes() == before[names[2]]
        mapped.close()
        opened.close()


def test_where_it_cannot_be_told_files_are_new(disk_path, monkeypatch):
    monkeypatch.setattr("penstock.checkpoint.disk.is_alone", lambda _: False)
    with checkpointer(disk_path) as ours:
        for number in (1, 2, 3):
            assert ours.save(number, state(number)).reused_bytes == 0
        assert_same(ours.load(), state(3))


@pytest.mark.parametrize("chosen", [{"reuse": False}, {"incremental": True}])
def test_there_is_no_spare_unless_it_is_wanted(chosen, disk_path):
    with checkpointer(disk_path, **chosen) as ours:
        for number in (1, 2, 3):
            assert ours.save(number, state(number)).reused_bytes == 0
            assert os.listdir(disk_path) == [step(disk_path, number).name]


def test_what_is_damaged_does_no_harm(disk_path):
    with checkpointer(disk_path, keep=2) as ours:
        for number in (1, 2, 3):
            ours.save(number, state(number))
        (step(disk_path, 2) / "manifest.json").write_text("torn")
        (disk_path / SPARE / sorted(files_of(disk_path / SPARE))[0]).unlink()
        ours.save(4, state(4))
        ours.save(5, state(5))
        assert [each.step for each in ours.checkpoints()] == [5, 4]
        assert_same(ours.load(step=4), state(4))


@settings(max_examples=12, deadline=None)
@given(
    saves=st.lists(
        st.tuples(st.sampled_from([10, 4000, 9000, 9001, 30_000]), st.booleans(), st.booleans()),
        min_size=3,
        max_size=6,
    ),
    keep=st.integers(1, 2),
)
def test_whatever_the_states_sizes_each_that_stays_is_what_was_saved(tmp_path_factory, saves, keep):
    path = tmp_path_factory.mktemp("saves")
    with checkpointer(path, keep=keep) as ours:
        readers = []
        for number, (size, is_read, wait) in enumerate(saves):
            ours.save(number, state(number, size), wait=wait)
            ours.wait()
            if is_read:
                for name in files_of(step(path, number)):
                    file = open(step(path, number) / name, "rb")  # noqa: SIM115
                    readers.append((file, os.pread(file.fileno(), 10**6, 0)))
            for each in ours.checkpoints():
                assert each.ok
                assert_same(ours.load(step=each.step), state(each.step, saves[each.step][0]))
                assert set(os.listdir(each.path)) == {
                    "manifest.json",
                    *(file.name for file in OpenCheckpoint(each.path).manifest.files),
                }
        for file, content in readers:
            assert os.pread(file.fileno(), 10**6, 0) == content
            file.close()


def run(path, fuse):
    ours = checkpointer(path, store=fused_store(fuse))
    try:
        for number in (1, 2, 3):
            ours.save(number, state(number, 5000))
    finally:
        ours._root.close()


def published(calls):
    return [at for at, (what, name) in enumerate(calls) if what == "rename" and "step" in name
            and name.endswith(".saving")]  # fmt: skip


def test_a_kill_at_every_change_leaves_a_latest_that_loads(disk_path):
    fuse = Fuse()
    run(disk_path / "count", fuse)
    assert {"reuse", "drop"} <= {what for what, _ in fuse.calls}
    first, second, third = published(fuse.calls)
    for at in range(second, len(fuse.calls)):
        path = disk_path / f"c{at}"
        with pytest.raises(Stopped):
            run(path, Fuse(at))
        with checkpointer(path) as ours:
            expected = 1 if at <= second else 2 if at <= third else 3
            assert_same(ours.load(), state(expected, 5000))
            assert all(each.ok for each in ours.checkpoints())
            ours.save(9, state(9))
            ours.save(10, state(10))
        assert os.listdir(path) == ["step-000000000010"]
    assert first < second


def test_a_failure_at_every_change_keeps_the_last_one(disk_path):
    fuse = Fuse()
    run(disk_path / "count", fuse)
    _, second, third = published(fuse.calls)
    taken = next(at for at, call in enumerate(fuse.calls) if call == ("rename", SPARE))
    assert second < taken < third
    for at in range(taken, third + 1):
        path = disk_path / f"c{at}"
        store = fused_store(Fuse(at, no_space()))
        with checkpointer(path, store=store) as ours:
            for number in (1, 2):
                ours.save(number, state(number, 5000))
            with pytest.raises(NoSpaceError):
                ours.save(3, state(3, 5000))
            assert_same(ours.load(), state(2, 5000))
            ours.save(4, state(4))
            assert_same(ours.load(), state(4))
        assert os.listdir(path) == ["step-000000000004"]


def test_nothing_is_written_over_before_the_system_has_forgotten_the_old_one(disk_path):
    fuse = Fuse()
    run(disk_path / "a", fuse)
    calls = fuse.calls
    taken = calls.index(("rename", SPARE))
    retired = next(at for at, (_, name) in enumerate(calls) if name == "step-000000000001")
    waited = calls.index(("sync", "a"), taken)
    dropped = calls.index(("drop", "manifest.json"), retired)
    written = next(at for at, (what, _) in enumerate(calls) if what == "block" and at > taken)
    assert retired < taken < waited < dropped < written


def test_the_space_of_the_spare_counts_as_free(disk_path, monkeypatch):
    with checkpointer(disk_path) as ours:
        ours.save(1, state(1))
        ours.save(2, state(2))
        monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda _: 2 * MIB)
        ours.save(3, state(3))
        with pytest.raises(NoSpaceError, match="are free"):
            ours.save(4, state(4, 3 * MIB))
        assert_same(ours.load(), state(3))


def test_the_command_line_tells_of_the_spare(disk_path, capsys):
    with checkpointer(disk_path) as ours:
        for number in (1, 2):
            ours.save(number, state(number))
        assert main(["checkpoint", "list", str(disk_path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["spare_bytes"] >= told["checkpoints"][0]["nbytes"]
        assert main(["checkpoint", "list", str(disk_path)]) == 0
        assert "spare" in capsys.readouterr().out


def test_a_spare_of_a_dead_process_is_removed(disk_path):
    ours = checkpointer(disk_path)
    ours.save(1, state(1))
    ours.save(2, state(2))
    ours._root.close()
    checkpointer(disk_path)._root.close()
    assert os.listdir(disk_path) == ["step-000000000002"]


def test_a_file_that_is_open_elsewhere_is_not_alone(disk_path):
    (disk_path / "a").write_bytes(bytes(8192))
    directory = Disk().open(str(disk_path))
    with open(disk_path / "a", "rb"):
        assert Disk().reuse(directory, "a", 4096) is None
    assert os.listdir(disk_path) == []
    directory.close()


def test_what_a_save_in_the_background_takes_is_one_figure():
    assert shares_of(64 * MIB, 2 * MIB) == (16 * MIB, 42 * MIB)
    assert shares_of(12 * MIB, 2 * MIB) == (6 * MIB, 0)
    with pytest.raises(ConfigError, match=r"takes 12\.00 MiB at least"):
        shares_of(11 * MIB, 2 * MIB)
