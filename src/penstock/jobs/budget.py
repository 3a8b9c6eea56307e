"""Enforcement of the DRAM budget, by the kernel if that is permitted, otherwise by polling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.core.errors import ConfigError, JobError
from penstock.jobs.cgroups import own_place
from penstock.jobs.description import JobsMachine
from penstock.jobs.job_cgroups import JobCgroup, JobCgroups, remove_or_unlimit
from penstock.jobs.policy import JobEntry

_AS_DESCRIBED: Final = "polling, as described"


class JobsBudget:
    """Budget of all jobs together. For one thread.

    Attributes:
        kept_by: Directory of its control group, or the reason why there is none.
    """

    def __init__(self, machine: JobsMachine, *, state: str, tell: Callable[[str], None]) -> None:
        """Enforce nothing yet.

        Args:
            machine: Configured machine.
            state: Directory of the manager.
            tell: Function that prints a line about a problem.
        """
        self._machine = machine
        self._state = state
        self._tell = tell
        self._has_failed = self._is_closed = False
        self._enclosure: JobCgroups | None = None
        self.kept_by = _AS_DESCRIBED

    @property
    def is_enforced(self) -> bool:
        """True if the kernel enforces the budget."""
        return self._enclosure is not None

    @property
    def group(self) -> str | None:
        """Directory of its control group."""
        return None if self._enclosure is None else self._enclosure.path

    def enforce(self, found: str | None) -> None:
        """Begin to enforce the budget.

        Args:
            found: Directory of the control group of an earlier manager that was killed.

        Raises:
            ConfigError: The kernel is to enforce it, and that is not permitted.
        """
        enforce, nbytes = self._machine.enforce, self._machine.memory_bytes
        try:
            if enforce != "polling":
                self._enclosure = JobCgroups(
                    own_place(), state=self._state, budget_bytes=nbytes, found=found
                )
                self.kept_by = self._enclosure.path
            elif found is not None:
                remove_or_unlimit(found)
        except JobError as error:
            if enforce == "cgroup":
                raise ConfigError(f"[machine] enforce is 'cgroup': {error}") from error
            self.kept_by = f"polling, not by the kernel: {error}"

    def report(self) -> None:
        """Report how the budget is enforced, unless that was configured."""
        if self._enclosure is None:
            if self.kept_by != _AS_DESCRIBED:
                self._tell(f"the budget is enforced by {self.kept_by}")
            return
        self._tell(f"the budget is enforced by the kernel, in {self.kept_by}")
        if not self._enclosure.bars_swap:
            self._tell(
                "warning: this kernel cannot keep jobs out of swap, which memory over the limit may use"
            )

    def allow(self, entries: Sequence[JobEntry]) -> None:
        """Set each job's limit in the kernel, before jobs are woken."""
        if self._enclosure is None:
            return
        try:
            self._enclosure.allow(entries)
            self._has_failed = False
        except JobError as error:
            if not self._has_failed:
                self._tell(f"warning: {error}")
            self._has_failed = True

    def room_for(self, name: str) -> JobCgroup | None:
        """Return a new job's control group; None without enforcement. Raises JobError."""
        return None if self._enclosure is None else self._enclosure.begin(name)

    def room_of(self, name: str, pid: int) -> JobCgroup | None:
        """Return the control group of a job that an earlier manager has started."""
        return None if self._enclosure is None else self._enclosure.find(name, pid)

    def close(self, *, wait: bool) -> None:
        """Remove the control group, if no job lives in it. Idempotent.

        Args:
            wait: Wait briefly for ended processes to disappear.
        """
        if self._enclosure is not None and not self._is_closed:
            self._is_closed = True
            self._enclosure.close(wait=wait)
