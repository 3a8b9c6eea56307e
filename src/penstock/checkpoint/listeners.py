"""Listeners to a run's ``Checkpointer``, which may also ask it to save now.

When a job is to sleep durably, its script saves at its next opportunity: only the script knows what
belongs to its state.
"""

from __future__ import annotations

from typing import Final, Protocol


class Listener(Protocol):
    """Listener to every ``Checkpointer`` of the process, in the thread that uses it."""

    def opened(self) -> None:
        """Note that there is a Checkpointer."""

    def wants_save(self) -> bool:
        """Return whether the script is to save after this step, and wait for it."""

    def saved(self, path: str, step: int, state: object) -> None:
        """Note that a checkpoint is durable; only after a save with ``wait``."""

    def loaded(self, path: str) -> None:
        """Note that a checkpoint was loaded."""


listeners: Final[list[Listener]] = []
"""Registered listeners: the resume record of ``penstock run --state``, if any."""


def is_wanted() -> bool:
    """Return whether a listener wants a checkpoint now."""
    return any(each.wants_save() for each in listeners)
