"""Durable steps and a loss of power: every byte that was not waited for may be there, torn, or not."""

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_runs import assert_same, assert_same_states, give_gradients, parameters, train

from penstock import TransferError
from penstock.optim import FlashAdamW
from power_calls import recording
from power_loss import PowerLossDisk
from power_runs import Chance, examples

SIZES = [(5, 1000), (257,)]
FORMATS = [("exact", torch.float32), ("split", torch.bfloat16), ("int8", torch.bfloat16)]


class Run:
    """Steps of one optimizer, on one disk, and what could be resumed at which moment.

    ``points``: what there is to resume, the moment from which it may be found, and the one from which
    nothing before it may be.
    """

    def __init__(self, disk, dtype, settings, points=((None, 0, 0),)):
        self.disk, self.points = disk, list(points)
        self.params = parameters(dtype, sizes=SIZES)
        folders = sorted(path for path in disk.root.iterdir() if path.is_dir()) or [disk.root]
        self.optimizer = FlashAdamW(
            self.params, durable=True, **{**settings, "flash": tuple(folders)}
        )

    def do(self, action):
        begun = self.disk.now
        action()
        done = self.disk.now
        weights = [p.detach().clone() for p in self.params]
        self.points.append(((weights, self.optimizer.state_dict()), begun, done))

    def step(self, number):
        self.do(lambda: train(self.optimizer, self.params, steps=1, first=number))

    def may_be_found(self, at):
        """The last of the points, or the one in progress."""
        last = max(i for i, (_, _, done) in enumerate(self.points) if done <= at)
        return [point for point in self.points[last:] if point[1] <= at]

    def resume(self, points):
        """One of these is what is found, to the bit; which one, and the step that follows."""
        steps = self.optimizer.resume()
        found = next(point for point in points if steps == _steps(point))
        if found[0] is not None:
            weights, states = found[0]
            assert_same(self.params, weights)
            assert_same_states(self.optimizer.state_dict(), states)
        return found, steps


def _steps(point):
    return 0 if point[0] is None else point[0][1]["penstock"]["steps"]


@pytest.mark.parametrize(("format_name", "dtype"), FORMATS)
def test_a_loss_of_power_leaves_the_last_completed_step(format_name, dtype, small):
    settings = {**small, "format": format_name}
    with Chance(None, small["flash"]).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            run = Run(disk, dtype, settings)
            for step in range(3):
                run.step(step)
            _, early = run.points[1][0]
            run.do(lambda: run.optimizer.load_state_dict(early))
            run.step(3)
            run.optimizer.close()
        assert not disk.missed()

    @examples(40)
    @given(st.data())
    def lose(data):
        chance = Chance(data, small["flash"])
        at = chance.moment(0, disk.now)
        with chance.without_power(disk, at) as left:
            again = Run(left, dtype, settings)
            again.resume(run.may_be_found(at))
            again.optimizer.close()

    lose()


@pytest.mark.parametrize("when", ["first", "last"])
def test_what_a_killed_process_did_not_wait_for_is_waited_for_by_the_next(when, small):
    """Killed while files are made, or while a journal is written; the power fails in the next run."""
    with Chance(None, small["flash"]).folder_for() as path:
        for name in "ab":
            (path / name).mkdir()
        disk = PowerLossDisk(path)
        with recording(disk):
            run = Run(disk, torch.float32, small)
            for step in range(3):
                run.step(step)
            run.optimizer.close()
        assert not disk.missed()
    moments = (0, 8) if when == "first" else (disk.now - 4, disk.now)

    @examples(40)
    @given(st.data())
    def lose(data):
        chance = Chance(data, small["flash"])
        at = chance.moment(*moments)
        with chance.folder_for() as path:
            killed = disk.kill(at, path)
            possible = run.may_be_found(at)
            with recording(killed):
                next_run = Run(killed, torch.float32, small, possible)
                found, steps = next_run.resume(possible)
                if found is possible[0]:
                    next_run.points = possible[:1]
                else:  # it is on the device from now on, and no sooner
                    next_run.points[-1] = (*found[:2], killed.now)
                next_run.step(steps)
                next_run.optimizer.close()
            at = killed.now if when == "first" else chance.moment(at, killed.now)
            with chance.without_power(killed, at) as left:
                again = Run(left, torch.float32, small)
                again.resume(next_run.may_be_found(at))
                again.optimizer.close()

    lose()


def test_what_a_failed_sync_may_have_lost_is_written_again(small, monkeypatch):
    """Though the next step does not visit all of it, and the next sync is well."""
    sync, calls = os.fdatasync, []

    def fail_once(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EIO, "as if")
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", fail_once)
    with Chance(None, small["flash"]).folder_for() as path:
        disk = PowerLossDisk(path)
        with recording(disk):
            run = Run(disk, torch.float32, small)
            run.step(0)
            give_gradients(run.params, 1)
            with pytest.raises(TransferError, match="sync"):
                run.optimizer.step()
            run.do(lambda: train(run.optimizer, run.params, steps=1, first=2, skip=lambda _: (1,)))
            run.optimizer.close()

    @examples(10)
    @given(st.data())
    def lose(data):
        chance = Chance(data, small["flash"])
        with chance.without_power(disk, disk.now) as left:
            again = Run(left, torch.float32, small)
            again.resume(run.points[-1:])
            again.optimizer.close()

    lose()
