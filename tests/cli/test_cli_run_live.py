"""``penstock run --live``: the footer of a terminal, lines elsewhere, and the terminal afterwards."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time

import pytest
from cli_processes import PENSTOCK, end, start_under

import preloaded

ROWS, COLUMNS = 30, 110
SCRIPT = """
import sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(512, 256, requires_grad=True)).square().mean().backward()
    optimizer.step()
    print("script: step", step, flush=True)
    time.sleep(0.4)
    {then}
print("script: done", flush=True)
"""
OPTIONS = ("--live", "--device-memory", "2MiB", "--flash-capacity", "256MiB", "--floor", "64KiB")
TAKE, FREE = "\x1b[1;25r", "\x1b[r"


@pytest.fixture
def script(disk_path):
    def write(then="pass"):
        path = disk_path / "train.py"
        path.write_text(SCRIPT.replace("{then}", then))
        return path

    return write


class Terminal:
    """A process in a terminal of its own, and all that it has printed there."""

    def __init__(self, command, cwd):
        self.near, far = pty.openpty()
        fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        names = [name for name in os.environ if name != "OMP_NUM_THREADS"]
        environment = {name: os.environ[name] for name in names} | {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONIOENCODING": "utf-8",
            "TERM": "xterm",
        }
        streams = {"stdin": far, "stdout": far, "stderr": far}
        assert command[0] == sys.executable
        self.process = preloaded.Process(
            command[1:], bare=True, cwd=cwd, env=environment, **streams
        )
        os.close(far)
        self.printed = ""

    def read_until(self, text, *, seconds=200):
        """Read until this was printed; with None until the end."""
        until = time.monotonic() + seconds
        while text is None or text not in self.printed:
            assert time.monotonic() < until, self.printed[-2000:]
            if not select.select([self.near], [], [], 1)[0]:
                continue
            with contextlib.suppress(OSError):
                if data := os.read(self.near, 1 << 16):
                    self.printed += data.decode("utf-8", "replace")
                    continue
            assert text is None, self.printed[-2000:]
            return

    def end(self):
        self.read_until(None)
        os.close(self.near)
        return self.process.wait(60)


def terminal(script, disk_path):
    command = [*PENSTOCK["command"], "run", *OPTIONS, "--flash", str(disk_path), str(script)]
    return Terminal(command, disk_path)


def footers(printed):
    """The drawings of the footer, each as its lines."""
    drawings = re.findall(r"\x1b7((?:\x1b\[\d+;1H\x1b\[2K[^\x1b]*)+)\x1b8", printed)
    return [re.findall(r"\x1b\[(\d+);1H\x1b\[2K([^\x1b]*)", drawing) for drawing in drawings]


def test_the_footer_has_the_figures_and_the_script_prints_above_it(script, disk_path):
    run = terminal(script(), disk_path)
    assert run.end() == 0
    printed = run.printed
    drawn = footers(printed)
    assert len(drawn) >= 3
    for lines in drawn:
        assert [int(row) for row, _ in lines] == [26, 27, 28, 29, 30]
        assert all(len(text) < COLUMNS for _, text in lines)
    texts = [text for _, text in drawn[-1]]
    assert texts[0].startswith("── penstock saved tensors")
    assert re.match(r"steps   [34] steps, .* since the start, the last took ", texts[1])
    assert re.match(r"memory  saved tensors .* of 2\.00 MiB, together ", texts[2])
    assert "to flash" in texts[3]
    assert "% of the time" in texts[4]
    lines = [f"script: step {step}" for step in range(4)] + ["script: done"]
    places = [printed.index(line) for line in lines]
    assert places == sorted(places)
    assert printed.count(TAKE) == 1
    assert printed.count(FREE) == 1
    assert places[-1] < printed.index(FREE) < printed.index("4 optimizer steps in")
    assert not footers(printed[printed.index(FREE) :])


@pytest.mark.parametrize(
    ("then", "code"), [("raise ValueError('on purpose')", 1), ("sys.exit(3)", 3)]
)
def test_the_terminal_is_as_before_after_an_error(script, disk_path, then, code):
    run = terminal(script(then), disk_path)
    assert run.end() == code
    assert run.printed.count(TAKE) == run.printed.count(FREE) == 1
    assert not footers(run.printed[run.printed.index(FREE) :])


def test_the_terminal_is_as_before_after_ctrl_c(script, disk_path, default_signals):
    run = terminal(script("time.sleep(100)"), disk_path)
    run.read_until("script: step 0")
    run.read_until("2K")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == -signal.SIGINT
    assert "KeyboardInterrupt" in run.printed
    assert run.printed.count(TAKE) == run.printed.count(FREE) == 1
    assert "1 optimizer step in" in run.printed[run.printed.index(FREE) :]


def test_a_new_size_of_the_terminal_moves_the_footer(script, disk_path):
    run = terminal(script(), disk_path)
    run.read_until(TAKE)
    fcntl.ioctl(run.near, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    run.read_until("\x1b[1;35r")
    assert run.end() == 0
    assert run.printed.index(FREE) < run.printed.index("\x1b[1;35r")
    last = footers(run.printed)[-1]
    assert [int(row) for row, _ in last] == [36, 37, 38, 39, 40]
    assert all(len(text) < 60 for _, text in last)


def test_a_terminal_that_has_become_small_is_left_alone(script, disk_path):
    run = terminal(script(), disk_path)
    run.read_until(TAKE)
    fcntl.ioctl(run.near, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 60, 0, 0))
    assert run.end() == 0
    assert run.printed.count("\x1b[1;") == run.printed.count(FREE) == 1
    assert not footers(run.printed[run.printed.index(FREE) :])


def test_elsewhere_it_is_a_line_now_and_then_and_the_output_is_the_scripts(script, disk_path):
    options = (*OPTIONS, "--flash", str(disk_path))
    found = end(start_under(disk_path, str(script()), options=options, preload=True))
    assert found.code == 0
    assert found.out.splitlines()[-1] == "script: done"
    assert "\x1b" not in found.out + found.err
    lines = [line for line in found.err.splitlines() if " since the start, " in line]
    assert len(lines) == 1  # the second one would come after ten seconds
    assert re.match(
        r"penstock: \d steps?, .*; saved tensors .* of 2\.00 MiB, .* % of the time", lines[0]
    )


def test_a_script_that_imports_no_torch_has_no_footer(disk_path):
    path = disk_path / "plain.py"
    path.write_text("print('hello')\n")
    run = terminal(path, disk_path)
    assert run.end() == 0
    assert TAKE not in run.printed
