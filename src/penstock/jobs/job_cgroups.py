"""Control groups that enforce the budget: one for all jobs, and in it one for each job.

[Note: overruns]
    The group of all jobs has the budget as its limit, so the budget holds in any case. But when it is
    exceeded, the kernel kills the largest job, not the one at fault. So each job has its own group, and
    the sum of their limits is at most the budget (:func:`.limits.shares`). A job that takes more than the
    others leave reaches its own limit first, and only it is killed.

[Note: group of the manager]
    In v2 a group that contains processes cannot limit its child groups. So the manager moves from its
    group into a child group beside that of its jobs, if no other process is there, and back at the end.
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
from penstock.jobs.cgroups import ADVICE, NO_LIMIT, Cgroup, CgroupMembership
from penstock.jobs.limits import shares
from penstock.jobs.policy import JobEntry
from penstock.jobs.processes import shell_prefix

_STEP_BYTES: Final = MIB
"""Minimum change of a limit."""
_EXIT_LIMIT_S: Final = 2.0
_MANAGER: Final = "penstock-manager-"
_JOBS: Final = "penstock-jobs-"
_JOB: Final = "job-"
"""Prefix of a job's name, because the kernel has files in a group, such as ``tasks``."""


class JobCgroup:
    """Control group of one job. For one thread."""

    def __init__(self, group: Cgroup, *, end: Callable[[], None]) -> None:
        """Wrap a group; made by :class:`JobCgroups`."""
        self._group = group
        self._end = end
        self._kills = group.kills()

    @property
    def limit_bytes(self) -> int:
        """Limit of the job's memory."""
        return self._group.limit_bytes

    def held_bytes(self) -> int:
        """Return the memory that the kernel counts, without what it could reclaim."""
        return self._group.held_bytes()

    def inside(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Return a command that runs in the group, with the whole environment."""
        return self._group.inside([*shell_prefix(env), *command])

    def was_overrun(self) -> bool:
        """Return whether the kernel has killed a process in it since the last call."""
        before, self._kills = self._kills, self._group.kills()
        return self._kills > before

    def end(self) -> None:
        """Kill the remaining processes of an ended job, and remove the group."""
        self._end()


class JobCgroups:
    """The groups of a manager's jobs. For one thread.

    Attributes:
        path: Directory of the group of all jobs.
    """

    def __init__(
        self, place: CgroupMembership, *, state: str, budget_bytes: int, found: str | None = None
    ) -> None:
        """Create the group, or take over that of a killed manager.

        Args:
            place: Group of this process, the parent of a new group.
            state: Directory of the manager, from which the group's name is derived.
            budget_bytes: Budget of all jobs together.
            found: Directory of an earlier manager's group; used if it has processes, otherwise removed.

        Raises:
            JobError: It is not permitted; the message says why.
        """
        self._place = place
        self._budget_bytes = budget_bytes
        self._manager_group: Cgroup | None = None
        self._jobs: dict[str, Cgroup] = {}
        self._shares: dict[str, int] = {}
        if found is not None and _is_ours(found) and not remove_groups(found):
            self._all = Cgroup.at(found)
        else:
            self._move_manager()
            self._all = self._make_group(state)
        self.path = self._all.path
        try:
            self._all.limit_groups_below()
            self._all.limit(budget_bytes)
        except (OSError, JobError) as error:
            self.close()
            raise JobError(f"a limit cannot be set in {self.path!r}: {error}") from error
        self.bars_swap = self._all.can_bar_swap()

    def _move_manager(self) -> None:
        """Move the manager; see [Note: group of the manager]. Raises JobError."""
        above = Cgroup(self._place.path, self._place.version)
        for each in above.below():
            if os.path.basename(each.path).startswith(_MANAGER):
                each.remove()  # of a killed manager, if it is empty
        try:
            above.limit_groups_below()
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise JobError(
                    f"{self._place.path!r} does not belong to this user ({error.strerror}): {ADVICE}"
                ) from error
        name = f"{_MANAGER}{os.getpid()}"
        self._manager_group = Cgroup.make(
            self._place.path, name, self._place.version, limited=False
        )
        try:
            self._manager_group.enter(os.getpid())
            above.limit_groups_below()
        except OSError as error:
            self._move_manager_back()
            others = "it has other processes" if error.errno == errno.EBUSY else error.strerror
            raise JobError(
                f"groups in {self._place.path!r} cannot be limited ({others}): {ADVICE}"
            ) from error

    def _make_group(self, state: str) -> Cgroup:
        digest = hashlib.sha256(os.path.realpath(state).encode()).hexdigest()[:12]
        try:
            return Cgroup.make(self._place.path, f"{_JOBS}{digest}", self._place.version)
        except JobError:
            self._move_manager_back()
            raise

    def _move_manager_back(self) -> None:
        if self._manager_group is None:
            return
        above = Cgroup(self._place.path, self._place.version)
        try:
            above.limit_groups_below(allowed=False)
            above.enter(os.getpid())
        except OSError:
            return  # jobs still run in a child group, which keeps its limit
        self._manager_group.remove()
        self._manager_group = None

    # -- jobs -----------------------------------------------------------------------------------------

    def begin(self, name: str) -> JobCgroup:
        """Create the empty group of a new job, with its limit of the last ``allow``.

        Raises:
            JobError: It cannot be created.
        """
        path = os.path.join(self.path, _JOB + name)
        Cgroup.at(path).remove()  # an earlier one has counted killed processes
        group = Cgroup.make(self.path, _JOB + name, self._place.version)
        group.kill_together()
        group.limit(self._shares[name])
        return self._room(name, group)

    def find(self, name: str, pid: int) -> JobCgroup | None:
        """Return the group of a job of an earlier manager; None if it is in none of our groups."""
        group = Cgroup.at(os.path.join(self.path, _JOB + name))
        return self._room(name, group) if pid in group.processes() else None

    def _room(self, name: str, group: Cgroup) -> JobCgroup:
        self._jobs[name] = group
        return JobCgroup(group, end=lambda: self._end(name))

    def allow(self, entries: Sequence[JobEntry]) -> None:
        """Set each job's limit, lower ones first. Raises JobError.

        Args:
            entries: All jobs in their next phases: a job's limit must be raised before it wakes.
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
            wait: Wait briefly for ended processes to disappear.
        """
        end = time.monotonic() + (_EXIT_LIMIT_S if wait else 0.0)
        while not (gone := remove_groups(self._all.path)) and time.monotonic() < end:
            time.sleep(_EXIT_LIMIT_S / 100)
        if gone:
            self._move_manager_back()


def remove_groups(path: str) -> bool:
    """Remove a group and its child groups if they have no processes; return whether it is removed."""
    group = Cgroup.at(path)
    for each in group.below():
        each.remove()
    return group.remove()


def remove_or_unlimit(path: str) -> None:
    """Remove a group, or its limits if it has processes."""
    if _is_ours(path) and not remove_groups(path):
        group = Cgroup.at(path)
        for each in (*group.below(), group):
            each.limit(NO_LIMIT, swap=True)


def _is_ours(path: object) -> bool:
    """Return whether a recorded path can be the group of a manager."""
    return isinstance(path, str) and os.path.basename(path).startswith(_JOBS)
