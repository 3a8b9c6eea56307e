"""Signals that interrupt a manager of jobs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class ManagerInterrupts:
    """Record of received signals, which the manager acts on between two polls.

    Attributes:
        count: Number of requests to end, by Ctrl-C or SIGTERM.
        detaching: SIGHUP has asked to leave the jobs as they are.
    """

    def __init__(self) -> None:
        """Start without signals."""
        self.count = 0
        self.detaching = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside the block, even if the parent blocked them; for the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.detaching = True
        else:
            self.count += 1
