"""Limits for what pytest-timeout does not see: that a worker of pytest-xdist hangs between two tests, or
that none says anything any more.

Without them a run never ends, and nobody can say why.
"""

import faulthandler
import os
import threading
import time

import psutil
import pytest

IDLE_S = 120.0
"""A worker is given its next test, or the end, within moments of its last one."""
SILENT_S = 1500.0
"""More than any test may take."""


class Watch:
    """Ends this process and all below it, telling why, when ``self.since`` is long ago.

    Attributes:
        since: When it became idle, by ``time.monotonic``; None: it is not.
    """

    def __init__(self, limit_s):
        self.since = None
        self._limit_s = limit_s
        self._out = os.dup(2)  # before a test's output is captured
        threading.Thread(target=self._watch, name="idle-watch", daemon=True).start()

    def _watch(self):
        while True:
            time.sleep(self._limit_s / 8)
            since = self.since
            if since is not None and time.monotonic() - since > self._limit_s:
                os.write(self._out, f"\nno test for {self._limit_s:.0f} s\n{processes()}".encode())
                faulthandler.dump_traceback(self._out, all_threads=True)
                for each in psutil.Process().children(recursive=True):
                    each.kill()
                os._exit(70)


class IdleWatch(Watch):
    """Of a worker: a thread that hangs in a finalizer may be the one that hears of the next test."""

    def __init__(self, limit_s=IDLE_S):
        super().__init__(limit_s)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self.since = None
        try:
            return (yield)
        finally:
            self.since = time.monotonic()


class SilenceWatch(Watch):
    """Of the process that has the workers: one may be stopped, or dead without a word."""

    def __init__(self, limit_s=SILENT_S):
        super().__init__(limit_s)

    def pytest_runtest_logreport(self):
        self.since = time.monotonic()

    def pytest_sessionfinish(self):
        self.since = None


def processes():
    """This process and all below it: number, state, and what it runs; a line each."""
    this = psutil.Process()
    lines = []
    for each in (this, *this.children(recursive=True)):
        try:
            lines.append(f"{each.pid} {each.status()} {' '.join(each.cmdline())[:200]}\n")
        except psutil.Error:
            continue
    return "".join(lines)


def leave_pipe_to_worker(config):
    """Keep forked children off the pipe of this worker, or its death is not noticed before theirs."""
    plugins = config.pluginmanager.get_plugins()
    worker = next(each for each in plugins if type(each).__name__ == "WorkerInteractor")
    pipe = worker.channel.gateway._io.outfile.fileno()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, pipe, inheritable=False))
