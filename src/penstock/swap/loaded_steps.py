"""Comparison of the checkpoints that the ranks of a job have loaded when they resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.core.errors import SuspendError
from penstock.core.ranks import rank

if TYPE_CHECKING:
    from penstock.runtime.rank_store import RankStore

_NAME: Final = "loaded step"
_NOTHING: Final = "none"
"""Text of a rank that has a Checkpointer and has loaded nothing; a rank without one has no text."""


class LoadedSteps:
    """Steps of the checkpoints that ranks have loaded. For the training thread.

    A rank tells its step before it trains, so the others can read it when their first step has ended: in
    that step the ranks have reduced gradients, or passed on activations.

    Attributes:
        ranks: Function that returns the store of the ranks, if there is one by now.
    """

    def __init__(self, *, tell: Callable[[str], None]) -> None:
        """Begin without a Checkpointer; ``tell`` prints a line for the user."""
        self.ranks: Callable[[], RankStore | None] = lambda: None
        self._tell = tell
        self._own = ""
        self._is_told = False

    def note(self, step: int | None) -> None:
        """Tell other ranks that this one has loaded a step, or with None that it has a Checkpointer."""
        if step is None and self._own:
            return  # a second Checkpointer
        self._own = _NOTHING if step is None else str(step)
        self._publish(self.ranks())

    def common(self) -> int | None:
        """Return the step that all ranks with a Checkpointer have loaded; None if they have loaded none.

        Raises:
            SuspendError: They have loaded different steps.
        """
        ranks = self.ranks()
        if ranks is None:
            return self._alone()
        self._publish(ranks)
        found = {number: text for number, text in ranks.collect(_NAME, 0.0).items() if text}
        if len(set(found.values())) > 1:
            steps = ", ".join(
                f"rank {number}: {'nothing' if text == _NOTHING else f'step {text}'}"
                for number, text in sorted(found.items())
            )
            raise SuspendError(
                f"--resume: ranks have loaded checkpoints of different steps ({steps}), so training on"
                " would mix their states: load a step that all of them have, as with"
                " Checkpointer.load(step=...), or remove the checkpoints that only some have"
            )
        text = next(iter(found.values()), _NOTHING)
        return None if text == _NOTHING else int(text)

    def _publish(self, ranks: RankStore | None) -> None:
        if ranks is not None and self._own:
            ranks.publish(_NAME, self._own)

    def _alone(self) -> int | None:
        if rank() is not None and self._own and not self._is_told:
            self._is_told = True
            self._tell(
                "warning: --resume: it is unknown whether all ranks have loaded the same step, because"
                " there is neither a process group nor torchrun's agent"
            )
        return None
