"""What keeps the budget of DRAM: the kernel where that is permitted, else the manager's own looking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.core.errors import ConfigError, JobError
from penstock.jobs.cgroups import own_place
from penstock.jobs.description import Machine
from penstock.jobs.enclosure import Enclosure, Room, release
from penstock.jobs.policy import Entry

_AS_DESCRIBED: Final = "looking, as described"


class Budget:
    """Of all jobs together. For one thread.

    Attributes:
        kept_by: The directory of its control group, or why there is none.
    """

    def __init__(self, machine: Machine, *, state: str, tell: Callable[[str], None]) -> None:
        """Nothing keeps it yet.

        Args:
            machine: As it was described.
            state: The manager's directory.
            tell: Is told, in a line, what goes wrong.
        """
        self._machine = machine
        self._state = state
        self._tell = tell
        self._has_failed = self._is_closed = False
        self._enclosure: Enclosure | None = None
        self.kept_by = _AS_DESCRIBED

    @property
    def is_enforced(self) -> bool:
        """Whether the kernel keeps it."""
        return self._enclosure is not None

    @property
    def group(self) -> str | None:
        """The directory of its control group."""
        return None if self._enclosure is None else self._enclosure.path

    def keep(self, found: str | None) -> None:
        """Have it kept from now on.

        Args:
            found: The directory of the control group of an earlier manager that was killed.

        Raises:
            ConfigError: The kernel is to keep it, and that is not permitted.
        """
        enforce, nbytes = self._machine.enforce, self._machine.memory_bytes
        try:
            if enforce != "looking":
                self._enclosure = Enclosure(
                    own_place(), state=self._state, budget_bytes=nbytes, found=found
                )
                self.kept_by = self._enclosure.path
            elif found is not None:
                release(found)
        except JobError as error:
            if enforce == "cgroup":
                raise ConfigError(f"[machine] enforce is 'cgroup': {error}") from error
            self.kept_by = f"looking, not by the kernel: {error}"

    def say(self) -> None:
        """Tell by what it is kept, unless that was described."""
        if self._enclosure is None:
            if self.kept_by != _AS_DESCRIBED:
                self._tell(f"the budget is kept by {self.kept_by}")
            return
        self._tell(f"the budget is kept by the kernel, in {self.kept_by}")
        if not self._enclosure.bars_swap:
            self._tell("warning: this kernel cannot bar jobs from swap, where the excess may go")

    def allow(self, entries: Sequence[Entry]) -> None:
        """Have the kernel let each job hold its part, before it is woken."""
        if self._enclosure is None:
            return
        try:
            self._enclosure.allow(entries)
            self._has_failed = False
        except JobError as error:
            if not self._has_failed:
                self._tell(f"warning: {error}")
            self._has_failed = True

    def room_for(self, name: str) -> Room | None:
        """Where a job is to begin; None: anywhere. Raises JobError."""
        return None if self._enclosure is None else self._enclosure.begin(name)

    def room_of(self, name: str, pid: int) -> Room | None:
        """Where an earlier manager has begun a job."""
        return None if self._enclosure is None else self._enclosure.find(name, pid)

    def close(self, *, wait: bool) -> None:
        """Remove the control group, if no job lives in it. Idempotent.

        Args:
            wait: For a moment, for processes that have been ended.
        """
        if self._enclosure is not None and not self._is_closed:
            self._is_closed = True
            self._enclosure.close(wait=wait)
