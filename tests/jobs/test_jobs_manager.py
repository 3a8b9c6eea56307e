"""A manager and its jobs: processes without torch, that speak to it as `penstock run` does."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from fake_job import MOVING_S
from manager_program import fake_command

from penstock.core.errors import ConfigError, JobError
from penstock.core.units import MIB
from penstock.jobs import Client, Description, JobsMachine, JobSpec, Manager
from penstock.jobs.command import run_command
from penstock.jobs.description import load
from penstock.jobs.policy import MOVING_SHARE
from penstock.jobs.processes import held_bytes
from penstock.jobs.record import StateDirectory
from penstock.swap.channel import JobEnd, ManagerEnd, start_ticks

PATIENCE_S = 100
"""For so long a test waits for what comes at once, or never."""
MEMORY_MIB = 140
"""Of the machine. A fake job holds some 12 MiB asleep."""


def described(folder, *jobs, **machine):
    """Jobs by ``{"name": ..., "how": "steps=3 mib=1"}``; 80 MiB each if they do not say.

    One with ``"lasts": True`` does not end before there is a file ``go`` in the folder.
    """
    (folder / "script.py").touch()
    (folder / "flash").mkdir(exist_ok=True)
    machine = {
        "memory": f"{MEMORY_MIB}MiB",
        "flash": "flash",
        "slice": "100ms",
        "asleep": "20MiB",
        "grace": "1 min",
        "enforce": "polling",  # what it counts is the same on every machine
        **machine,
    }
    tables = [
        {"script": "script.py", "memory": "80MiB", **job, "args": job.get("how", "").split()}
        for job in jobs
    ]
    for table in tables:
        table.pop("how", None)
        if table.pop("lasts", False):
            table["args"].append(f"until={folder / 'go'}")
        if table["memory"] is None:
            del table["memory"]
    document = {"machine": machine, "job": tables}
    return Description.from_json(document, source="jobs.toml", base=str(folder))


@pytest.fixture
def managed(disk_path):
    """``managed(job, ..., **machine)``: a manager in a thread of its own until it is over.

    A job that is to be seen doing something ``lasts`` until the test has seen it and calls ``may_end``:
    how quick the job and its manager are is no matter then.
    """
    made = []

    @contextmanager
    def run(*jobs, state="state", keeps=True, **machine):
        lines = []
        manager = Manager(
            described(disk_path, *jobs, **machine),
            state=str(disk_path / state),
            tell=lines.append,
            command=fake_command,
        )
        most = []

        def watch(status):
            charged, limit = (status["machine"][f"{what}_bytes"] for what in ("charged", "memory"))
            assert charged <= limit or not keeps
            most.append(status["machine"]["held_bytes"])

        result = []
        thread = threading.Thread(target=lambda: result.append(manager.run(watch)))
        made.append((manager, thread))
        thread.start()
        client = Client(disk_path / state)
        yield Run(
            manager=manager,
            client=client,
            lines=lines,
            result=result,
            thread=thread,
            most=most,
            go=disk_path / "go",
        )

    yield run
    for manager, thread in made:
        manager._interrupts.count = 2  # as Ctrl-C, twice
        thread.join(20)
        assert not thread.is_alive()
        manager.close()


class Run:
    def __init__(self, *, manager, client, lines, result, thread, most, go):
        self.manager, self.client, self.lines, self._go = manager, client, lines, go
        self._result, self._thread, self.most = result, thread, most

    def ended(self):
        """The jobs by name, when the manager is over."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), self.lines
        self.good = self._result[0]
        return {each["name"]: each for each in self.manager.status()["jobs"]}

    def may_end(self):
        """Let jobs end that last until then."""
        self._go.touch()

    def until(self, what):
        """Wait for something to be so of the jobs; return them."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            jobs = {each["name"]: each for each in self.client.status()["jobs"]}
            if what(jobs):
                return jobs
            time.sleep(0.01)
        raise AssertionError(json.dumps(jobs, indent=1) + "\n".join(self.lines))


def is_in(name, *phases):
    return lambda jobs: jobs[name]["phase"] in phases


# -- sharing --------------------------------------------------------------------------------------


def test_three_jobs_of_sixty_percent_all_finish_within_the_budget(managed):
    jobs = [{"name": name, "how": "mib=64 steps=60", "lasts": True} for name in "abc"]
    with managed(*jobs) as run:
        run.until(lambda jobs: all(each["sleeps"] for each in jobs.values()))
        run.may_end()
        done = run.ended()
    assert run.good
    assert [each["outcome"] for each in done.values()] == ["done"] * 3
    assert all(each["steps"] == 60 and each["sleeps"] >= 1 for each in done.values())
    assert 64 * MIB < max(run.most) <= MEMORY_MIB * MIB


def test_two_that_fit_are_awake_together(managed):
    jobs = [{"name": name, "memory": "30MiB", "lasts": True} for name in "ab"]
    with managed(*jobs) as run:
        run.until(lambda jobs: all(each["phase"] == "awake" for each in jobs.values()))
        run.may_end()
        done = run.ended()
    assert [each["sleeps"] for each in done.values()] == [0, 0]


def test_a_need_that_is_not_declared_is_learnt(managed):
    jobs = [{"name": name, "memory": None, "how": "mib=40", "lasts": True} for name in "ab"]
    with managed(*jobs) as run:
        run.until(lambda jobs: all(each["need_bytes"] for each in jobs.values()))
        run.may_end()
        done = run.ended()
    assert run.good
    assert all(40 * MIB < each["need_bytes"] < 80 * MIB for each in done.values())
    assert sum("its need from now on" in line for line in run.lines) == 2


def test_who_needs_more_than_declared_is_told_and_counted_so(managed):
    with managed({"name": "a", "memory": "30MiB", "how": "mib=90", "lasts": True}) as run:
        run.until(lambda jobs: jobs["a"]["need_bytes"] > 90 * MIB)
        run.may_end()
        done = run.ended()
    assert any("more than its declared 30.00 MiB" in line for line in run.lines)
    assert done["a"]["need_bytes"] > 90 * MIB


def test_who_holds_more_than_the_machine_has_is_put_to_sleep_and_stays_so(managed):
    job = {"name": "a", "memory": "30MiB", "how": "mib=150 steps=10000"}
    with managed(job, memory="100MiB", keeps=False) as run:
        found = run.until(is_in("a", "asleep"))
        assert "more than [machine] memory, 100.00 MiB: it is suspended" in found["a"]["told"]
        time.sleep(0.3)
        assert run.until(is_in("a", "asleep"))["a"]["sleeps"] == 1


def test_who_just_fits_is_not_put_to_sleep_for_the_slack_that_it_does_not_have(managed):
    """It would sleep for ever, and nobody else would run."""
    job = {"name": "a", "memory": "30MiB", "how": "mib=205", "lasts": True}
    with managed(job, memory="220MiB") as run:
        run.until(lambda jobs: jobs["a"]["need_bytes"] > 220 * MIB)
        run.may_end()
        done = run.ended()
    assert run.good
    assert done["a"]["sleeps"] == 0
    assert 220 * MIB < done["a"]["need_bytes"] < 1.05 * 220 * MIB


def test_what_comes_ahead_of_its_turn_comes_within_the_budget(managed):
    jobs = [{"name": name, "memory": "110MiB", "how": "mib=95", "lasts": True} for name in "ab"]
    with managed(*jobs, memory="210MiB", slice="400ms") as run:
        run.until(lambda jobs: any(each["fetched_bytes"] >= 64 * MIB for each in jobs.values()))
        run.may_end()
        run.ended()
    assert run.good


def test_how_long_a_turn_lasts_is_learnt_from_what_moving_takes(managed):
    job = {"name": "a", "memory": "1GiB", "how": "steps=100000"}
    with managed(job, memory="2GiB", slice="auto") as run:
        run.until(is_in("a", "awake"))
        expected_s = 2 * 1024 * MIB / 3e9 / MOVING_SHARE
        assert run.client.status()["machine"]["slice_s"] == pytest.approx(expected_s)
        run.client.suspend("a")
        run.until(is_in("a", "asleep"))
        run.client.resume("a")
        run.until(is_in("a", "awake"))
        assert run.client.status()["machine"]["slice_s"] == pytest.approx(MOVING_S / MOVING_SHARE)
        run.client.stop()
        run.ended()


# -- being told -----------------------------------------------------------------------------------


def test_it_is_told_to_suspend_resume_and_stop(managed):
    with managed({"name": "a", "how": "steps=100000"}) as run:
        run.until(is_in("a", "awake"))
        assert "sleeps at the end of its step" in run.client.suspend("a")
        asleep = run.until(is_in("a", "asleep"))
        assert asleep["a"]["note"] == "sleeps until it is resumed"
        assert asleep["a"]["flash_bytes"] == MIB
        assert "has turns again" in run.client.resume("a")
        run.until(is_in("a", "awake"))
        with pytest.raises(JobError, match=r"no job 'b' to suspend; there are a"):
            run.client.suspend("b")
        run.client.stop("a")
        done = run.ended()
    assert done["a"]["outcome"] == "stopped"
    assert "SIGINT" in done["a"]["told"] or "exit code" in done["a"]["told"]


def test_a_sleeping_one_is_woken_to_be_stopped_and_a_deaf_one_is_killed(managed):
    with managed(
        {"name": "a", "how": "steps=100000"},
        {"name": "b", "how": "steps=100000 deaf=1"},
        grace="1 s",
    ) as run:
        run.until(lambda jobs: jobs["a"]["sleeps"] and jobs["b"]["steps"])
        assert "all jobs" in run.client.stop()
        done = run.ended()
    assert [each["outcome"] for each in done.values()] == ["stopped", "stopped"]
    assert "SIGKILL" in done["b"]["told"]
    assert "SIGKILL" not in done["a"]["told"]


def test_the_last_of_many_sleepers_is_woken_to_be_stopped_like_the_first(managed):
    deaf = [{"name": name, "how": "steps=100000 deaf=1"} for name in "abc"]
    with managed(*deaf, {"name": "z", "how": "steps=100000"}, grace="1 s") as run:
        run.until(lambda jobs: all(each["sleeps"] for each in jobs.values()))
        run.until(is_in("z", "asleep"))
        run.client.stop()
        done = run.ended()
    assert ["SIGKILL" in each["told"] for each in done.values()] == [True, True, True, False]


def test_it_is_said_who_has_killed_a_deaf_one(managed):
    with managed({"name": "a", "how": "steps=100000 deaf=1"}, grace="300ms") as run:
        run.until(lambda jobs: jobs["a"]["steps"])
        run.client.stop("a")
        done = run.ended()
    assert done["a"]["told"] == ("stopped (killed by SIGKILL, as it did not end within 0.6 s)")


@pytest.mark.parametrize("phase", ["awake", "asleep"])
def test_one_that_somebody_has_stopped_is_ended_in_order_all_the_same(managed, phase):
    jobs = [{"name": name, "how": "steps=100000"} for name in "ab"]
    with managed(*jobs) as run:
        found = run.until(lambda jobs: jobs["a"]["sleeps"] and jobs["a"]["phase"] == phase)
        os.kill(found["a"]["pid"], signal.SIGSTOP)
        run.client.stop()
        done = run.ended()
    assert "SIGKILL" not in done["a"]["told"]


@pytest.fixture
def ignored_interrupts():
    """SIGINT is ignored here and, until it says otherwise, in what is started."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
def test_one_that_is_just_starting_gets_the_interrupt_once_it_no_longer_ignores_it(
    managed, disk_path
):
    """As in a job in the background of a shell: it is ignored until Python has begun."""
    unset = disk_path / "unset"
    with managed({"name": "a", "how": f"steps=100000 unset={unset}"}) as run:
        run.until(lambda _: unset.exists())
        run.client.stop()
        for _ in range(3):  # each follows a look at the job
            run.client.status()
        unset.unlink()
        done = run.ended()
    assert "SIGTERM" not in done["a"]["told"]


def test_a_log_does_not_grow_without_bound(managed, disk_path):
    words = "x" * 1000
    job = {"name": "a", "how": f"steps=400 say={words}", "lasts": True}
    with managed(job, log="100KB") as run:
        said = run.until(lambda jobs: jobs["a"]["steps"] == 400)
        log = Path(said["a"]["log"])
        run.until(lambda jobs: log.stat().st_size < 100_000)
        run.may_end()
        run.ended()
    assert run.good
    before = Path(f"{log}.1")
    assert before.stat().st_size > 100_000
    told = before.read_bytes() + log.read_bytes()  # it may be emptied after the last line, too
    assert b"all steps are done" in told


def test_who_is_told_to_end_is_not_put_to_sleep_any_more(managed):
    """It would wake by itself to end, when the memory is another's."""
    jobs = [{"name": "z", "how": "steps=100000 deaf=1"}, {"name": "a", "how": "steps=100000"}]
    with managed(*jobs, grace="200ms", slice="30 s") as run:
        run.until(is_in("a", "awake"))
        run.client.suspend("a")
        run.until(is_in("z", "awake"))
        run.client.stop()
        done = run.ended()
    assert [each["sleeps"] for each in done.values()] == [0, 1]
    assert [each["outcome"] for each in done.values()] == ["stopped", "stopped"]


def test_a_manager_that_is_not_there_is_said(tmp_path):
    with pytest.raises(JobError, match=r"no manager answers in .*penstock jobs run"):
        Client(tmp_path).status()
    with pytest.raises(JobError, match="No such file"):
        Client(tmp_path / "no").status()


def test_of_a_manager_that_is_over_it_is_said_how_its_jobs_ended(managed):
    with managed({"name": "a", "how": "steps=2"}, {"name": "b", "how": "fail=1"}) as run:
        run.ended()
        with pytest.raises(
            JobError, match=r"no manager answers .* states of its jobs are: a done, b failed"
        ):
            run.client.status()


@pytest.mark.parametrize("record", ["", "[" * 100_000, "[]", '{"jobs": [{}]}', '{"jobs": 3}'])
def test_a_record_that_makes_no_sense_is_no_hindrance_to_say_so(tmp_path, record):
    (tmp_path / "record.json").write_text(record)
    with pytest.raises(JobError, match=r"jobs of a killed manager \("):
        Client(tmp_path).status()


def test_only_its_user_can_reach_it_and_rubbish_does_no_harm(managed, disk_path):
    with managed({"name": "a", "how": "steps=100000"}) as run:
        run.until(is_in("a", "awake"))
        path = disk_path / "state"
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((path / "control").stat().st_mode) == 0o600
        for rubbish in (b"\n", b"[1]\n", b'{"do": 7}\n', b"{" * 70000, b"\xff\n"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(10)
                peer.connect(str(path / "control"))
                peer.sendall(rubbish)
                with suppress(ConnectionResetError):  # it does not listen for so long
                    answer = peer.recv(10000)
                    assert b'"ok": false' in answer or not answer
        assert run.client.status()["schema"] == 1
        run.client.stop()
        run.ended()


def test_those_who_connect_and_say_nothing_keep_nobody_from_asking(disk_path):
    """As commands that somebody has stopped."""
    with (
        Manager(described(disk_path, {"name": "a"}), state=str(disk_path / "state")) as manager,
        ExitStack() as silent,
    ):
        for _ in range(40):
            peer = silent.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(str(disk_path / "state/control"))
            manager._server.serve(0.1)
        told = []
        client = Client(disk_path / "state")
        asking = threading.Thread(target=lambda: told.append(client.suspend("a")))
        asking.start()
        while asking.is_alive():
            manager._server.serve(0.1)
        assert told == ["a does not start until it is resumed"]


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_job_that_fails_takes_none_along_and_its_log_is_quoted(managed):
    jobs = [{"name": "good"}, {"name": "bad", "how": "fail=5"}]
    with managed(*jobs) as run:
        done = run.ended()
    assert not run.good
    assert done["good"]["outcome"] == "done"
    assert done["bad"]["outcome"] == "failed"
    assert done["bad"]["exit_code"] == 1
    assert "ValueError: this job was told to fail" in done["bad"]["told"]
    assert "Traceback" in Path(done["bad"]["log"]).read_text()


@pytest.mark.parametrize("phase", ["awake", "asleep"])
def test_a_job_that_is_killed_takes_none_along(managed, phase):
    jobs = [{"name": name, "lasts": True} for name in "ab"]
    with managed(*jobs) as run:
        found = run.until(is_in("a", phase))
        os.kill(found["a"]["pid"], signal.SIGKILL)
        run.may_end()
        done = run.ended()
    assert done["a"]["outcome"] == "failed"
    assert "killed by SIGKILL, perhaps out of memory" in done["a"]["told"]
    assert done["b"]["outcome"] == "done"


@pytest.mark.parametrize("how", ["inherits", "plain"])
def test_what_a_job_leaves_behind_is_ended(managed, disk_path, how):
    with managed({"name": "a", "how": f"steps=3 child={how}"}) as run:
        done = run.ended()
    child = {"pid": int(Path(done["a"]["log"]).read_text().split()[0])}
    until_gone({"child": child})
    assert not cmdline(child["pid"])
    with ManagerEndAt(disk_path / "state/channels/a") as channel:
        assert not channel.has_process()


def test_what_a_job_has_said_last_is_heard_though_it_has_ended_meanwhile(killed, disk_path):
    """Between a look at what it says and one whether it lives."""
    description = load(disk_path / "jobs.toml")
    with Manager(description, state=str(disk_path / "state")) as manager:
        assert sorted(manager.found) == ["a", "b"]
        for name, job in killed.items():
            before = manager._tasks[name]._process.has_ended

            def ends(name=name, job=job, before=before):
                os.kill(job["pid"], signal.SIGKILL)
                until_gone({name: job})
                JobEnd(str(disk_path / "state/channels" / name)).tell(pid=job["pid"], code=0)
                return before()

            manager._tasks[name]._process.has_ended = ends
        manager.advance()
        assert [each["outcome"] for each in manager.status()["jobs"]] == ["done", "done"]


@contextmanager
def ManagerEndAt(path):
    end = ManagerEnd(str(path))
    try:
        yield end
    finally:
        end.close()


def test_who_cannot_sleep_goes_on_alone_and_others_wait(managed):
    jobs = [
        {"name": "a", "how": "refuse=disk-full", "lasts": True},
        {"name": "b", "how": "steps=20"},
    ]
    with managed(*jobs) as run:
        waiting = run.until(lambda jobs: "cannot sleep" in jobs["b"]["note"])
        assert waiting["a"]["phase"] == "awake"
        run.may_end()
        done = run.ended()
    assert any("disk-full" in line and "others wait" in line for line in run.lines)
    assert [each["outcome"] for each in done.values()] == ["done", "done"]


def test_more_jobs_than_flash_begin_when_others_are_over(managed):
    jobs = [{"name": name, "how": "steps=30", "lasts": True} for name in "ab"]
    with managed(*jobs, flash_capacity="100MiB") as run:
        waiting = run.until(is_in("a", "awake"))
        run.may_end()
        assert "160.00 MiB of memory would go to flash" in waiting["b"]["note"]
        assert "flash, which has 100.00 MiB" in waiting["b"]["note"]
        done = run.ended()
    assert run.good
    assert done["a"]["sleeps"] == 0


def test_what_is_not_there_is_said_before_anything_begins(disk_path):
    description = described(disk_path, {"name": "a"}, memory="900PB")
    with pytest.raises(ConfigError, match=r"memory is .* TiB, but this machine has only .* GiB"):
        Manager(description, state=str(disk_path / "state"))
    description = described(disk_path, {"name": "a"}, flash_capacity="900PB")
    with pytest.raises(ConfigError, match=r"flash_capacity is .* TiB, but .* free"):
        Manager(description, state=str(disk_path / "state"))
    shutil.rmtree(disk_path / "flash")
    with pytest.raises(ConfigError, match=r"\[machine\] flash .* does not exist"):
        Manager(description, state=str(disk_path / "state"))


def test_a_program_that_cannot_be_begun_is_told(disk_path):
    with Manager(
        described(disk_path, {"name": "a"}),
        state=str(disk_path / "state"),
        command=lambda *_: ["/no/such/program"],
    ) as manager:
        assert not manager.run()
        (job,) = manager.status()["jobs"]
    assert "cannot be started" in job["told"]
    assert "/no/such/program" in job["told"]


def test_a_state_directory_that_is_deleted_by_hand_is_said_and_jobs_go_on(managed, disk_path):
    jobs = [{"name": name, "lasts": True} for name in "ab"]
    with managed(*jobs) as run:
        run.until(lambda jobs: jobs["a"]["sleeps"] and jobs["b"]["sleeps"])
        while (disk_path / "state").exists():  # its manager may be writing there
            shutil.rmtree(disk_path / "state", ignore_errors=True)
        run.may_end()
        done = run.ended()
    assert run.good, done
    assert any("the directory was deleted: jobs continue" in line for line in run.lines)


def test_one_directory_has_one_manager(managed, disk_path):
    with managed({"name": "a", "how": "steps=100000"}) as run:
        run.until(is_in("a", "awake"))
        with pytest.raises(ConfigError, match="is in use by this process"):
            Manager(described(disk_path, {"name": "a"}), state=str(disk_path / "state"))
        run.client.stop()
        run.ended()


# -- killed, and started again --------------------------------------------------------------------

TOML = """
[machine]
memory = "140MiB"
flash = "flash"
slice = "SLICE"
asleep = "20MiB"
grace = "1 min"
enforce = "ENFORCE"
""" + "".join(
    f'[[job]]\nname = "{name}"\nscript = "script.py"\nmemory = "80MiB"\n'
    'args = ["mib=64", "steps=STEPS", "until=GO"]\n'
    for name in "ab"
)


@contextmanager
def killed_manager(folder, *, steps=150, enforce="polling"):
    """Of two jobs, while ``a`` slept and ``b`` did not: its last status. They are ended in the end."""
    (folder / "script.py").touch()
    (folder / "flash").mkdir()
    text = TOML.replace("STEPS", str(steps)).replace("ENFORCE", enforce)
    text = text.replace("GO", str(folder / "go"))
    (folder / "jobs.toml").write_text(text.replace("SLICE", "10 min"))
    process = started(folder)
    client, running = Client(folder / "state"), Running(folder)
    pids = []
    try:
        running.until(is_in("a", "awake"))
        client.suspend("a")
        running.until(is_in("b", "awake"))
        client.resume("a")  # in ten minutes, by when its manager is another
        running.until(is_in("a", "asleep"))
        status = client.status()
        pids = [each["pid"] for each in status["jobs"]]
        process.kill()
        process.wait()
        (folder / "jobs.toml").write_text(text.replace("SLICE", "150ms"))
        yield status
    finally:
        process.kill()
        process.communicate()
        for pid in pids:
            if b"fake_job" in cmdline(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def killed(disk_path, request):
    """Jobs of a manager that was killed while ``a`` slept and ``b`` did not, by name."""
    with killed_manager(disk_path, steps=getattr(request, "param", 150)) as status:
        yield {each["name"]: each for each in status["jobs"]}


def started(folder):
    program = Path(__file__).with_name("manager_program.py")
    return subprocess.Popen(
        [sys.executable, program, "jobs.toml", "state"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


def next_manager(folder):
    """What another one prints. Jobs of the one before may end once it has looked for them."""
    process = started(folder)
    client, answers = Client(folder / "state"), False
    while not answers and process.poll() is None:
        with suppress(JobError):
            answers = bool(client.status())
        time.sleep(0.01)
    (folder / "go").touch()
    return process.communicate(timeout=PATIENCE_S)[0]


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_killed_manager_is_started_again_and_finds_its_jobs(killed, disk_path):
    held = {name: held_bytes(each["pid"]) for name, each in killed.items()}
    time.sleep(0.5)  # nobody is woken without a manager
    assert held_bytes(killed["a"]["pid"]) == pytest.approx(held["a"], abs=MIB)
    out = next_manager(disk_path)
    result = json.loads(out.splitlines()[-1])
    assert "found again, process" in out
    assert result["most"] <= 140 * MIB
    for job in result["status"]["jobs"]:
        assert (job["outcome"], job["exit_code"], job["steps"]) == ("done", 0, 150)
        assert str(killed[job["name"]]["pid"]) in Path(job["log"]).read_text()  # the same process


def test_jobs_that_ended_without_a_manager_are_known(killed, disk_path):
    os.kill(killed["a"]["pid"], signal.SIGKILL)
    (disk_path / "go").touch()
    until_gone(killed)  # the other goes on to its end by itself
    out = next_manager(disk_path)
    jobs = {each["name"]: each for each in json.loads(out.splitlines()[-1])["status"]["jobs"]}
    assert jobs["b"]["outcome"] == "done"
    assert jobs["a"]["outcome"] == "failed"
    assert "was killed, or the machine was restarted" in jobs["a"]["told"]


def test_another_process_that_got_the_number_is_not_taken_for_the_job(killed, disk_path):
    for name, job in killed.items():
        os.kill(job["pid"], signal.SIGKILL)
        JobEnd(str(disk_path / "state/channels" / name)).tell(start_ticks=1)  # this process lives
    until_gone(killed)
    out = next_manager(disk_path)
    jobs = json.loads(out.splitlines()[-1])["status"]["jobs"]
    assert all(
        each["outcome"] == "failed" and "was killed, or the machine was restarted" in each["told"]
        for each in jobs
    )


def until_gone(jobs):
    end = time.monotonic() + PATIENCE_S
    while any(start_ticks(each["pid"]) for each in jobs.values()):
        assert time.monotonic() < end
        time.sleep(0.01)


def changed(folder, **what):
    """What the last manager has recorded of each job, with this instead."""
    record = folder / "state/record.json"
    document = json.loads(record.read_text())
    for job in document["jobs"]:
        job.update(what)
    record.write_text(json.dumps(document))


@pytest.mark.parametrize("recorded", [{"phase": "waiting", "pid": 0}, {"phase": "over"}, None])
def test_a_job_that_was_begun_but_not_recorded_is_found_by_what_it_says(
    killed, disk_path, recorded
):
    """A manager was killed in between, or its disk was full."""
    if recorded is None:
        (disk_path / "state/record.json").unlink()
    else:
        changed(disk_path, **recorded)
    out = next_manager(disk_path)
    jobs = json.loads(out.splitlines()[-1])["status"]["jobs"]
    assert [each["steps"] for each in jobs] == [150, 150]
    assert out.count("found again") == 2


def test_a_job_that_has_ended_before_it_was_recorded_is_not_begun_again(killed, disk_path):
    for name, job in killed.items():
        os.kill(job["pid"], signal.SIGKILL)
        JobEnd(str(disk_path / "state/channels" / name)).tell(pid=job["pid"], code=0, steps=7)
    changed(disk_path, phase="waiting", pid=0, start_ticks=0)
    until_gone(killed)
    out = next_manager(disk_path)
    jobs = json.loads(out.splitlines()[-1])["status"]["jobs"]
    assert [(each["outcome"], each["steps"]) for each in jobs] == [("done", 7)] * 2


def test_what_was_learnt_of_a_job_is_known_to_the_next_manager(killed, disk_path):
    """Else one that holds more than was declared is woken as if it did not."""
    changed(disk_path, peak_bytes=110 * MIB)
    out = next_manager(disk_path)
    result = json.loads(out.splitlines()[-1])
    assert [each["need_bytes"] for each in result["status"]["jobs"]] == [int(115.5 * MIB)] * 2


@pytest.mark.parametrize("killed", [10**6], indirect=True)
def test_a_manager_that_nohup_has_begun_outlives_its_terminal(killed, disk_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = started(disk_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    Running(disk_path).until(have_begun)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert "stopping all jobs" in out


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("killed", [10**6], indirect=True)
def test_ctrl_c_ends_all_in_order_and_hanging_up_leaves_them(killed, disk_path):
    process = started(disk_path)
    Running(disk_path).until(have_begun)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=PATIENCE_S)
    assert all(b"fake_job" in cmdline(each["pid"]) for each in killed.values())
    process = started(disk_path)
    Running(disk_path).until(have_begun)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert "stopping all jobs" in out
    result = json.loads(out.splitlines()[-1])
    assert result["most"] <= MEMORY_MIB * MIB  # who slept was woken within the budget
    assert [each["outcome"] for each in result["status"]["jobs"]] == ["stopped", "stopped"]
    assert not any("SIGKILL" in each["told"] for each in result["status"]["jobs"])
    assert not any(cmdline(each["pid"]) for each in killed.values())


class Running:
    """A manager in another process."""

    def __init__(self, folder):
        self._client = Client(folder / "state")

    def until(self, what):
        """Wait for something to be so of the jobs; return them."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with suppress(JobError):
                jobs = {each["name"]: each for each in self._client.status()["jobs"]}
                if what(jobs):
                    return jobs
            time.sleep(0.01)
        raise AssertionError("it did not come to that")


def have_begun(jobs):
    return all(each["phase"] != "starting" for each in jobs.values())


def test_a_durable_job_whose_process_is_gone_is_begun_again(killed, disk_path):
    for each in killed.values():
        os.kill(each["pid"], signal.SIGKILL)
    text = (disk_path / "jobs.toml").read_text()
    (disk_path / "jobs.toml").write_text(text.replace("[[job]]", "[[job]]\ndurable = true", 1))
    until_gone(killed)
    out = next_manager(disk_path)
    jobs = json.loads(out.splitlines()[-1])["status"]["jobs"]
    assert (jobs[0]["outcome"], jobs[0]["steps"]) == ("done", 150)
    assert jobs[1]["outcome"] == "failed"
    assert "starts again from its saved state" in out


def test_a_durable_job_resumes_only_from_what_was_kept(tmp_path):
    spec = JobSpec(name="a", script="x.py", durable=True, args=("1",), options=("--floor", "1MiB"))
    machine = JobsMachine(memory="1GiB", flash="/nvme")
    kept = tmp_path / "kept"
    command = run_command(spec, machine, "channel", str(kept))
    assert command[1:] == [
        *("-m", "penstock", "run", "--channel", "channel", "--flash", "/nvme"),
        *("--state", str(kept), "--floor", "1MiB", "x.py", "1"),
    ]
    kept.mkdir()
    (kept / "run.json").touch()
    assert "--resume" in run_command(spec, machine, "channel", str(kept))


def test_what_a_durable_job_has_left_behind_does_not_keep_it_from_beginning_again(
    killed, disk_path
):
    """As workers of its data loaders, which live on for a while."""
    for each in killed.values():
        os.kill(each["pid"], signal.SIGKILL)
    until_gone(killed)
    with ManagerEndAt(disk_path / "state/channels/a") as channel:
        lock = channel.lock_for_child()
        worker = subprocess.Popen(["sleep", "60"], pass_fds=(lock,), start_new_session=True)
        os.close(lock)
        assert channel.has_process()
    text = (disk_path / "jobs.toml").read_text()
    (disk_path / "jobs.toml").write_text(text.replace("[[job]]", "[[job]]\ndurable = true"))
    out = next_manager(disk_path)
    assert worker.wait(10) == -signal.SIGKILL
    jobs = json.loads(out.splitlines()[-1])["status"]["jobs"]
    assert [each["outcome"] for each in jobs] == ["done", "done"]


def test_a_durable_job_that_was_to_end_is_not_begun_again(killed, disk_path):
    for each in killed.values():
        os.kill(each["pid"], signal.SIGKILL)
    changed(disk_path, stopping=True)
    text = (disk_path / "jobs.toml").read_text()
    (disk_path / "jobs.toml").write_text(text.replace("[[job]]", "[[job]]\ndurable = true"))
    until_gone(killed)
    out = next_manager(disk_path)
    jobs = json.loads(out.splitlines()[-1])["status"]["jobs"]
    assert [each["outcome"] for each in jobs] == ["stopped", "stopped"]


@pytest.mark.parametrize(
    "calls",
    [
        "fsync",
        pytest.param(
            "open,mkdir,makedirs,rename,unlink,pwrite,posix_fallocate,chmod,fchmod,kill,killpg,flock,"
            "pidfd_send_signal,Popen",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wherever_a_manager_is_killed_another_goes_on(disk_path, calls):
    """No job is begun twice, none is lost, two are never awake where one fits, and nothing is left."""
    program = Path(__file__).with_name("crash_walk_program.py")
    out = subprocess.check_output([sys.executable, program, disk_path, calls], timeout=200)
    result = json.loads(out)
    assert result["killed"] >= 8
    assert result["wrong"] == {}


def test_jobs_that_live_must_be_described(killed, disk_path):
    description = described(disk_path, {"name": "other"})
    with pytest.raises(
        ConfigError, match=r"job '[ab]' of an earlier manager may still run, process \d+"
    ):
        Manager(description, state=str(disk_path / "state"))


@pytest.mark.parametrize("durable", [True, False])
def test_no_record_takes_the_place_of_another_before_it_is_on_the_device(
    disk_path, monkeypatch, durable
):
    """After a loss of power an empty one would be there, and no durable job be found."""
    done = []
    for name in ("fsync", "rename"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, name=name, call=call, **k: (done.append(name), call(*a, **k))[1]
        )
    state = StateDirectory(disk_path / "state")
    state.write({"jobs": []}, durable=durable)
    state.close()
    assert done[:2] == ["fsync", "rename"]


def test_a_record_that_cannot_be_read_is_said(disk_path):
    StateDirectory(disk_path / "state").close()
    (disk_path / "state/record.json").mkdir()
    with pytest.raises(JobError, match=r"cannot be read: .* remove the directory"):
        Manager(described(disk_path, {"name": "a"}), state=str(disk_path / "state"))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "[]", '{"schema": 9}', '{"schema": 1, "jobs": [{"name": "a"}]}']
)
def test_a_damaged_record_is_said(disk_path, text):
    StateDirectory(disk_path / "state").close()
    (disk_path / "state/record.json").write_text(text)
    with pytest.raises(JobError, match="remove the directory"):
        Manager(described(disk_path, {"name": "a"}), state=str(disk_path / "state"))
