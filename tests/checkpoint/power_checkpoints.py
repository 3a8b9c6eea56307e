"""Checkpoints that are saved on a disk that may lose its power, and what of them is to be there then."""

import errno
import functools
import math
import os

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_runs import assert_same, small_store

from penstock import checkpoint
from penstock.checkpoint import Checkpointer
from penstock.checkpoint.dcp import DcpReader, DcpWriter
from penstock.checkpoint.disk import Disk as SystemDisk
from penstock.io.threads import ThreadEngine
from power_runs import Chance, patterns

BLOCK = 4096


class SharingDisk(SystemDisk):
    """Of a file system that shares blocks between files, as the tests' own may not."""

    def clone(self, source, target):
        with (
            open(f"/proc/self/fd/{source.fd}", "rb") as shared,
            open(f"/proc/self/fd/{target.fd}", "r+b") as file,
        ):
            os.pwrite(file.fileno(), shared.read(), 0)
        return True


def store(disk=None):
    """Of small blocks and files, whose every change can be noted."""
    return small_store(
        disk=SystemDisk() if disk is None else disk,
        make_engine=lambda: ThreadEngine(1),
        block_bytes=BLOCK,
        file_bytes=2 * BLOCK,
    )


def state(seed):
    """Three files: one that is always the same, one that differs in a block, one that is another."""
    random = torch.Generator().manual_seed(seed)
    partly = torch.arange(4000.0)
    partly[1500:1600] = seed
    return {
        "same": torch.arange(3000),
        "partly": partly,
        "other": torch.randn(2500 + seed % 2, generator=random),
        "seed": seed,
    }


class Run:
    """Saves of one Checkpointer in ``runs/a`` of a disk, and what may be found there at which moment.

    ``points``: step, seed, the moment from which it may be found, and the one from which it must be.
    """

    def __init__(self, disk, before=None, at=0, **settings):
        """The first; or another, after what has befallen the one before at a moment."""
        self.disk = disk
        self.settings = {"keep": 2, "store": store(), **settings}
        self.ours = Checkpointer(disk.root / "runs" / "a", **self.settings)
        self.opened = disk.now
        self.points, self.known, self.stayed = [], set(), [{}]
        if before is not None:
            self.known, self.stayed = before.known, before.stays(at)
            self.points = [(*each, 0, self.opened) for each in self.check(self.stayed).items()]

    def save(self, step, seed, *, wait=True):
        begun = self.disk.now
        self.known.add((step, seed))
        self.points.append((step, seed, begun, math.inf))
        self.ours.save(step, state(seed), wait=wait)
        self.ours.wait()
        self.points[-1] = (step, seed, begun, self.disk.now)

    def stays(self, at):
        """What must be there at the least, seeds by step; a save that is not over or failed may be."""
        if at < self.opened:
            return self.stayed
        done = max((each[3] for each in self.points if each[3] <= at), default=0)
        possible = [{}]
        for step, seed, begun, ended in self.points:
            found = [self._with(there, step, seed) for there in possible]
            if ended <= at:
                possible = found
            elif done <= begun <= at:
                possible += found
        return possible

    def _with(self, there, step, seed):
        there = {**there, step: seed}
        steps = {step, *sorted(there)[-self.ours._keep :]}
        return {each: there[each] for each in steps}

    def check(self, possible):
        """What is there is what was saved, the latest is found, and enough before it; which ones."""
        found = self.ours.load()
        whole = [each.step for each in self.ours.checkpoints() if each.ok]
        states = {step: self.ours.load(step=step) for step in whole}
        seeds = {step: each["seed"] for step, each in states.items()}
        for each in states.values():
            assert_same(each, state(each["seed"]))
        assert set(seeds.items()) <= self.known
        assert any(each.items() <= seeds.items() for each in possible), (seeds, possible)
        assert (found and found["seed"]) == (seeds[max(seeds)] if seeds else None)
        return seeds


def train(run):
    """New files, files of retired checkpoints, and one that is replaced."""
    for step in range(1, 5):
        run.save(step, step, wait=step != 4)
    run.save(4, 10)
    run.save(5, 5)
    run.ours.close()


def go_on(run, step):
    """Whatever is left is no hindrance, and goes."""
    run.save(step, 20)
    assert_same(run.ours.load(step=step), state(20))
    run.save(30, 30)
    run.save(31, 31)
    run.ours.close()
    names = {f"step-{step:012}" for step in (30, 31)}
    assert set(os.listdir(run.ours.directory)) == set(sorted(names)[-run.ours._keep :])


KINDS = {
    "one": {"keep": 1},
    "two": {"keep": 2},
    "new": {"keep": 1, "reuse": False},
    "linked": {"keep": 1, "incremental": True},
    "shared": {"keep": 2, "incremental": True, "store": store(SharingDisk())},
    "encoded": {"keep": 1, "codec": "exponent"},
}
"""Of a ``Checkpointer``; the first are tried in every run."""


class Named:
    """Saves to one path, each over the one before; seeds are even, for DCP wants the same sizes."""

    def __init__(self, disk, with_dcp):
        self.disk, self.with_dcp = disk, with_dcp
        self.path = disk.root / "a"
        self.points = [(None, 0, 0)]

    def save(self, seed):
        begun = self.disk.now
        if self.with_dcp:
            dcp.save(state(seed), storage_writer=DcpWriter(self.path, store=store()), no_dist=True)
        else:
            store().save(self.path, state(seed))
        self.points.append((seed, begun, self.disk.now))

    def possible(self, at):
        last = max(i for i, (_, _, done) in enumerate(self.points) if done <= at)
        return [seed for seed, begun, _ in self.points[last:] if begun <= at]

    def load(self):
        """What is there, proven; its seed."""
        if not self.path.exists():
            return None
        if self.with_dcp:
            assert checkpoint.verify(self.path).ok
            found = state(0)
            dcp.load(found, storage_reader=DcpReader(self.path, store=store()), no_dist=True)
        else:
            found = store().load(self.path)
        assert_same(found, state(found["seed"]))
        return found["seed"]


class Waits:
    """Counts the waits for the device; one of them fails. To be made before they are noted."""

    def __init__(self, monkeypatch, failing=None):
        self.count, self.failing = 0, failing
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, functools.partial(self.wait, getattr(os, name)))

    def wait(self, call, descriptor):
        self.count += 1
        if self.count - 1 == self.failing:
            raise OSError(errno.EIO, "as if")
        call(descriptor)


def each_loss(disk, moments, folder):
    """Losses of power in which one directory fares otherwise than all else."""
    for at in moments:
        for fates in patterns(disk, at):
            with Chance(None, folder).folder_for() as path:
                yield at, disk.lose_power(at, path, fates)
