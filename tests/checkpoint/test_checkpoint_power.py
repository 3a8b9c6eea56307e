"""Checkpoints and a loss of power: whatever was not waited for may be there, torn, or not."""

import contextlib
import os

import pytest
from checkpoint_runs import assert_same
from hypothesis import given
from hypothesis import strategies as st
from power_checkpoints import KINDS, Named, Run, Waits, each_loss, go_on, state, store, train

from penstock import TransferError
from penstock.checkpoint import Checkpointer
from penstock.io.threads import ThreadEngine
from penstock.testing.shared_engine import shared_engine_replaced
from power_calls import recording
from power_loss import LOST, PowerLossDisk
from power_runs import Chance, examples, renaming

BY_CHANCE = [
    pytest.param(kind, count, marks=[pytest.mark.slow] if count > 9 else [], id=f"{kind}-{count}")
    for kind, count in [("one", 9), ("linked", 9), *((kind, 60) for kind in KINDS)]
]


def trained(settings, disk_path):
    """A disk on which a run has saved as it trained, and the run."""
    with Chance(None, disk_path).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            run = Run(disk, **settings)
            train(run)
        assert not disk.missed()
    return disk, run


@pytest.mark.parametrize(("kind", "count"), BY_CHANCE)
def test_after_a_loss_of_power_the_last_completed_save_loads_and_the_next_one_works(
    kind, count, disk_path
):
    settings = KINDS[kind]
    disk, run = trained(settings, disk_path)

    @examples(count)
    @given(st.data())
    def lose(data):
        chance = Chance(data, disk_path)
        at = chance.moment(0, disk.now)
        with chance.without_power(disk, at) as left:
            again = Run(left, run, at, **settings)
            go_on(again, data.draw(st.integers(1, 6)))

    lose()


@pytest.mark.parametrize(("kind", "count"), BY_CHANCE)
def test_a_kill_or_a_loss_of_power_and_then_a_loss_of_power(kind, count, disk_path):
    settings = KINDS[kind]
    disk, run = trained(settings, disk_path)
    doubtful = renaming(disk)

    @examples(count)
    @given(st.data())
    def lose(data):
        chance = Chance(data, disk_path)
        at = chance.moment(0, disk.now)
        if data.draw(st.booleans()):
            at = doubtful[chance.moment(0, len(doubtful) - 1)]
        is_killed = data.draw(st.booleans())
        with contextlib.ExitStack() as stack:
            if is_killed:
                left = disk.kill(at, stack.enter_context(chance.folder_for()))
            else:
                left = stack.enter_context(chance.without_power(disk, at))
            with recording(left):
                second = Run(left, run, at, **settings)
                second.save(data.draw(st.integers(1, 6)), 20)
                second.save(6, 6)
                second.ours.close()
            then = chance.moment(at if is_killed else 0, left.now)
            with chance.without_power(left, then) as again:
                third = Run(again, second, then, **settings)
                go_on(third, data.draw(st.integers(1, 7)))

    lose()


@pytest.fixture
def one_call_at_a_time():
    """The shared engine moves in one thread, so that a run can be repeated call by call."""
    with shared_engine_replaced(ThreadEngine(1)):
        yield


@pytest.mark.filterwarnings("ignore:.*torch.distributed is")
@pytest.mark.parametrize("with_dcp", [False, True], ids=["plain", "dcp"])
def test_one_name_has_the_old_one_or_the_new_after_a_kill_and_a_loss_of_power(
    with_dcp, disk_path, one_call_at_a_time
):
    with Chance(None, disk_path).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            run = Named(disk, with_dcp)
            for seed in (2, 4):
                run.save(seed)
        assert not disk.missed()
    doubtful = renaming(disk)

    @examples(15)
    @given(st.data())
    def lose(data):
        chance = Chance(data, disk_path)
        at = chance.moment(0, disk.now)
        if data.draw(st.booleans()):
            at = doubtful[chance.moment(0, len(doubtful) - 1)]
        with chance.folder_for() as path:
            killed = disk.kill(at, path)
            second = Named(killed, with_dcp)
            second.points = [(seed, 0, 0) for seed in run.possible(at)]
            assert second.load() in run.possible(at)
            with recording(killed):
                second.save(6)
            then = chance.moment(at, killed.now)
            allowed = [*(run.possible(at) if then < killed.now else ()), 6]
            with chance.without_power(killed, then) as left:
                third = Named(left, with_dcp)
                assert third.load() in allowed
                third.save(8)
                assert third.load() == 8
                assert os.listdir(left.root) == ["a"]

    lose()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is saved, but what is older")
@pytest.mark.parametrize("kind", ["one", "linked"])
def test_what_a_failed_sync_has_left_in_doubt_is_not_relied_on(kind, disk_path, monkeypatch):
    settings = KINDS[kind]

    def saved_with_a_failure(at):
        """With one wait that fails; how many there were."""
        with Chance(None, disk_path).folder_for() as path, monkeypatch.context() as patch:
            disk, waits = PowerLossDisk(path), Waits(patch, at)
            with recording(disk):
                with contextlib.suppress(TransferError):
                    Run(disk, **settings).ours.close()
                run = Run(disk, **settings)
                for step, seed in [(1, 1), (2, 2), (3, 3), (3, 4), (3, 5), (4, 6)]:
                    with contextlib.suppress(TransferError):
                        run.save(step, seed)
                with contextlib.suppress(TransferError):
                    run.ours.close()
            return disk, run, waits.count

    *_, count = saved_with_a_failure(None)

    @examples(40)
    @given(st.data())
    def lose(data):
        chance = Chance(data, disk_path)
        disk, run, _ = saved_with_a_failure(chance.moment(0, count - 1))
        at = chance.moment(run.opened, disk.now)
        with chance.without_power(disk, at) as left:
            again = Run(left, run, at, **settings)
            go_on(again, 7)

    lose()


# -- each of these was found so -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one", "new"])
def test_what_a_killed_process_has_renamed_has_that_name_before_anything_else_changes(
    kind, disk_path
):
    settings = KINDS[kind]
    with Chance(None, disk_path).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            run = Run(disk, **settings)
            for step, seed in [(1, 1), (2, 2), (2, 3)]:
                run.save(step, seed)
    for at in renaming(disk, "step-000000000002"):
        with Chance(None, disk_path).folder_for() as path:
            killed = disk.kill(at, path)
            with recording(killed):
                second = Run(killed, run, at, **settings)
                second.ours.close()
            for then, left in each_loss(killed, range(at, killed.now + 1), disk_path):
                Run(left, second, then, **settings).ours.close()


def test_what_a_killed_process_has_swapped_stays_until_the_swap_is_on_the_device(disk_path):
    with Chance(None, disk_path).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            run = Named(disk, with_dcp=False)
            for seed in (2, 4):
                run.save(seed)
    at = renaming(disk, "a")[-1]
    with Chance(None, disk_path).folder_for() as path:
        killed = disk.kill(at, path)
        with recording(killed):
            Named(killed, with_dcp=False).save(6)
        for then, left in each_loss(killed, range(at, killed.now + 1), disk_path):
            allowed = [6] if then == killed.now else [2, 4, 6]
            assert Named(left, with_dcp=False).load() in allowed, then


def test_the_directory_that_was_made_for_checkpoints_is_there(disk_path):
    """Also if it was made by a process that was killed; or else no checkpoint in it is."""
    with Chance(None, disk_path).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            first = Run(disk, keep=1)
        for at in range(disk.now + 1):
            with Chance(None, disk_path).folder_for() as again:
                killed = disk.kill(at, again)
                with recording(killed):
                    run = Run(killed, first, at, keep=1)
                    run.save(1, 1)
                for then, left in each_loss(killed, [killed.now], disk_path):
                    Run(left, run, then, keep=1)


def test_after_a_wait_that_failed_the_old_one_is_there_until_another_is(disk_path, monkeypatch):
    """Of a save over an older checkpoint, for the names to be on the device."""

    def saved(failing):
        with Chance(None, disk_path).folder_for() as path, monkeypatch.context() as patch:
            disk, waits = PowerLossDisk(path), Waits(patch)
            with recording(disk):
                run = Named(disk, with_dcp=False)
                run.save(2)
                waits.count, waits.failing = 0, failing
                with contextlib.suppress(TransferError):
                    run.save(4)
                count, failed = waits.count, disk.now
                run.save(6)
        return disk, failed, count

    *_, count = saved(None)
    disk, failed, _ = saved(count - 2)  # the last is that of the old one's removal
    for at, left in each_loss(disk, range(failed, disk.now + 1), disk_path):
        allowed = [6] if at == disk.now else [2, 4, 6]
        assert Named(left, with_dcp=False).load() in allowed, at


@pytest.mark.parametrize("kind", ["one", "new"])
def test_nothing_that_was_removed_comes_back_in_part(kind, disk_path):
    with Chance(None, disk_path).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            run = Run(disk, **KINDS[kind])
            run.save(1, 1)
            run.save(2, 2)
            run.ours.close()
    published = renaming(disk, "step-000000000002")[0]
    for at, left in each_loss(disk, range(published, disk.now + 1), disk_path):
        with Run(left, run, at, **KINDS[kind]).ours as ours:
            assert all(each.ok for each in ours.checkpoints())


def test_a_save_of_an_earlier_step_stays(disk_path):
    """Of a run that has begun anew in a directory that has later ones."""
    for keep in (1, 2):
        with Checkpointer(disk_path / str(keep), keep=keep, store=store()) as ours:
            ours.save(8, state(8))
            ours.save(9, state(9))
            ours.save(3, state(3))
            assert_same(ours.load(step=3), state(3))
            assert_same(ours.load(), state(9))
            ours.save(4, state(4))
            assert [each.step for each in ours.checkpoints()] == [*[9, 8][:keep], 4]


def test_files_that_were_copied_there_and_are_linked_are_waited_for(disk_path):
    """By a program that did not wait for them."""
    store().save(disk_path / "elsewhere", state(1))
    with Chance(None, disk_path).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            os.mkdir(path / "base")
            for name in os.listdir(disk_path / "elsewhere"):
                file = os.open(path / "base" / name, os.O_CREAT | os.O_WRONLY)
                os.write(file, (disk_path / "elsewhere" / name).read_bytes())
                os.close(file)
            saved = store().save(path / "a", state(2), base=path / "base")
        assert saved.written_bytes < saved.nbytes
        with Chance(None, disk_path).folder_for() as without:
            disk.lose_power(disk.now, without, [LOST] * len(disk.volatile(disk.now)))
            assert_same(store().load(without / "a"), state(2))
