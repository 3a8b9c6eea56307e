"""SIGUSR1 and SIGUSR2 to a run that cannot follow them yet: untold, they would end it."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final

SLEEP: Final = signal.SIGUSR1
WAKE: Final = signal.SIGUSR2


class Early:
    """Remembers what was asked for last. Make it in the main thread.

    Attributes:
        asked: Whether the run is to sleep as soon as it can.
    """

    def __init__(self) -> None:
        """Listen to those of the signals that nobody listens to."""
        self.asked = False
        self._pid = os.getpid()
        for number in (SLEEP, WAKE):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.asked = number == SLEEP

    def listens_to(self, number: int) -> bool:
        """Whether a signal comes here: the script may listen to it itself by now."""
        return signal.getsignal(number) == self._heard
