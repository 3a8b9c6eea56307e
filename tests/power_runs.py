"""Losses of power that hypothesis chooses."""

import itertools
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from random import Random

from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from power_loss import KEPT, LOST

FATES = st.sampled_from([LOST, KEPT, 2, 3, 4])


class Chance:
    """Moments and fates that hypothesis chooses, and a new directory for each disk."""

    def __init__(self, data, folder):
        self.data, self.folder = data, folder

    def moment(self, first, last):
        """Of a run that may take more moments the next time."""
        return first + self.data.draw(st.integers(0, 99)) * (last - first + 1) // 100

    @contextmanager
    def without_power(self, disk, at):
        """What is left, for a while."""
        drawn = itertools.cycle(self.data.draw(st.lists(FATES, min_size=1, max_size=40)))
        fates = [next(drawn) for _ in disk.volatile(at)]
        if self.data.draw(st.booleans()):  # the same for all of a file or directory
            fates = [fates[each.node % len(fates)] for each in disk.volatile(at)]
        order = self.data.draw(st.none() | st.integers(0, 9).map(Random))
        sector = self.data.draw(st.sampled_from([512, 4096]))
        with self.folder_for() as path:
            yield disk.lose_power(at, path, fates, order=order, sector_bytes=sector)

    @contextmanager
    def folder_for(self):
        path = Path(tempfile.mkdtemp(dir=self.folder))
        yield path
        shutil.rmtree(path)


def patterns(disk, at):
    """Fates where all is lost or all is kept, but for one directory perhaps."""
    volatile = disk.volatile(at)
    directories = {each.node for each in volatile if each.what == "names"}
    found = set()
    for rest, other in ((LOST, KEPT), (KEPT, LOST)):
        for one in (None, *directories):
            found.add(tuple(other if each.node == one else rest for each in volatile))
    return sorted(found)


def renaming(disk, to=""):
    """Moments at which what has been renamed, to this name if one is given, may have its old one."""
    return [
        at
        for at in range(disk.now + 1)
        if any(
            len(each.names) == 2 and (not to or each.names.get(to) is not None)
            for each in disk.volatile(at)
        )
    ]


def examples(count):
    """So many, and more where ``make test-all`` looks for others in each run."""
    more = 20 if "PENSTOCK_TEST_RANDOM" in os.environ else 1
    return hypothesis_settings(max_examples=more * count, suppress_health_check=list(HealthCheck))
