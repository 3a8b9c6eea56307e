"""Whatever happens in a save, what was there before it or all of the new one loads."""

import errno
import os
import signal
import textwrap

import pytest
import torch
from checkpoint_runs import (
    BLOCK,
    Fuse,
    Stopped,
    assert_same,
    fused_store,
    is_same,
    no_space,
    small_store,
    state,
)

import preloaded
from penstock import (
    CheckpointError,
    DamagedError,
    NoSpaceError,
    PenstockWarning,
    TransferError,
)
from penstock.checkpoint import Checkpointer
from penstock.io.threads import ThreadEngine
from penstock.testing.faults import Fail, FaultySyscalls

STORE = small_store()


def save_with(fuse, path, seed=2):
    fused_store(fuse).save(path, state(seed))


def count_calls(path):
    fuse = Fuse()
    STORE.save(path, state(1))
    save_with(fuse, path)
    return fuse.calls


def test_a_kill_at_every_change_leaves_the_old_one_or_the_new(disk_path):
    calls = count_calls(disk_path / "count")
    assert {what for what, _ in calls} >= {
        "make",
        "create",
        "block",
        "write",
        "finish",
        "sync",
        "exchange",
    }
    for at in range(len(calls)):
        path = disk_path / f"c{at}"
        STORE.save(path, state(1))
        with pytest.raises(Stopped):
            save_with(Fuse(at), path)
        found = STORE.load(path)
        done = any(what == "exchange" for what, _ in calls[:at])
        assert is_same(found, state(2 if done else 1)), f"killed before {calls[at]}"
        STORE.save(path, state(3))  # what the dead one left is no hindrance
        assert_same(STORE.load(path), state(3))
        assert not (disk_path / f".c{at}.saving").exists()


def test_a_first_save_that_is_killed_is_not_there(disk_path):
    fuse = Fuse()
    save_with(fuse, disk_path / "count")
    for at, call in enumerate(fuse.calls):
        path = disk_path / f"c{at}"
        with pytest.raises(Stopped):
            save_with(Fuse(at), path)
        if any(what == "rename" for what, _ in fuse.calls[:at]):
            assert_same(STORE.load(path), state(2))
        else:
            assert not path.exists(), call


def test_a_failure_at_every_change_is_an_error_and_leaves_nothing(disk_path):
    calls = count_calls(disk_path / "count")
    swapped = next(at for at, (what, _) in enumerate(calls) if what == "exchange")
    # from then on the new one is complete: an old one that stays is no failure
    for at, (what, _) in enumerate(calls[: swapped + 2]):
        path = disk_path / f"c{at}"
        STORE.save(path, state(1))
        with pytest.raises(NoSpaceError) as caught:
            save_with(Fuse(at, no_space()), path)
        assert caught.value.free_bytes >= 0
        assert is_same(STORE.load(path), state(1)), what
        assert not (disk_path / f".c{at}.saving").exists(), what


def test_a_lost_power_forgets_what_was_not_waited_for(disk_path, monkeypatch):
    """Before the rename, everything in the directory has been waited for, and the directory."""
    fuse = Fuse()
    save_with(fuse, disk_path / "a")
    names = [name for what, name in fuse.calls if what in ("create", "write")]
    publish = next(i for i, (what, _) in enumerate(fuse.calls) if what == "rename")
    waited = [
        name for what, name in fuse.calls[:publish] if what in ("finish", "sync_file", "sync")
    ]
    assert {*names, ".a.saving"} <= set(waited)
    assert fuse.calls[publish + 1] == ("sync", disk_path.name)
    last = {name: i for i, (what, name) in enumerate(fuse.calls) if what == "block"}
    for i, (what, name) in enumerate(fuse.calls):
        assert what != "finish" or i > last[name]


def test_no_room_is_seen_before_anything_is_written(disk_path, monkeypatch):
    STORE.save(disk_path / "a", state(1))
    monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda _: 5000)
    fuse = Fuse()
    with pytest.raises(NoSpaceError, match=r"4.88 KiB are free") as caught:
        save_with(fuse, disk_path / "a")
    assert caught.value.free_bytes == 5000 < caught.value.nbytes
    assert [what for what, _ in fuse.calls if what in ("create", "block", "write")] == []
    assert_same(STORE.load(disk_path / "a"), state(1))


def test_a_file_system_that_cannot_swap_says_so(disk_path, monkeypatch):
    STORE.save(disk_path / "a", state(1))
    monkeypatch.setattr("penstock.checkpoint.disk.Disk.exchange", lambda *_: False)
    with pytest.raises(CheckpointError, match="save under another name"):
        STORE.save(disk_path / "a", state(2))
    assert_same(STORE.load(disk_path / "a"), state(1))
    assert os.listdir(disk_path) == ["a"]


def store_that_fails(faults):
    """At calls counted over all its loads."""
    calls = FaultySyscalls(faults)
    return small_store(make_engine=lambda: ThreadEngine(1, syscalls=calls))


def test_reads_that_fail_are_errors(disk_path):
    STORE.save(disk_path / "a", state(1))
    calls = FaultySyscalls()
    small_store(make_engine=lambda: ThreadEngine(1, syscalls=calls)).load(disk_path / "a")
    for at in range(len(calls.calls)):
        with pytest.raises(TransferError, match="Cannot allocate memory"):
            store_that_fails({at: Fail(errno.ENOMEM)}).load(disk_path / "a")
        for lost in (errno.EIO, errno.ENODATA):  # as a controller, and as an SSD, say it
            with pytest.raises(DamagedError, match=r"cannot be read .*load another") as caught:
                store_that_fails({at: Fail(lost)}).load(disk_path / "a", state(2))
            assert ".safetensors" in caught.value.path
            assert ("overwritten already" if at else "nothing was changed") in str(caught.value)


def test_a_damaged_block_that_is_not_wanted_fails_no_load(disk_path):
    old = {"other": torch.ones(5 * BLOCK), "x": torch.randn(BLOCK)}
    STORE.save(disk_path / "a", old)
    first = disk_path / "a" / "data-00000.safetensors"
    data = bytearray(first.read_bytes())
    data[BLOCK + 5] ^= 1
    first.write_bytes(data)
    with pytest.raises(DamagedError):
        STORE.load(disk_path / "a")
    into = {"x": torch.zeros(BLOCK)}
    STORE.load(disk_path / "a", into, partial=True)
    assert torch.equal(into["x"], old["x"])


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EACCES, TransferError), (errno.EIO, DamagedError)]
)
def test_a_file_that_cannot_be_opened_and_is_not_wanted_fails_no_load(
    code, kind, disk_path, monkeypatch
):
    store = small_store(file_bytes=1)
    old = {"other": torch.ones(5 * BLOCK), "x": torch.randn(BLOCK)}
    store.save(disk_path / "a", old)
    real = os.open

    def refuse(path, *args, **rest):
        if os.path.basename(path) == "data-00000.safetensors":
            raise OSError(code, os.strerror(code))
        return real(path, *args, **rest)

    monkeypatch.setattr(os, "open", refuse)
    into = {"x": torch.zeros(BLOCK)}
    store.load(disk_path / "a", into, partial=True)
    assert torch.equal(into["x"], old["x"])
    with pytest.raises(kind, match="data-00000"):
        store.load(disk_path / "a", {"other": torch.zeros(5 * BLOCK)}, partial=True)
    with pytest.raises(kind, match="data-00000"):
        store.load(disk_path / "a")


def test_a_sector_that_cannot_be_read_is_damage_and_the_one_before_is_loaded(disk_path):
    with Checkpointer(disk_path / "run", store=STORE) as ours:
        ours.save(1, state(1))
        ours.save(2, state(2))
    store = store_that_fails({1: Fail(errno.EIO)})
    with (
        Checkpointer(disk_path / "run", store=store) as ours,
        pytest.warns(PenstockWarning, match=r"Input/output error.*before it is"),
    ):
        assert_same(ours.load(), state(1))
    path = disk_path / "run" / "step-000000000002"
    found = store_that_fails({1: Fail(errno.EIO)}).verify(path)
    assert not found.ok
    assert "Input/output error" in found.damage[0]


def test_a_manifest_or_directory_that_cannot_be_read_is_damage(disk_path, monkeypatch):
    STORE.save(disk_path / "a", state(1))
    real = os.open
    for name, code, kind in (
        ("manifest.json", errno.EIO, DamagedError),
        ("a", errno.EUCLEAN, DamagedError),
        ("a", errno.EACCES, TransferError),
    ):

        def refuse(path, *args, name=name, code=code, **rest):
            if os.path.basename(path) == name:
                raise OSError(code, os.strerror(code))
            return real(path, *args, **rest)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(kind):
            STORE.load(disk_path / "a")
        monkeypatch.undo()


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from checkpoint_runs import Fuse, fused_store, state
class Deadly(Fuse):
    def burn(self, what):
        self.calls.append(what)
        if len(self.calls) - 1 == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
fused_store(Deadly(int(sys.argv[2]))).save(sys.argv[1], state(2))
print("done")
"""


@pytest.mark.parametrize(
    "share", [0.6, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.05, 0.3, 0.85, 0.95))]
)
def test_a_process_that_is_killed_leaves_the_old_one_or_the_new(share, disk_path):
    calls = count_calls(disk_path / "count")
    at = int(share * len(calls))
    STORE.save(disk_path / "a", state(1))
    program = textwrap.dedent(PROGRAM).format(tests=os.path.dirname(__file__))
    done = preloaded.run(["-c", program, disk_path / "a", str(at)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    exchanged = any(what == "exchange" for what, _ in calls[:at])
    assert_same(STORE.load(disk_path / "a"), state(2 if exchanged else 1))
    STORE.save(disk_path / "a", state(3))
    assert sorted(os.listdir(disk_path)) == ["a", "count"]
