"""A manager of fake jobs, in a process of its own that a test may kill.

    python manager_program.py JOBS.toml STATE

Prints what it tells, and at the end one line of JSON: the most that was held, and the last status.
"""

import json
import sys
from pathlib import Path

from penstock.jobs.description import load
from penstock.jobs.manager import Manager

FAKE = str(Path(__file__).with_name("fake_job.py"))


def fake_command(spec, machine, channel, kept):
    return [sys.executable, FAKE, channel, *spec.args]


def main(jobs, state):
    most = 0

    def watch(status):
        nonlocal most
        most = max(most, status["machine"]["charged_bytes"])

    with Manager(load(jobs), state=state, tell=tell, command=fake_command) as manager:
        manager.run(watch)
        print(json.dumps({"most": most, "status": manager.status()}), flush=True)


def tell(line):
    print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
