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
    for bare in (False, True):
        ours = preloaded.run(words, bare=bare, **settings)
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
        assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]
        assert "preloaded.py" not in ours.stderr


IMPORTS = """
import sys

class Notices:
    def find_spec(self, name, path, target=None):
        if name in ("numpy", "torch", "penstock"):
            print("looked for", name)

sys.meta_path.insert(0, Notices())
for name in sys.argv[1:]:
    print(name, name in sys.modules)
    module = __import__(name)
    spec = module.__spec__
    print(spec.name, spec.origin, type(spec.loader), spec.loader is module.__loader__)
    print(module.__file__, [*module.__path__])
print(sys.modules["numpy"].linalg.norm([3.0, 4.0]), sys.modules["torch"].nn.Linear(2, 3))
print(len([each for each in sys.modules if each.startswith("penstock.session")]))
"""


@pytest.mark.parametrize(
    "names", [("torch", "numpy"), ("numpy", "torch", "penstock"), ("penstock", "numpy", "torch")]
)
def test_a_bare_process_imports_what_python_would_in_its_order(names, tmp_path):
    words = ["-c", IMPORTS, *names]
    theirs = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    ours = preloaded.run(words, bare=True)
    assert ours.stdout == theirs.stdout != ""
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr) == (0, "")


def test_a_script_has_an_absolute_path_as_python_gives_it(tmp_path):
    (tmp_path / "script.py").write_text("import sys\nprint(__file__, sys.argv)\n1 / 0\n")
    theirs = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    ours = preloaded.run(["script.py"], cwd=tmp_path)
    assert (ours.returncode, ours.stdout, ours.stderr) == (1, theirs.stdout, theirs.stderr)


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
