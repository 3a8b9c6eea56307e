"""Run ``step``: a whole pass, or the rest of one that backward began; then a commit."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from penstock.core.errors import ConfigError, PenstockWarning
from penstock.optim import journal
from penstock.optim.memory import memory_notes
from penstock.optim.overlap import Overlap
from penstock.optim.states import FlashStates
from penstock.optim.wear import wear_of

_log = logging.getLogger("penstock.optim")


class Conductor:
    """Steps of one optimizer.

    Attributes:
        states: What they pass over.
        is_told: Whether the user was told what steps write, and of the memory that they take.
    """

    def __init__(self, states: FlashStates) -> None:
        """Take over states whose groups are all there; begin to listen to backward if asked to.

        Raises:
            ConfigError: Another process holds the durable states of the directory, or another
                optimizer updates a parameter in backward.
        """
        self.states = states
        self.is_told = False
        self._journal = None
        if states.config.durable:
            self._journal = journal.Journal(states.config.directories)
            if self._journal.last is not None:
                states.hold(
                    f"{states.config.directories[0]!r} holds durable steps of an earlier run, the last"
                    f" of them {self._journal.last.step}: call resume() to go on after it, load a state"
                    " dict to begin anew, or name another directory"
                )
        try:
            self._overlap = Overlap(states) if states.config.overlap else None
            self._listen()
        except BaseException:
            if self._journal is not None:
                self._journal.close()
            raise

    def step(self) -> None:
        """Make a step. Raises as ``OnFlash.step``."""
        self.states.check_can_step()
        if not self.is_told:
            self._tell()
        if self._overlap is not None:
            self._overlap.finish()
        else:
            self.states.step()
        if self._journal is not None:
            journal.commit(self.states, self._journal)

    def check_between_steps(self, what: str) -> None:
        """Raise ConfigError if backward has begun a step that was not finished."""
        if self._overlap is not None and self._overlap.is_under_way:
            raise ConfigError(f"{what} between backward and step: overlap=True has begun the step")

    def resume(self) -> int:
        """See ``OnFlash.resume``."""
        self.check_between_steps("resume()")
        if self._journal is None:
            raise ConfigError(
                "there is nothing to resume: set durable=True, for this run and the next"
            )
        last = self._journal.last
        if last is None:
            return 0
        journal.restore(self.states, last)
        self.states.hold(None)
        return last.step

    def make_way(self) -> None:
        """A state dict is about to be loaded."""
        if self._journal is not None:
            journal.make_way(self.states, self._journal)

    def loaded(self) -> None:
        """A state dict was loaded: what an earlier run left may be overwritten."""
        self.states.hold(None)
        if self._journal is not None:
            journal.commit(self.states, self._journal)

    def listen(self) -> None:
        """Groups were added."""
        if self._overlap is not None:
            self._overlap.listen()
        self._listen()

    def close(self) -> None:
        """Stop everything. Idempotent."""
        if self._overlap is not None:
            self._overlap.close()
        self.states.close()
        if self._journal is not None:
            self._journal.close()

    def _listen(self) -> None:
        gradients = self.states.gradients
        if self._overlap is None and gradients is not None:
            gradients.listen()

    def _tell(self) -> None:
        self.is_told = True
        for note in memory_notes(self.states):
            warnings.warn(note, PenstockWarning, stacklevel=6)
        wear = wear_of(self.states)
        _log.info("%s", wear)
        if wear.is_beyond:
            warnings.warn(str(wear), PenstockWarning, stacklevel=6)

    def __getstate__(self) -> Any:
        """Not copied."""
        raise ConfigError("states on flash cannot be copied or pickled")
