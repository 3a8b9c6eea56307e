"""Signals that ask a run to sleep or to go on, also before its session is open.

SIGUSR1 and SIGUSR2 would end the process then, so they are remembered. The signals by which a manager
ends it must take effect.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

from penstock.core.process import fork_guard

SLEEP: Final = signal.SIGUSR1
WAKE: Final = signal.SIGUSR2


def listen_to_manager() -> None:
    """Let SIGINT and SIGTERM end this process properly, even if its parent ignored or blocked them.

    A process inherits both settings: a non-interactive shell makes its background jobs ignore SIGINT.
    Call this in the main thread.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


class PendingSignals:
    """Remembers the latest request. Create it in the main thread.

    Attributes:
        asked: The run is to sleep as soon as it can.
        sleeps: Number of requests to sleep.
        wakes: Number of requests to go on.
    """

    def __init__(self) -> None:
        """Handle those of the signals that have no handler."""
        self.asked = False
        self.sleeps = self.wakes = 0
        self._guard = fork_guard()
        for number in (SLEEP, WAKE):
            if signal.getsignal(number) is signal.SIG_DFL:  # the script may set its own later
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._guard.in_child:
            self.asked = number == SLEEP
            self.sleeps += number == SLEEP
            self.wakes += number == WAKE
