"""The budget of all jobs, kept by the kernel: a control group for all, and in it one for each.

[Note: who pays for an overrun]
    The group of all jobs has the budget as its limit, so it holds whatever else goes wrong. But who is
    over it is not who is ended then: the kernel takes the largest. So each job has a group of its own,
    and their limits together are no more than the budget (:func:`.limits.shares`). A job that takes more
    than the others leave it comes to its own limit first, and is ended alone.

[Note: processes beside groups]
    In v2 a group that has processes cannot give the groups in it a limit. So the manager moves out of its
    group into one beside that of its jobs, if it is the only one there, and back in the end.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from penstock.core.errors import JobError
from penstock.core.units import MIB
from penstock.jobs.cgroups import ADVICE, NO_LIMIT, Group, Place
from penstock.jobs.limits import shares
from penstock.jobs.policy import Entry
from penstock.jobs.processes import past_a_shell

_STEP_BYTES: Final = MIB
"""A limit that is off by less is not set anew."""
_DYING_S: Final = 2.0
_ASIDE: Final = "penstock-manager-"
_JOBS: Final = "penstock-jobs-"
_JOB: Final = "job-"
"""Before a job's name: the kernel has files of its own in a group, as ``tasks``."""


class Room:
    """A job's group. For one thread."""

    def __init__(self, group: Group, *, end: Callable[[], None]) -> None:
        """See :class:`Enclosure`."""
        self._group = group
        self._end = end
        self._kills = group.kills()

    @property
    def limit_bytes(self) -> int:
        """How much the job may hold."""
        return self._group.limit_bytes

    def held_bytes(self) -> int:
        """What the kernel counts of it, but for what it would take back."""
        return self._group.held_bytes()

    def inside(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """A command that begins in it, and has all of this environment."""
        return self._group.inside([*past_a_shell(env), *command])

    def was_overrun(self) -> bool:
        """Whether the kernel has ended a process in it since the last call."""
        before, self._kills = self._kills, self._group.kills()
        return self._kills > before

    def end(self) -> None:
        """The job is over: nothing of it goes on, and the group is removed."""
        self._end()


class Enclosure:
    """The groups of a manager's jobs. For one thread.

    Attributes:
        path: The directory of the group of all.
    """

    def __init__(
        self, place: Place, *, state: str, budget_bytes: int, found: str | None = None
    ) -> None:
        """Make the group, or take it over from a manager that was killed.

        Args:
            place: Where this process stands: beneath it, if it is made.
            state: The manager's directory, which the group is named after.
            budget_bytes: Of all jobs together.
            found: The directory of an earlier manager's. It is used if processes are in it, else removed.

        Raises:
            JobError: It is not permitted, and why.
        """
        self._place = place
        self._budget_bytes = budget_bytes
        self._aside: Group | None = None
        self._jobs: dict[str, Group] = {}
        self._shares: dict[str, int] = {}
        if found is not None and _is_ours(found) and not discard(found):
            self._all = Group.at(found)
        else:
            self._stand_aside()
            self._all = self._made(state)
        self.path = self._all.path
        try:
            self._all.limit_groups_below()
            self._all.limit(budget_bytes)
        except (OSError, JobError) as error:
            self.close()
            raise JobError(f"{self.path!r} cannot be given a limit: {error}") from error
        self.bars_swap = self._all.can_bar_swap()

    def _stand_aside(self) -> None:
        """See [Note: processes beside groups]. Raises JobError."""
        above = Group(self._place.path, self._place.version)
        for each in above.below():
            if os.path.basename(each.path).startswith(_ASIDE):
                each.remove()  # of a manager that was killed, if nobody is in it
        try:
            above.limit_groups_below()
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise JobError(
                    f"{self._place.path!r} is not ours ({error.strerror}): {ADVICE}"
                ) from error
        name = f"{_ASIDE}{os.getpid()}"
        self._aside = Group.make(self._place.path, name, self._place.version, limited=False)
        try:
            self._aside.enter(os.getpid())
            above.limit_groups_below()
        except OSError as error:
            self._come_back()
            others = "other processes are in it" if error.errno == errno.EBUSY else error.strerror
            raise JobError(
                f"groups in {self._place.path!r} get no limit ({others}): {ADVICE}"
            ) from error

    def _made(self, state: str) -> Group:
        digest = hashlib.sha256(os.path.realpath(state).encode()).hexdigest()[:12]
        try:
            return Group.make(self._place.path, f"{_JOBS}{digest}", self._place.version)
        except JobError:
            self._come_back()
            raise

    def _come_back(self) -> None:
        if self._aside is None:
            return
        above = Group(self._place.path, self._place.version)
        try:
            above.limit_groups_below(may_have=False)
            above.enter(os.getpid())
        except OSError:
            return  # jobs live on in a group below, which keeps its limit
        self._aside.remove()
        self._aside = None

    # -- jobs -----------------------------------------------------------------------------------------

    def begin(self, name: str) -> Room:
        """For a job that is about to begin, as ``allow`` was told, with nothing in it.

        Raises:
            JobError: It cannot be made.
        """
        path = os.path.join(self.path, _JOB + name)
        Group.at(path).remove()  # an earlier one has counted what was ended in it
        group = Group.make(self.path, _JOB + name, self._place.version)
        group.end_as_one()
        group.limit(self._shares[name])
        return self._room(name, group)

    def find(self, name: str, pid: int) -> Room | None:
        """That of a job that an earlier manager has begun; None: it is in none of ours."""
        group = Group.at(os.path.join(self.path, _JOB + name))
        return self._room(name, group) if pid in group.processes() else None

    def _room(self, name: str, group: Group) -> Room:
        self._jobs[name] = group
        return Room(group, end=lambda: self._end(name))

    def allow(self, entries: Sequence[Entry]) -> None:
        """Give each job what it may hold: first those that get less. Raises JobError.

        Args:
            entries: All jobs as they are about to be; who is to be woken has to have room before.
        """
        limits = self._shares = shares(entries, self._budget_bytes)
        if self._all.limit_bytes != self._budget_bytes:
            self._all.limit(self._budget_bytes)
        changes = {
            name: limit - self._jobs[name].limit_bytes
            for name, limit in limits.items()
            if name in self._jobs
        }
        for name in sorted(changes, key=lambda each: changes[each]):
            if abs(changes[name]) >= _STEP_BYTES:
                self._jobs[name].limit(limits[name])

    def _end(self, name: str) -> None:
        group = self._jobs.pop(name, None)
        if group is not None:
            group.kill()
            group.remove()

    def close(self, *, wait: bool = False) -> None:
        """Remove the group, if no job lives in it. Idempotent.

        Args:
            wait: For a moment, for processes that have been ended.
        """
        end = time.monotonic() + (_DYING_S if wait else 0.0)
        while not (gone := discard(self._all.path)) and time.monotonic() < end:
            time.sleep(_DYING_S / 100)
        if gone:
            self._come_back()


def discard(path: str) -> bool:
    """Remove a group of all and those in it, and say whether it is gone; with processes it stays."""
    group = Group.at(path)
    for each in group.below():
        each.remove()
    return group.remove()


def release(path: str) -> None:
    """Remove a group; if processes are in it, let them hold what they like."""
    if _is_ours(path) and not discard(path):
        group = Group.at(path)
        for each in (*group.below(), group):
            each.limit(NO_LIMIT, swap=True)


def _is_ours(path: object) -> bool:
    """Whether what was recorded can be the group of a manager."""
    return isinstance(path, str) and os.path.basename(path).startswith(_JOBS)
