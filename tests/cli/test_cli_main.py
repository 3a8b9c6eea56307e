"""The command line itself: help, errors in one line, exit codes."""

import errno
import io
import os
import subprocess
import sys

import pytest
from rich.table import Table

import penstock
from penstock.cli import main
from penstock.cli.output import show, write_json
from penstock.core.errors import TransferError

COMMANDS = (
    *(["run"], ["bench"], ["bench", "io"], ["plan"], ["report"], ["doctor"]),
    *(["ssd"], ["ssd", "run"], ["ssd", "weight-update"], ["ssd", "sweep"]),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples_and_the_common_options(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert f"  penstock {' '.join(command)} " in text
    if command not in (["bench"], ["ssd"]):
        assert "--json" in text
        assert "--debug" in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_and_version_of_the_whole(capsys):
    for option, expected in (
        ("--help", "commands:\n  run     "),
        ("--version", penstock.__version__),
    ):
        with pytest.raises(SystemExit) as left:
            main([option])
        assert left.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["rnu"], ["run", "--no-such", "x.py"], ["bench"], ["doctor", "x"]]
)
def test_what_cannot_be_parsed_is_2(argv, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert "error: " in capsys.readouterr().err


def refusal(argv, capsys):
    """The exit code, and the one line on standard error."""
    code = main(argv)
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("penstock: error: ")
    return code, line


def test_settings_that_make_no_sense_are_refused_before_the_script_runs(
    disk_path, monkeypatch, capsys
):
    monkeypatch.chdir(disk_path)
    ran = disk_path / "ran"
    (disk_path / "x.py").write_text(f"open({str(ran)!r}, 'w')")
    (disk_path / "bad.toml").write_text("[offload]\ndevice_memroy = '1GiB'\n")
    (disk_path / "file").touch()
    flash = ["--flash", "."]
    cases = {
        "nothing to run": [],
        "'2G' is ambiguous": ["--device-memory", "2G", *flash, "x.py"],
        "memory=2.00 GiB needs a tier to offload to": ["--memory", "2GiB", "x.py"],
        "a device budget of 2.00 GiB needs a tier": ["--device-memory", "2GiB", "x.py"],
        "flash_by_rank is set, but no flash": ["--flash-by-rank", "x.py"],
        "unknown policy 'best'": [*flash, "--policy", "best", "x.py"],
        "codec is 'No'": [*flash, "--codec", "No", "x.py"],
        "device_memroy": ["--config", "bad.toml", "x.py"],
        "No such file": ["--config", "none.toml", "x.py"],
        "'/proc/none' does not exist": ["--flash", "/proc/none", "x.py"],
        "is not a directory": ["--flash", "file", "x.py"],
        "names a directory twice": [*flash, *flash, "x.py"],
        "--trace: ": ["--trace", "no/such/trace.json", "x.py"],
        "event_log: ": ["--event-log", ".", "x.py"],
    }
    for expected, words in cases.items():
        code, line = refusal(["run", *words], capsys)
        assert expected in line
        assert code == 2
    assert not ran.exists()


def test_a_directory_that_takes_no_file_is_refused_before_the_script_runs(monkeypatch, capsys):
    def full(path):
        raise TransferError(errno=errno.EDQUOT, op="open", path=path, offset_bytes=0, nbytes=0)

    monkeypatch.setattr("penstock.cli.paths.open_unlinked", full)
    code, line = refusal(["run", "--flash", ".", "x.py"], capsys)
    assert f"takes no file: {os.strerror(errno.EDQUOT)}" in line
    assert code == 2


def test_a_directory_in_memory_is_refused(monkeypatch, capsys):
    from penstock.core import fs
    from penstock.core.fs import FileSystem

    monkeypatch.setattr(fs, "filesystem_of", lambda path: FileSystem("tmpfs", True))
    for argv in (["run", "--flash", "/", "script.py"], ["bench", "io", "--dir", "/"]):
        code, line = refusal(argv, capsys)
        assert code == 2
        assert "is on tmpfs" in line


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(penstock.SizeError, match="ambiguous"):
        main(["run", "--debug", "--device-memory", "2G", "x.py"])
    assert capsys.readouterr().err == ""


def test_options_overrule_the_file_and_paths_become_absolute(disk_path, monkeypatch):
    from penstock.cli import run

    monkeypatch.chdir(disk_path)
    (disk_path / "spill").mkdir()
    text = (
        "[offload]\ndevice_memory = '1GiB'\nflash = ['spill']\nfloor = '2MiB'\nevent_log = 'log'\n"
    )
    (disk_path / "offload.toml").write_text(text)
    words = ["--config", "offload.toml", "--device-memory", "4096", "x.py", "--floor", "9MiB"]
    config = run._config(run.parser().parse_args(words))
    assert (config.device_bytes, config.floor_bytes) == (4096, 2 << 20)
    assert config.directories == (str(disk_path / "spill"),)
    assert config.event_log == str(disk_path / "log")


def test_ctrl_c_ends_a_command_of_ours_without_a_traceback(monkeypatch, capsys, disk_path):
    from penstock.cli import bandwidth

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bandwidth, "measure", interrupt)
    assert main(["bench", "io", "--dir", str(disk_path)]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--json"]])
@pytest.mark.parametrize(("output", "code"), [("pipe", 141), ("/dev/full", 1)])
def test_output_that_nobody_takes_ends_a_command_without_a_traceback(words, output, code):
    """`penstock ... | head`, and a disk that is full."""
    reader, writer = os.pipe()
    os.close(reader)
    if output != "pipe":
        os.close(writer)
        writer = os.open(output, os.O_WRONLY)
    simulate = ["ssd", "run", "mqsim-default", "randread", "--requests", "1"]  # without torch
    command = [sys.executable, "-m", "penstock", *simulate, *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == code, done.stderr
    said = "penstock: error: '<stdout>' cannot be written: No space left on device"
    assert done.stderr.splitlines() == ([said] if code == 1 else [])


def test_a_table_goes_to_any_output(capsys):
    table = Table("job ─ état")
    table.add_row("größe")
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    show(table, file)
    file.seek(0)
    said = file.read()
    assert "größe" in said
    assert "job ? état" in said
    show(table, None)  # it is closed
    write_json({}, None)
    assert capsys.readouterr().out == ""
