"""Processes of ``preloaded`` are as those that ``python`` starts, but for the time they take."""

import os
import signal
import subprocess
import sys
import time

import pytest

import preloaded

PIPE = subprocess.PIPE


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(sys.argv, sys.path[0], __name__); print('x', file=sys.stderr); sys.exit(3)",
        "import atexit; atexit.register(print, 'last'); print('first')",
        "import threading; threading.Timer(0.1, print, ['of a thread']).start()",
        "def f():\n    1 / 0\nf()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; print(os.getcwd(), sorted(os.environ.items()))",
        "import sys; print(sys.stdin.read())",
        "import torch, os; print(torch.get_num_threads(), len(os.listdir('/proc/self/task')))",
        "import os; print(os.listdir('/proc/self/fd'))",
    ],
)
def test_it_ends_and_says_what_python_would(code, tmp_path):
    settings = {"cwd": tmp_path, "env": os.environ | {"OWN": "größe"}, "input": "words"}
    words = ["-c", code, "a b", "ü"]
    theirs = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, **settings
    )
    ours = preloaded.run(words, **settings)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]
    assert "preloaded.py" not in ours.stderr


def test_a_script_is_the_main_module_and_finds_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 5")
    script = tmp_path / "script.py"
    script.write_text(
        "import pickle, sys, neighbour\n"
        "class Own: pass\n"
        "pickle.dumps(Own())\n"
        "print(neighbour.value, sys.argv, __file__, __name__)\n"
    )
    done = preloaded.run([script, "x"], check=True)
    assert done.stdout == f"5 ['{script}', 'x'] {script} __main__\n"


def test_nothing_is_preloaded_that_has_begun_something():
    """One process knows nothing of another, and random numbers differ."""
    code = "import numpy, torch; print(numpy.random.rand()); torch.flag = getattr(torch, 'flag', 0) + 1"
    both = [preloaded.run(["-c", code + "; print(torch.flag)"], check=True) for _ in range(2)]
    (one, flag), (other, same) = (each.stdout.split() for each in both)
    assert flag == same == "1"
    assert one != other


def test_one_that_takes_too_long_is_killed():
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run(["-c", "import time; time.sleep(600)"], timeout=0.5)
    assert time.monotonic() - began < 60


def test_it_is_spoken_with_and_sent_signals():
    echo = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    with preloaded.Process(["-c", echo], stdin=PIPE, stdout=PIPE) as process:
        for word in ("one\n", "two\n"):
            process.stdin.write(word)
            process.stdin.flush()
            assert process.stdout.readline() == word.upper()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    process.kill()  # nobody, any more


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_is_as_in_the_parent(ignored):
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = "import time; print('here', flush=True); time.sleep(1)"
    process = preloaded.Process(["-c", code], stdout=PIPE, stderr=PIPE)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert ("KeyboardInterrupt" in errors, process.returncode) == (
        (False, 0) if ignored else (True, -signal.SIGINT)
    )


def test_warnings_are_errors_where_that_is_asked_for():
    done = preloaded.run(["-W", "error", "-c", "import warnings; warnings.warn('so')"])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "UserWarning: so"
