"""Listeners to a run's ``Checkpointer``, which may also ask it to save now.

A job that is put to sleep durably has its script save at its own next opportunity: nobody else knows what
belongs to the script's state.
"""

from __future__ import annotations

from typing import Final, Protocol


class Listener(Protocol):
    """Is told by every ``Checkpointer`` of the process, in the thread that uses it."""

    def opened(self) -> None:
        """There is one."""

    def wants_save(self) -> bool:
        """Return whether the script is to save after this step, and wait for it."""

    def saved(self, path: str, step: int, state: object) -> None:
        """A checkpoint is durable; only after a save that was waited for."""

    def loaded(self, path: str) -> None:
        """One was loaded."""


listeners: Final[list[Listener]] = []
"""Those there are: the keeper of ``penstock run --state``, if any."""


def is_wanted() -> bool:
    """Return whether somebody wants a checkpoint now."""
    return any(each.wants_save() for each in listeners)
