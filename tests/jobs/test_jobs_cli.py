"""`penstock jobs`: real scripts with torch share a budget, and what people see of it."""

import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from rich.console import Console

from penstock.cli import main
from penstock.core.errors import JobError
from penstock.jobs import cli as jobs
from penstock.jobs.description import Description
from penstock.jobs.options import check_options
from penstock.jobs.view import Watch, table
from penstock.observe.summary_text import to_text

SCRIPT = """
import sys, torch
torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(24)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[2])):
    optimizer.zero_grad(set_to_none=False)
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
print("sum", sum(float(each.detach().double().sum()) for each in model.parameters()), flush=True)
"""
STEPS = 40


def toml(folder, *, memory, need, names="ab", **job):
    (folder / "spill").mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    text = f'[machine]\nmemory = "{memory}"\nflash = "spill"\nslice = "300ms"\nasleep = "250MiB"\n'
    text += 'grace = "2 min"\n'
    for seed, name in enumerate(names):
        text += f'[[job]]\nname = "{name}"\nscript = "train.py"\nargs = ["{seed}", "{STEPS}"]\n'
        text += f'memory = "{need}"\n'
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in job.items())
    (folder / "jobs.toml").write_text(text)


def penstock(folder, *words, timeout=200):
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.slow
def test_two_scripts_that_do_not_fit_both_finish_to_their_own_bits(
    disk_path, monkeypatch, capsys, one_thread
):
    toml(disk_path, memory="700MiB", need="440MiB")
    done = penstock(disk_path, "jobs", "run", "jobs.toml", "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert [each["outcome"] for each in status["jobs"]] == ["done", "done"]
    assert status["jobs"][0]["sleeps"] >= 1
    assert status["jobs"][0]["moved_bytes"] >= 90 * 2**20
    assert "penstock: a: sleeps" in done.stderr
    for seed, job in enumerate(status["jobs"]):
        assert job["steps"] == STEPS
        monkeypatch.setattr("sys.argv", ["train.py", str(seed), str(STEPS)])
        exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
        with open(job["log"], encoding="utf-8") as log:
            assert capsys.readouterr().out in log.read()


def test_a_script_that_is_wrong_is_quoted(disk_path):
    toml(disk_path, memory="1GiB", need="300MiB", names="a")
    (disk_path / "train.py").write_text("import nothing_of_this_name\n")
    done = penstock(disk_path, "jobs", "run", "jobs.toml")
    assert done.returncode == 1
    assert "a: failed with exit code 1; its log ends: Traceback" in done.stderr
    assert "No module named 'nothing_of_this_name'" in done.stderr


@contextmanager
def manager_begun_with(folder, script, inherited):
    """A manager of one job, which comes up with signals as a parent might leave them."""
    toml(folder, memory="1GiB", need="300MiB", names="a")
    (folder / "train.py").write_text(script)
    begin = f"import os, signal, sys\n{inherited}\nos.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "penstock", "jobs", "run", "jobs.toml"]
    manager = subprocess.Popen(
        [sys.executable, "-c", begin, *command],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield manager
    finally:
        manager.kill()
        manager.communicate()


@pytest.mark.parametrize(
    "inherited",
    [
        "for each in signal.SIGINT, signal.SIGTERM: signal.signal(each, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])",
    ],
    ids=["ignored", "blocked"],
)
@pytest.mark.parametrize("how", ["stop", "SIGTERM"])
def test_jobs_end_in_order_whatever_signals_their_manager_has_inherited(disk_path, inherited, how):
    script = (
        "import time\n"
        "try:\n"
        "    open('begun', 'w').close()\n"
        "    time.sleep(200)\n"
        "finally:\n"
        "    open('tidied', 'w').close()\n"
    )
    with manager_begun_with(disk_path, script, inherited) as manager:
        while not (disk_path / "begun").exists():
            assert manager.poll() is None
            time.sleep(0.01)
        if how == "stop":
            assert penstock(disk_path, "jobs", "stop").returncode == 0
        else:
            manager.terminate()
        _, told = manager.communicate(timeout=200)
    assert "a: stopped (killed by SIGINT)" in told
    assert (disk_path / "tidied").exists()


def test_a_job_that_fails_is_known_to_have_failed_where_sigchld_is_ignored(disk_path):
    """The kernel keeps no exit code for such a manager: the job tells it itself."""
    inherited = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    with manager_begun_with(disk_path, "raise SystemExit(3)", inherited) as manager:
        _, told = manager.communicate(timeout=200)
    assert manager.returncode == 1
    assert "a: failed with exit code 3" in told


def test_a_job_whose_end_nobody_knows_has_not_succeeded(disk_path):
    inherited = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    script = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    with manager_begun_with(disk_path, script, inherited) as manager:
        _, told = manager.communicate(timeout=200)
    assert manager.returncode == 1
    assert "a: ended; its exit code is not known" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"\[machine\]: this table is missing"),
        ("[machine]\n", r"\[machine\]: memory is missing"),
        ('[machine]\nmemory = "8G"\n', r"memory: '8G' is ambiguous"),
        ('[machine]\nmemory = "8GiB"\n', r"there is no job"),
        (
            '[machine]\nmemory = "8GiB"\nspeed = 3\n',
            r"unknown key 'speed' = 3; known are memory, flash",
        ),
        (
            '[machine]\nmemory = "8GiB"\nslice = "2 h"\n',
            r"slice is '2 h'; it must be a number and ms, s or min, such as '2 s', or 'auto'",
        ),
        ('[machine]\nmemory = "8GiB"\nslice = 0\n', r"slice is 0; it must be more than 0"),
        ('[machine]\nmemory = "8GiB"\nflash_capacity = "1GiB"\n', r"flash names no directory"),
        ('[machine]\nmemory = "8GiB"\ngrace = "auto"\n', r"grace is 'auto'; it must be a number"),
        (
            '[machine]\nmemory = "8GiB"\nflash = ["a", "./a"]\n',
            r"\[machine\]: flash names '.*a' twice",
        ),
        (
            '[machine]\nmemory = "8GiB"\nflash = 5\n',
            r"\[machine\]: flash is 5; it must be a directory",
        ),
        ("JOB\nweight = 0", r"job 'a': weight is 0; it must be from 0.001"),
        ("JOB\npriority = 1.5", r"job 'a': priority is 1.5"),
        ('JOB\nargs = "x"', r"job 'a': args is 'x'; it must be a list of strings"),
        ("JOB\nargs = [1]", r"job 'a': args is 1"),
        ("JOB\nenv = {A = 1}", r"job 'a': env.A is 1"),
        ('JOB\nmodule = "m"', r"job 'a': script is 'x.py' and module is 'm'"),
        (
            'JOB\nmemory = "9GiB"',
            r"job 'a': memory is 9.00 GiB, more than \[machine\] memory, 8.00 GiB",
        ),
        ("JOB\ndurable = 1", r"job 'a': durable is 1"),
        ('JOB\n[[job]]\nname = "a"\nscript = "y.py"', r"job 'a': two jobs have this name"),
        ('JOB\n[[job]]\nname = "a/b"\nscript = "y.py"', r"name is 'a/b'"),
        ('JOB\n[[job]]\nname = "-b"\nscript = "y.py"', r"'-b'; .* begin with a letter or a digit"),
        ('JOB\nargs = ["a\\u0000"]', r"job 'a': args has 'a\\x00'"),
        (
            'JOB\nenv = {"A=B" = "x"}',
            r"job 'a': env has a variable 'A=B'; a name must not be empty",
        ),
        (
            '[machine]\nmemory = "8GiB"\nflash = ""\n',
            r"\[machine\]: flash is ''; name a directory",
        ),
        ("JOB\n[jobs]", r"unknown table 'jobs'"),
        ("JOB", r"jobs\.toml: job 'a': script '.*x.py' does not exist"),
        ('JOB\ncwd = "no"', r"job 'a': cwd '.*no' is not a directory"),
        (
            '[machine]\nmemory = "8GiB"\nflash = ["a", ["b"]]\n',
            r"flash is \['b'\]; it must be a directory",
        ),
        (f"[machine]\nmemory = {'9' * 5000}\n", r"jobs.toml: Exceeds the limit"),
        (
            f"[machine]\nmemory = 0x{'f' * 400}\n",
            r"machine.memory is a number that needs more than 64 bits",
        ),
        (f'[machine]\nmemory = "{"9" * 400}GiB"\n', r"memory: '9+' is not a size"),
        (
            '[machine]\nmemory = "9999999PiB"\n',
            r"memory: '9999999PiB' is too large: .* 2\^63 bytes",
        ),
        (
            f"JOB\npriority = 0x{'f' * 5000}",
            r"job.priority is a number that needs more than 64 bits",
        ),
        (f"x = {'[' * 3000}", r"jobs.toml: .*nested too deep"),
        ("{", r"Expected|Invalid"),
    ],
)
def test_what_is_wrong_with_the_file_is_named(disk_path, capsys, text, message):
    head = '[machine]\nmemory = "8GiB"\n[[job]]\nname = "a"\nscript = "x.py"'
    path = disk_path / "jobs.toml"
    path.write_text(text.replace("JOB", head))
    assert main(["jobs", "run", str(path), "--state", str(disk_path / "state")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("penstock: error: ")
    assert re.search(message, told), told
    assert "jobs.toml" in told or "job 'a'" in told


KNOWN = r"known are --json, --debug, --memory, --device-memory, .*, --optimizer-state, .*--trace"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devicememory", "2GiB"], "unrecognized arguments: --devicememory.*; " + KNOWN),
        (["--device-memory"], "its last option has no value; " + KNOWN),
        (["--device-memory", "2G"], "'2G' is ambiguous"),
        (["--optimizer-state", "tape"], "invalid choice: 'tape'.*flash.*; " + KNOWN),
        (["--optimizer-memory", "1GiB"], "--optimizer-memory needs --optimizer-state flash"),
        (["--policy", "none"], "unknown policy 'none'"),
        (["--codec", "gzip"], "there is no codec 'gzip'; there are zero-value"),
        (["--config", "no.toml"], "No such file"),
        (["--trace", "no/trace.json"], "--trace: '.*/sub/no/trace.json' cannot be written"),
        (["--flash", "no"], "directory '.*/sub/no' does not exist"),
        (["y.py"], "would run 'y.py x.py' in place of the script or module"),
        (["-m", "y"], "would run 'y x.py' in place"),
        (["--help"], "help is not for a job"),
        (["--channel", "c"], "--channel is not for a job: the manager sets it; " + KNOWN),
        (
            ["--state", "kept"],
            "--state is not for a job: the manager sets it; write durable = true",
        ),
        (["--resume"], "--resume is not for a job"),
    ],
)
def test_options_that_would_be_refused_are_named_before_anything_begins(
    disk_path, capsys, options, message
):
    (disk_path / "sub").mkdir()
    for name in ("first.py", "sub/x.py"):
        (disk_path / name).write_text("open('begun', 'w')")
    path = disk_path / "jobs.toml"
    path.write_text(
        '[machine]\nmemory = "8GiB"\nflash = "."\n[[job]]\nname = "first"\nscript = "first.py"\n'
        f'[[job]]\nname = "a"\nscript = "x.py"\ncwd = "sub"\noptions = {json.dumps(options)}\n'
    )
    assert main(["jobs", "run", str(path), "--state", str(disk_path / "state")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert f"jobs.toml: job 'a': options is {options!r}: " in told.err
    assert re.search(message, told.err), told.err
    assert not (disk_path / "begun").exists()
    assert not (disk_path / "state").exists()


def test_a_durable_job_that_has_nowhere_to_sleep_is_refused_before_anything_begins(
    disk_path, capsys
):
    """`penstock run --state` would refuse it, and name an option that the description has not."""
    (disk_path / "x.py").touch()
    path = disk_path / "jobs.toml"
    path.write_text(
        '[machine]\nmemory = "8GiB"\n[[job]]\nname = "a"\nscript = "x.py"\ndurable = true\n'
    )
    assert main(["jobs", "run", str(path), "--state", str(disk_path / "state")]) == 2
    told = capsys.readouterr().err
    assert (
        "jobs.toml: job 'a': options is []: durable is true, but [machine] flash names no directory"
        in told
    )
    assert not (disk_path / "state").exists()


def test_options_that_are_taken_are_taken_from_the_directory_of_the_job(disk_path, tmp_path):
    (disk_path / "sub/spill").mkdir(parents=True)
    (disk_path / "sub/o.toml").write_text('[offload]\nfloor = "2MiB"\n')
    options = ["--config", "o.toml", "--flash", "spill", "--trace", "t", "--optimizer-state=flash"]
    job = {"name": "a", "module": "m", "args": ["--flash", "no"], "cwd": "sub", "options": options}
    document = {"machine": {"memory": "1GiB"}, "job": [job]}
    check_options(Description.from_json(document, source="f", base=str(disk_path)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("folder", r"script '.*/x.py' is a directory without __main__.py"),
        ("shut", "cannot be read"),
    ],
)
def test_a_script_that_cannot_be_run_is_named(disk_path, monkeypatch, capsys, kind, message):
    if kind == "folder":
        (disk_path / "x.py").mkdir()
    else:
        (disk_path / "x.py").touch()
        monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("x.py"))
    path = disk_path / "jobs.toml"
    path.write_text('[machine]\nmemory = "8GiB"\n[[job]]\nname = "a"\nscript = "x.py"')
    assert main(["jobs", "run", str(path), "--state", str(disk_path / "state")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_file_that_is_not_there_is_said(tmp_path, capsys):
    assert main(["jobs", "run", str(tmp_path / "no.toml")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("status",), ("suspend", "a"), ("resume", "a"), ("stop",)])
def test_without_a_manager_it_is_said(tmp_path, capsys, words):
    assert main(["jobs", *words, "--state", str(tmp_path)]) == 1
    assert "no manager answers in" in capsys.readouterr().err


# -- the view -------------------------------------------------------------------------------------


def status(**job):
    return {
        "machine": {
            "memory_bytes": 8 * 2**30,
            "slice_s": 24.0,
            "held_bytes": 2**30,
            "charged_bytes": 2 * 2**30,
            "flash_bytes": 3 * 2**30,
            "flash_capacity_bytes": 20 * 2**30,
            "flash_directories": ["/nvme"],
            "bytes_per_s": 2.5e9,
            "enforced": True,
            "stopping": False,
        },
        "jobs": [
            {
                "name": "bert",
                "phase": "asleep",
                "outcome": "unfinished",
                "held_bytes": 2**28,
                "flash_bytes": 3 * 2**30,
                "steps": 120,
                "awake_s": 60.0,
                "held_back": False,
                "told": "",
                "note": "waits for its turn",
                **job,
            }
        ],
    }


def test_the_table_says_who_sleeps_where_and_why():
    told = to_text(table(status()), width=140)
    assert "1.00 GiB held, 2.00 GiB charged of 8.00 GiB" in told
    assert "flash 3.00 GiB of 20.00 GiB in /nvme" in told.replace("\n", " ")
    assert "turns of 24.00 s" in told.replace("\n", " ")
    assert "2.50 GB/s" in told
    assert "kept by the kernel" in told.replace("\n", " ")
    for what in ("bert", "asleep", "256.00 MiB", "120", "2.00", "waits for its turn"):
        assert what in told
    over = status(phase="over", outcome="failed", note="", told="killed by SIGKILL [/x] [machine]")
    over = to_text(table(over), width=140)
    assert "failed" in over
    assert "killed by SIGKILL [/x] [machine]" in over


def test_the_line_of_the_machine_is_as_wide_as_the_terminal_and_not_as_its_table():
    """Of few jobs that is narrow: figures and their units came apart."""
    told = to_text(table(status(note="", told="")), width=140)
    assert told.splitlines()[0].endswith("2.50 GB/s")


def test_on_a_terminal_the_view_is_live_and_elsewhere_lines(tmp_path, monkeypatch, capsys):
    with open(tmp_path / "screen", "w+", encoding="utf-8") as file:
        watch = Watch(file)
        monkeypatch.setattr(watch, "_console", Console(file=file, force_terminal=True, width=140))
        with watch:
            watch.tell("bert: sleeps")
            watch(status())
        file.seek(0)
        screen = file.read()
    assert "bert: sleeps" in screen
    assert "waits for its turn" in screen
    with open(tmp_path / "plain", "w", encoding="utf-8") as file, Watch(file) as plain:
        plain.tell("bert: sleeps")
        plain(status())
    assert capsys.readouterr().err == "penstock: bert: sleeps\n"


def test_another_terminal_sees_it_live_until_the_manager_has_ended(tmp_path, monkeypatch, capsys):
    answers = [status(), status(), status(phase="over", outcome="done", note="")]

    class Manager:
        def __init__(self, state):
            pass

        def status(self):
            if not answers:
                raise JobError("no manager answers")
            return answers.pop(0)

    monkeypatch.setattr(jobs, "Client", Manager)
    monkeypatch.setattr(jobs, "_WATCH_S", 0.01)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["jobs", "status", "--watch"]) == 0
    assert not answers
    assert "done" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert main(["jobs", "status", "--watch"]) == 2
    assert "--watch needs a terminal" in capsys.readouterr().err
