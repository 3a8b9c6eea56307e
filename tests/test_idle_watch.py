"""A worker that hangs between two tests is ended, and says where it hung."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """\
import time
from idle_watch import IdleWatch


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(IdleWatch(idle_s=1.0))
        if config.workerinput["workerid"] == "gw0":  # not that which takes its place
            config.pluginmanager.register(Hang())


class Hang:
    def pytest_sessionfinish(self):
        a_place_to_hang()


def a_place_to_hang():
    time.sleep(600)
"""


def test_a_worker_that_hangs_between_tests_is_ended_and_says_where(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text("def test_some():\n    pass\n")
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,  # it is another worker that ends the run
    )
    assert "no test for 1 s" in told.stderr
    assert "a_place_to_hang" in told.stderr
