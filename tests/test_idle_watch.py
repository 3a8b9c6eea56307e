"""A run of tests side by side ends when a worker hangs between two tests, is stopped, or is killed."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """\
import time
from idle_watch import IdleWatch, SilenceWatch, leave_pipe_to_worker


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SilenceWatch(limit_s={silent_s}))
        return
    leave_pipe_to_worker(config)
    config.pluginmanager.register(IdleWatch(limit_s={idle_s}))
    if config.workerinput["workerid"] == "gw0":  # not that which takes its place
        config.pluginmanager.register(First())


class First:
    def pytest_sessionfinish(self):
        a_place_to_hang()


def a_place_to_hang():
    {body}
"""


def run(directory, tests, *, body="pass", idle_s=100.0, silent_s=100.0):
    """The exit code, and what was said. On a busy machine a worker needs seconds to start."""
    limits = {"idle_s": idle_s, "silent_s": silent_s}
    (directory / "conftest.py").write_text(CONFTEST.format(body=body, **limits))
    (directory / "test_some.py").write_text(tests)
    with (directory / "said").open("w+") as said:  # no pipe, which children may keep open
        code = subprocess.call(
            [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "."],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        said.seek(0)
        return code, said.read()


def test_a_worker_that_hangs_between_tests_is_ended_and_says_where(tmp_path):
    hangs = "time.sleep(600)"
    _, said = run(tmp_path, "def test_some():\n    pass\n", body=hangs, idle_s=1.0)
    assert "no test for 1 s" in said
    assert "a_place_to_hang" in said


def test_where_a_worker_is_stopped_the_run_ends_and_says_so(tmp_path):
    stops = "import os, signal\n\n\ndef test_good():\n    pass\n\n\ndef test_stops():\n"
    stops += "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    code, said = run(tmp_path, stops, silent_s=4.0)
    assert code == 70
    assert "no test for 4 s" in said
    assert " stopped " in said


def test_the_death_of_a_worker_is_noticed_though_a_child_of_its_lives_on(tmp_path):
    forks = (
        "import os, time\n\n\ndef test_forks():\n    if not os.fork():\n        time.sleep(90)\n"
        "        os._exit(0)\n    os.kill(os.getpid(), 9)\n"
    )
    code, said = run(tmp_path, forks)
    assert code == 1
    assert "crashed while running" in said
