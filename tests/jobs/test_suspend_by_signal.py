"""``penstock run``: SIGUSR1 suspends a script that knows nothing of it, SIGUSR2 resumes it."""

import os
import re
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

import preloaded

SCRIPT = """
import os, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16)))
optimizer = torch.optim.AdamW(model.parameters())
features = torch.randn(4, 512)
try:
    for step in range({steps}):
        while step == 2 and not os.path.exists("go"):
            time.sleep(0.01)
        optimizer.zero_grad(set_to_none=False)
        model(features).square().mean().backward()
        optimizer.step()
        print(step, flush=True)
finally:
    print("sum", sum(float(each.detach().double().sum()) for each in model.parameters()), flush=True)
"""


@pytest.fixture
def spill(disk_path):
    (disk_path / "spill").mkdir()
    return disk_path / "spill"


@contextmanager
def started(folder, steps, *options, head=""):
    """The script, which waits before its third step until there is a file ``go``."""
    (folder / "script.py").write_text(head + SCRIPT.format(steps=steps))
    command, pipe = [preloaded.PENSTOCK_COMMAND, "run", *options, "script.py"], subprocess.PIPE
    process = preloaded.Process(command, bare=True, stdout=pipe, stderr=pipe, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def suspended(process, folder):
    """Ask for it while the script waits, and let it go on to the end of its step; what it tells."""
    assert [process.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
    before = resident_bytes(process)
    process.send_signal(signal.SIGUSR1)
    (folder / "go").touch()
    return before, read_line(process.stderr, "suspended")


def resident_bytes(process):
    with open(f"/proc/{process.pid}/status", encoding="utf-8") as lines:
        return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("VmRSS:"))


def read_line(stream, pattern):
    for line in stream:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"it ended without {pattern!r}")


def test_a_script_sleeps_and_goes_on(tmp_path, spill):
    held = 16 * 4 * 512 * 512 * 4  # weights, gradients, two moments
    sums = []
    for sleeps in (False, True):
        with started(tmp_path, 12, "--flash", str(spill)) as process:
            if sleeps:
                before, told = suspended(process, tmp_path)
                assert f"kill -USR2 {process.pid}" in told
                assert before - resident_bytes(process) > 0.8 * held
                assert list(spill.iterdir()) == []
                process.send_signal(signal.SIGUSR2)
                read_line(process.stderr, "resumed process")
            else:
                (tmp_path / "go").touch()
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            sums.append(out.splitlines()[-1])
            (tmp_path / "go").unlink()
    assert sums[0] == sums[1]


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_finds_it_with_its_memory(tmp_path, spill):
    with started(tmp_path, 10**6, "--flash", str(spill)) as process:
        suspended(process, tmp_path)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
        assert out.splitlines()[-1].startswith("sum "), error
        assert "resumed process" in error
        assert "KeyboardInterrupt" in error
        assert process.returncode == -signal.SIGINT


def test_without_a_directory_it_says_so_and_goes_on(tmp_path):
    with started(tmp_path, 10**6) as process:
        _, told = suspended(process, tmp_path)
        assert "cannot be suspended, and continues" in told
        assert "no directory" in told
        assert process.stdout.readline() == "2\n"
        assert process.stdout.readline() == "3\n"


def test_a_script_without_an_optimizer_is_told_why_it_did_not_sleep(tmp_path, spill):
    (tmp_path / "script.py").write_text(
        "import os, signal, torch\n"
        "weight = torch.ones(9, requires_grad=True)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "weight.square().sum().backward()\n"
        "weight.data -= weight.grad\n"
    )
    command = [preloaded.PENSTOCK_COMMAND, "run", "--flash", spill, "script.py"]
    done = preloaded.run(command, bare=True, cwd=tmp_path, check=True)
    assert (
        "a signal asked the run to sleep, but it did not: it sleeps when the step()" in done.stderr
    )


def test_killed_while_it_sleeps_it_leaves_nothing(tmp_path, spill):
    with started(tmp_path, 10**6, "--flash", str(spill)) as process:
        suspended(process, tmp_path)
        assert unlinked(process, spill)
        process.kill()
        process.wait()
        assert list(spill.iterdir()) == []


def unlinked(process, folder):
    """Its open files in a folder that have no name there and something in them."""
    return [
        each
        for each in Path(f"/proc/{process.pid}/fd").iterdir()
        if os.readlink(each).startswith(str(folder)) and each.stat().st_blocks
    ]


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "lambda *args: print('mine', flush=True)"])
def test_a_script_that_has_its_own_handler_keeps_it(tmp_path, spill, handler):
    code = (
        f"import signal\nsignal.signal(signal.SIGUSR1, {handler})\n"
        "import torch, os\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN)\n"
    )
    (tmp_path / "own.py").write_text(code)
    command = [preloaded.PENSTOCK_COMMAND, "run", "--flash", spill, "own.py"]
    done = preloaded.run(command, bare=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == (["True"] if "IGN" in handler else ["mine", "False"])


def test_a_signal_before_there_is_torch_is_followed_when_it_trains(tmp_path, spill):
    wait = 'import os, time\nprint("here", flush=True)\n'
    wait += 'while not os.path.exists("go"): time.sleep(0.01)\n'
    with started(tmp_path, 3, "--flash", str(spill), head=wait) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGUSR1)
        (tmp_path / "go").touch()
        read_line(process.stderr, "suspended process")
        process.send_signal(signal.SIGUSR2)
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    assert out.splitlines()[:2] == ["0", "1"]
