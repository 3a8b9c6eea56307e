"""A limit for what pytest-timeout does not see: a worker of pytest-xdist that hangs between two tests."""

import faulthandler
import os
import threading
import time

import pytest

IDLE_S = 120.0
"""A worker is given its next test, or the end, within moments of its last one."""


class IdleWatch:
    """Ends this process, telling where each of its threads is, when no test has run for a while.

    A thread that hangs in a finalizer may be the one that hears of the next test; then nothing would
    ever end, and nobody could say why.
    """

    def __init__(self, idle_s=IDLE_S):
        self._idle_s = idle_s
        self._since = None  # nothing has run yet, or something runs
        self._out = os.dup(2)  # before a test's output is captured
        threading.Thread(target=self._watch, name="idle-watch", daemon=True).start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self._since = None
        try:
            return (yield)
        finally:
            self._since = time.monotonic()

    def _watch(self):
        while True:
            time.sleep(self._idle_s / 8)
            since = self._since
            if since is not None and time.monotonic() - since > self._idle_s:
                os.write(self._out, f"no test for {self._idle_s:.0f} s; the threads:\n".encode())
                faulthandler.dump_traceback(self._out, all_threads=True)
                os._exit(70)
