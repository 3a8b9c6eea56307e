"""The sampled resident set size of this process, in addition to Penstock's own accounts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

from penstock.observe.recorder import Recorder

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_STATM: Final = Path("/proc/self/statm")


def rss_bytes() -> int:
    """Return the present resident set size, or -1 if the system does not report it."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return -1


class RssSampler:
    """Daemon thread that records the level ``"rss"`` at an interval until it is stopped."""

    def __init__(self, recorder: Recorder, *, interval_s: float = 0.01) -> None:
        """Begin to sample."""
        self._recorder = recorder
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-rss", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            nbytes = rss_bytes()
            if nbytes >= 0:
                self._recorder.level("rss", nbytes)
            if self._stop.wait(self._interval_s):
                return
