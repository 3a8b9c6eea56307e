"""Progress of long commands: a bar on a terminal, lines elsewhere, and nothing on standard output."""

import os
import pty
import threading
from contextlib import nullcontext, suppress

import pytest
import torch

import penstock
from offload_runs import wait_until
from penstock import checkpoint, weights
from penstock.cli import main, progress
from penstock.observe.clients import WEIGHTS, open_recorder
from penstock.observe.events import Stage


@pytest.fixture
def talkative(monkeypatch):
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "_LOOK_EVERY_S", 0.01)


def test_the_share_of_bytes_is_told_until_the_block_ends(talkative, capsys):
    told = ""

    def tells(what):
        nonlocal told
        told += capsys.readouterr().err
        return what in told

    with progress.progress_of_bytes("verify it", 200):
        recorder = open_recorder()
        assert recorder is not None
        recorder.span(Stage.READ, 0, 1, nbytes=100, tier=WEIGHTS)
        wait_until(lambda: tells("penstock: verify it: 50%"), "the share")
        recorder.span(Stage.WRITE, 0, 1, nbytes=50, tier=WEIGHTS)
        recorder.span(Stage.STALL, 0, 1, nbytes=50)
        wait_until(lambda: tells("verify it: 75%"), "the share")
        recorder.span(Stage.WRITE, 0, 1, nbytes=500, tier=WEIGHTS)
        wait_until(lambda: tells("verify it: 100%"), "the share")
    assert open_recorder() is None
    assert not [each for each in threading.enumerate() if each.name == "penstock-progress"]


def test_a_failure_ends_the_progress_too(talkative):
    with (
        pytest.raises(penstock.ConfigError),
        progress.progress_of_bytes("import", 0),
    ):
        raise penstock.ConfigError("no")
    assert open_recorder() is None


def test_a_terminal_shows_a_bar_which_leaves_no_trace(monkeypatch):
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        with progress.progress("pack") as tell:
            tell(0.4)
    shown = _all_written_to(master)
    assert "pack" in shown
    assert "40%" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K")  # the line is empty again


def _all_written_to(master: int) -> str:
    """Return what a terminal, closed at its other side, was sent; one read may return a part of it."""
    parts = []
    with open(master, "rb", buffering=0) as sent, suppress(OSError):  # Linux ends it with EIO
        while part := sent.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    "words",
    [
        ("weights", "verify", "saved"),
        ("weights", "import", "saved", "new"),
        ("weights", "import", "saved", "new", "--no-verify"),
        ("weights", "import", "saved", "new", "--type", "bfloat16"),
        ("checkpoint", "verify", "checkpoint"),
    ],
)
def test_at_the_end_all_that_was_expected_has_moved(words, disk_path, monkeypatch, capsys):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    weights.save(model, disk_path / "saved")
    checkpoint.save(disk_path / "checkpoint", {"model": model.state_dict()})
    shares = []
    monkeypatch.setattr(progress, "progress", lambda what: nullcontext(shares.append))
    monkeypatch.chdir(disk_path)
    assert main([*words]) == 0
    assert shares[-1] > 0.98
    assert shares == sorted(shares)
    capsys.readouterr()
