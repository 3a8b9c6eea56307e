"""Signals to a run before its session is open.

SIGUSR1 and SIGUSR2 would end it then, and are remembered. Those by which a manager ends it must reach it.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

from penstock.core.process import fork_guard

SLEEP: Final = signal.SIGUSR1
WAKE: Final = signal.SIGUSR2


def listen_to_manager() -> None:
    """Make SIGINT and SIGTERM end this process in order, even if its parent ignored or blocked them.

    A process inherits both: a shell that is not interactive makes its background jobs ignore SIGINT.
    Call it in the main thread.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


class PendingSignals:
    """Remembers what was asked for last. Make it in the main thread.

    Attributes:
        asked: Whether the run is to sleep as soon as it can.
    """

    def __init__(self) -> None:
        """Listen to those of the signals that nobody listens to."""
        self.asked = False
        self._guard = fork_guard()
        for number in (SLEEP, WAKE):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if not self._guard.in_child:
            self.asked = number == SLEEP

    def listens_to(self, number: int) -> bool:
        """Whether a signal comes here: the script may listen to it itself by now."""
        return signal.getsignal(number) == self._heard
