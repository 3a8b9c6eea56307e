"""Processes of ``soak.py``: the job, and the undisturbed run with which it is compared."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = Path(__file__).with_name("_soak_child.py")
PATIENCE_S = 300


def started(words, **streams):
    return subprocess.Popen([sys.executable, *words], **streams)


class Job:
    """A process of the job, and what it has noted."""

    def __init__(self, kind, place, notes, **how):
        self.news = []  # what nobody has dealt with yet
        self._notes, self._offset = notes, 0
        self._errors = notes.with_suffix(".errors")
        with self._errors.open("w") as errors:
            self.process = started(
                [CHILD, kind, place, notes, json.dumps(how)],
                stdout=errors,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def read(self):
        """Return what is new."""
        if not self._notes.exists():
            return []
        with self._notes.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.news += new
        return new

    def wait_for(self, key):
        """Wait until it notes something under this key, and return all of that note."""
        until = time.monotonic() + PATIENCE_S
        while True:
            ended = self.process.poll() is not None
            for each in self.read():
                if key in each:
                    return each
            if ended or time.monotonic() > until:
                self.failed(f"did not get to {key!r}")
            time.sleep(0.02)

    def failed(self, how):
        code, said = self.process.poll(), self._errors.read_text()[-8000:]
        self.process.kill()
        sys.exit(f"soak: a job {how}; its exit code: {code}. It said:\n{said}")

    def send(self, number):
        if self.process.poll() is not None:
            self.failed("has ended by itself")
        self.process.send_signal(number)

    def kill(self):
        self.send(signal.SIGKILL)
        self.process.wait()

    def end(self):
        """Wait until it has ended in order."""
        self.wait_for("ended")
        if self.process.wait(PATIENCE_S):
            self.failed("failed at its end")

    def forget(self):
        """Remove what it noted."""
        self._notes.unlink(missing_ok=True)
        self._errors.unlink()


class Undisturbed:
    """The run that nothing happens to: losses of each step, and weights at each evaluation."""

    def __init__(self, place, notes):
        self._needed = notes / "needed"
        self._last = 0
        self._allow(1)
        self._job = Job("plain", place, notes / "plain", needed=os.fspath(self._needed))
        self._known = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._job.process.kill()
        self._job.process.wait()

    def _allow(self, step):
        """Let it go on as far as that, and a little more."""
        if step > self._last:
            made = self._needed.with_suffix(".made")
            made.write_text(str(step))
            made.rename(self._needed)
            self._last = step

    def is_same(self, note):
        """Return whether it noted the same of that step or evaluation; wait for it if need be."""
        key, content = content_of(note)
        self._allow(key[1])
        until = time.monotonic() + PATIENCE_S
        while key not in self._known:
            self._known |= dict(filter(None, map(content_of, self._job.read())))
            self._job.news.clear()
            if self._job.process.poll() is not None or time.monotonic() > until:
                self._job.failed("that nothing happens to has stopped")
            time.sleep(0.005)
        return self._known[key] == content


def content_of(note):
    """Return what a note is about, and what it says; None if there is nothing to compare."""
    if "step" in note:
        return ("step", note["step"]), note["losses"]
    if "evaluated" in note:
        return ("evaluated", note["evaluated"]), (note["loss"], note["weights"])
    return None
