"""Managers of plain jobs that are killed before a call to the system, and others that go on.

    python crash_walk_program.py FOLDER CALLS

A first manager runs to its end, and what it calls is noted. Then, for each place in the code from where
one of CALLS was called, as ``fsync,rename``, one is killed before it comes there the first time, and one
the second time; each in a folder of its own, twice: another manager is started at once, or when who was
awake has ended. Prints a line of JSON: how many were killed, and what was not as it has to be.
"""

import builtins
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

from penstock.jobs.description import Description
from penstock.jobs.manager import Manager

JOB = str(Path(__file__).with_name("plain_job.py"))
NAMES = ("a", "b")
CALLS = (
    *((os, name) for name in ("open", "mkdir", "makedirs", "rename", "unlink", "fsync")),
    *((os, name) for name in ("pwrite", "posix_fallocate", "chmod", "fchmod", "truncate")),
    *((os, name) for name in ("kill", "killpg", "rmdir")),
    (fcntl, "flock"),
    (builtins, "open"),
    (signal, "pidfd_send_signal"),
    (subprocess, "Popen"),
)
EXPECTED = {"channels", "kept", "lock", "logs", "record.json"}
EXPECTED |= {f"channels/{name}" for name in NAMES} | {f"logs/{name}.log" for name in NAMES}
SIDE_BY_SIDE = 6
BEGINS_S = 0.4
"""After so long a job that was begun is awake, or over."""


class Calls:
    """Notes calls by where they come from, and ends this process before one of them.

    Attributes:
        seen: How often each place was come to: a call, a file and a line.
    """

    def __init__(self, end_at=None, count=0):
        self.seen = Counter()
        self._end = end_at, count
        for module, name in CALLS:
            setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name, call):
        def counted(*args, **keys):
            code = sys._getframe(1)
            if "penstock" in code.f_code.co_filename:
                place = f"{name} {os.path.basename(code.f_code.co_filename)} {code.f_lineno}"
                self.seen[place] += 1
                if self._end == (place, self.seen[place]):
                    os._exit(9)
            return call(*args, **keys)

        return counted


def manage(folder):
    (folder / "script.py").touch()
    (folder / "events").touch()
    (folder / "flash").mkdir(exist_ok=True)
    machine = {"memory": "100MiB", "flash": "flash", "slice": "50ms", "asleep": "10MiB"}
    jobs = [{"name": name, "script": "script.py", "memory": "60MiB"} for name in NAMES]
    description = Description.from_json(
        {"machine": {**machine, "enforce": "polling"}, "job": jobs}, source="x", base=str(folder)
    )
    words = [sys.executable, "-S", "-E", JOB]
    with Manager(
        description,
        state=str(folder / "state"),
        command=lambda spec, machine, channel, kept: [
            *(*words, channel, str(folder / "events"), spec.name)
        ],
    ) as manager:
        manager.run()
        return manager.status()["jobs"]


def begun(work):
    """Do it in another process; returns a function that waits for its result, None if that was ended."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writer, json.dumps(work()).encode())
        except Exception:
            os.write(writer, json.dumps(traceback.format_exc()).encode())
            raise
        finally:
            os._exit(0)
    os.close(writer)

    def result():
        with open(reader, "rb") as file:
            text = file.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else None

    return result


def forked(work):
    return begun(work)()


def wrong_after(folder, place, count, *, at_once):
    """What is not as it has to be after one was killed there and another started."""
    forked(lambda: noted(folder, place, count))
    record = folder / "state/record.json"
    before = json.loads(record.read_text())["jobs"] if record.exists() else []
    if before and all(each["phase"] == "over" for each in before):
        return []  # the next one begins all of them anew, and is right
    if not at_once:
        time.sleep(BEGINS_S)
        while awake_in(folder)[0]:
            time.sleep(0.01)
    jobs = forked(lambda: manage(folder))
    if not isinstance(jobs, list):
        return [jobs]
    wrong = [f"{each['name']} {each['told']}" for each in jobs if each["outcome"] != "done"]
    text = (folder / "events").read_text()
    begun = {name: text.count(f"begins {name}\n") for name in NAMES}
    wrong += [f"{name} has begun {n} times" for name, n in begun.items() if n != 1]
    if awake_in(folder)[1] > 1:
        wrong.append("both were awake")
    state = folder / "state"
    left = {str(path.relative_to(state)) for path in state.rglob("*")}
    wrong += [f"{each} is left" for each in sorted(left - EXPECTED)]
    return wrong and [*wrong, text]


def awake_in(folder):
    """Who is awake now, and how many were at most."""
    awake, most = set(), 0
    for line in (folder / "events").read_text().splitlines():
        what, name = line.split()
        awake = {*awake, name} if what == "wakes" else awake - {name}
        most = max(most, len(awake))
    return awake, most


def noted(folder, *end_at):
    calls = Calls(*end_at)
    manage(folder)
    return list(calls.seen.items())


def main(folder, names):
    folder = Path(folder)
    places = forked(lambda: noted(made(folder / "whole")))
    cases = [
        (place, count, at_once)
        for place, times in places
        if place.split()[0] in names.split(",")
        for count in range(1, 1 + min(times, 2))
        for at_once in (True, False)
    ]

    def tried(numbers):
        return {
            str(cases[n]): wrong_after(made(folder / str(n)), *cases[n][:2], at_once=cases[n][2])
            for n in numbers
        }

    parts = [range(first, len(cases), SIDE_BY_SIDE) for first in range(SIDE_BY_SIDE)]
    found = [result() for result in [begun(partial(tried, part)) for part in parts]]
    wrong = {case: each for part in found for case, each in dict(part).items() if each}
    print(json.dumps({"killed": len(cases), "wrong": wrong}))


def made(folder):
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main(*sys.argv[1:])
