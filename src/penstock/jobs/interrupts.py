"""Signals to a manager of jobs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Counted where they arrive, and heeded between two looks.

    Attributes:
        count: How often it was told to end, by Ctrl-C or SIGTERM.
        leaving: Whether it is to leave its jobs as they are, by SIGHUP.
    """

    def __init__(self) -> None:
        """None so far."""
        self.count = 0
        self.leaving = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within, they are heard, even if the parent blocked them; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup has begun it
            heard.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._hear) for number in heard}
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.leaving = True
        else:
            self.count += 1
