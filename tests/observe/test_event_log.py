"""The JSONL log: its schema, that it loses nothing, and that its disk may fail."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import textwrap
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import preloaded
from penstock.core.errors import ConfigError, PenstockWarning, TransferError
from penstock.observe import log as log_module
from penstock.observe.clock import ManualClock
from penstock.observe.events import LEVEL, Level, Stage
from penstock.observe.log import EventLog
from penstock.observe.recorder import Recorder
from penstock.observe.records import log_files, read_events, read_log
from tries import tries


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def full_disk(monkeypatch):
    """Every write of the log fails from now on; gives the number of attempts."""
    attempts = []

    def write(fd, data):
        attempts.append(len(data))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill() -> list[int]:
        monkeypatch.setattr(log_module.os, "write", write)
        return attempts

    return fill


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return preloaded.run(["-c", textwrap.dedent(code), *map(str, args)])


def test_every_kind_of_line_has_its_documented_fields(path):
    clock = ManualClock()
    with EventLog(path, clock=clock) as log:
        recorder = Recorder(clock=clock, log=log)
        recorder.begin_step(3)
        recorder.span(Stage.WRITE, 10, 25, nbytes=4096, tier="flash", slot="fc#0")
        recorder.level("device", 7)
        recorder.mark("replan", reason="drift")
        recorder.count("fallback.host")
        clock.advance(100)
        recorder.end_step()
    records = list(read_log(path))
    assert [record["kind"] for record in records] == [
        "header", "span", "level", "mark", "span", "step", "end",
    ]  # fmt: skip
    header, span, level, mark, _, step, _ = records
    assert header.keys() == {"kind", "schema", "t_ns", "unix_ns", "pid", "file"}
    assert span == {
        "kind": "span", "stage": "write", "t_ns": 10, "dur_ns": 15, "nbytes": 4096,
        "tier": "flash", "slot": "fc#0", "cause": "",
    }  # fmt: skip
    assert level == {"kind": "level", "t_ns": 0, "memory": "device", "nbytes": 7}
    assert mark == {"kind": "mark", "t_ns": 0, "name": "replan", "fields": {"reason": "drift"}}
    assert (step["index"], step["t_ns"], step["dur_ns"]) == (3, 0, 100)
    assert step["counters"] == {"fallback.host": 1}
    assert {"stage": "write", "tier": "flash", "count": 1, "nbytes": 4096, "busy_ns": 15} in (
        step["flows"]
    )
    assert step["memory"]["device"] == {
        "current_bytes": 7, "peak_bytes": 7, "average_bytes": 7,
    }  # fmt: skip


TEXT = st.text(max_size=12)
FIELD = st.one_of(TEXT, st.integers(), st.floats(), st.booleans(), st.none())


@settings(max_examples=tries(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(list(Stage)), st.integers(0), st.integers(0), TEXT)),
    st.dictionaries(st.text(min_size=1, max_size=5), FIELD, max_size=4),
)
def test_events_survive_the_round_trip(path, spans, fields):
    with EventLog(path) as log:
        recorder = Recorder(clock=ManualClock(), log=log)
        for stage, start, length, slot in spans:
            recorder.span(stage, start, start + length, slot=slot)
        recorder.mark("m", **fields)
        events = recorder.events()
    assert read_events(path) == events
    for key, value in fields.items():
        odd = isinstance(value, float) and value - value != 0  # NaN or infinite: JSON has neither
        assert events[-1].fields[key] == (str(value) if odd else value)


def test_nothing_is_lost_from_many_threads(path):
    with EventLog(path) as log:
        recorder = Recorder(log=log, event_bytes=0)
        workers = [
            threading.Thread(target=lambda: [recorder.level("device", n) for n in range(500)])
            for _ in range(4)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert sum(record["kind"] == "level" for record in read_log(path)) == 2000


def test_a_flush_makes_the_file_complete(path):
    log = EventLog(path)
    recorder = Recorder(log=log)
    recorder.level("device", 1)
    assert log.flush()
    assert [record["kind"] for record in read_log(path)] == ["header", "level"]
    log.close()


def test_after_close_events_are_dropped_quietly(path):
    log = EventLog(path)
    log.close()
    log.close()
    recorder = Recorder(log=log)
    recorder.level("device", 1)
    recorder.begin_step(0)
    recorder.end_step()
    log.flush()
    assert [record["kind"] for record in read_log(path)] == ["header", "end"]


def test_a_full_disk_warns_once_and_recording_goes_on(path, full_disk):
    log = EventLog(path)
    recorder = Recorder(log=log)
    assert log.flush()
    attempts = full_disk()
    recorder.begin_step(0)
    recorder.level("device", 5)
    with pytest.warns(PenstockWarning, match=r"events\.jsonl.*No space left") as caught:
        assert not log.flush()
    recorder.level("device", 6)
    recorder.end_step()  # would warn again, and warnings are errors here
    log.close()
    assert len(caught) == 1
    assert len(attempts) == 1
    assert log.failed
    assert recorder.snapshot().memory["device"].peak_bytes == 6
    assert len(log._pending) == 0


def test_the_end_of_a_step_tells_of_the_failure(path, full_disk):
    log = EventLog(path)
    recorder = Recorder(log=log)
    full_disk()
    recorder.begin_step(0)
    recorder.level("device", 5)
    log._wake.set()
    assert _eventually(lambda: log.failed)
    with pytest.warns(PenstockWarning):
        recorder.end_step()
    log.close()


def test_a_short_write_is_continued(path, monkeypatch):
    write = os.write
    monkeypatch.setattr(log_module.os, "write", lambda fd, data: write(fd, bytes(data[:7])))
    with EventLog(path) as log:
        recorder = Recorder(log=log)
        for n in range(100):
            recorder.level("device", n)
    assert [e.nbytes for e in read_events(path)] == list(range(100))


def test_a_disk_that_hangs_costs_events_but_neither_memory_nor_time(path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_PENDING", 10)
    hang, write = threading.Event(), os.write
    log = EventLog(path)
    assert log.flush()
    monkeypatch.setattr(log_module.os, "write", lambda fd, data: hang.wait(30) and write(fd, data))
    recorder = Recorder(log=log)
    recorder.level("device", -1)
    log._wake.set()
    assert _eventually(lambda: not log._pending)  # the writer hangs in its write
    for n in range(50):
        recorder.level("device", n)
    assert (len(log._pending), log.lost) == (10, 40)
    hang.set()
    log.close()
    assert {"kind": "lost", "count": 40} in list(read_log(path))


@pytest.mark.parametrize("name", ["missing/events.jsonl", "."])
def test_a_log_that_cannot_be_opened_says_so_at_once(tmp_path, name):
    with pytest.raises(TransferError, match="open of"):
        EventLog(tmp_path / name)


def test_a_log_left_open_is_complete_after_the_interpreter_exits(path):
    done = run_python(
        """
        import sys
        from penstock.observe.log import EventLog
        from penstock.observe.recorder import Recorder
        recorder = Recorder(log=EventLog(sys.argv[1]))
        for n in range(1000):
            recorder.level("device", n)
        """,
        path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    kinds = [record["kind"] for record in read_log(path)]
    assert (kinds.count("level"), kinds[-1]) == (1000, "end")


def test_a_killed_process_leaves_what_it_flushed(path):
    done = run_python(
        """
        import os, signal, sys
        from penstock.observe.log import EventLog
        from penstock.observe.recorder import Recorder
        log = EventLog(sys.argv[1])
        recorder = Recorder(log=log)
        recorder.level("device", 1)
        log.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
    )
    assert done.returncode == -signal.SIGKILL
    assert [record["kind"] for record in read_log(path)] == ["header", "level"]


def test_a_forked_child_writes_nothing(path):
    done = run_python(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
        from penstock.observe.log import EventLog
        from penstock.observe.recorder import Recorder
        log = EventLog(sys.argv[1])
        recorder = Recorder(log=log)
        recorder.level("device", 1)
        child = os.fork()
        recorder.level("device", 2 if child else 3)
        if not child:
            log.flush()
            log.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
        path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [event.nbytes for event in read_events(path)] == [1, 2]


def test_a_torn_last_line_is_left_out(path):
    with EventLog(path) as log:
        Recorder(log=log).level("device", 1)
    with path.open("a") as file:
        file.write('{"kind":"lev')
    assert [record["kind"] for record in read_log(path)] == ["header", "level", "end"]


@pytest.mark.parametrize("text", ["not json\n", "[]\n", '{"kind":"header","schema":99}\n'])
def test_what_is_no_log_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"events\.jsonl"):
        list(read_log(path))


def test_a_damaged_line_within_is_refused_with_its_number(path):
    with EventLog(path) as log:
        Recorder(log=log).level("device", 1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "{oops\n", *lines[1:]]))
    with pytest.raises(ConfigError, match=r"events\.jsonl:2"):
        list(read_log(path))


def test_lines_are_strict_json(path):
    with EventLog(path) as log:
        Recorder(log=log).mark("loss", value=float("nan"))
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# -- rotation ------------------------------------------------------------------------------------------


def logged(path, levels, *, steps=(), **options):
    """A log of so many levels; each is flushed, so that what is in which file does not depend on time."""
    clock = ManualClock()
    with EventLog(path, clock=clock, **options) as log:
        recorder = Recorder(clock=clock, log=log)
        recorder.mark("session", policy="auto")
        for number in range(levels):
            clock.advance(1)
            recorder.level("device", number)
            if number in steps:
                recorder.begin_step(steps.index(number))
            assert log.flush()
    return log


def levels_of(path):
    return [event.nbytes for event in read_events(path) if isinstance(event, Level)]


def test_a_full_file_is_renamed_and_the_oldest_goes(path):
    logged(path, 200, file_bytes=2000, files=4)
    names = sorted(each.name for each in path.parent.iterdir())
    assert names == [path.name, *(f"{path.name}.{n}" for n in (1, 2, 3))]
    assert all(1000 < each.stat().st_size <= 2000 for each in path.parent.glob("*.jsonl.*"))
    found = levels_of(path)
    assert found == list(range(200 - len(found), 200))
    assert 50 < len(found) < 150
    records = list(read_log(path))
    assert [record["kind"] for record in records].count("header") == 1
    assert records[-1] == {"kind": "end"}
    assert records[0]["file"] > 0
    assert [mark["fields"] for mark in records[0]["marks"]] == [{"policy": "auto"}]


def test_nothing_is_lost_while_there_are_files_enough(path):
    logged(path, 200, file_bytes=2000, files=50)
    assert levels_of(path) == list(range(200))
    assert len(list(path.parent.iterdir())) > 4


def test_a_log_of_one_file_begins_again(path):
    logged(path, 200, file_bytes=2000, files=1)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.stat().st_size <= 2000
    assert levels_of(path)[-1] == 199


def test_files_of_an_earlier_run_are_not_read(path):
    logged(path, 200, file_bytes=2000, files=4)
    logged(path, 3)
    assert levels_of(path) == [0, 1, 2]
    logged(path, 30, file_bytes=2000, files=4)
    assert len(list(path.parent.iterdir())) == 4  # some are of the earlier run still
    assert levels_of(path) == list(range(30))


def test_a_program_that_changes_its_directory_rotates_where_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = EventLog("events.jsonl", file_bytes=300, files=2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorder = Recorder(log=log)
    for number in range(9):
        recorder.level("device", number)
        assert log.flush()
    log.close()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "events.jsonl.1").exists()
    assert levels_of(tmp_path / "events.jsonl")[-1] == 8


def test_a_rotation_that_fails_warns_once_and_recording_goes_on(path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(log_module.os, "replace", refuse)
    log = EventLog(path, file_bytes=300)
    recorder = Recorder(log=log)

    def record():
        for number in range(9):
            recorder.level("device", number)
            log.flush()

    with pytest.warns(PenstockWarning, match=r"events\.jsonl.*Permission denied"):
        record()
    log.close()
    assert recorder.snapshot().memory["device"].peak_bytes == 8
    assert levels_of(path) == list(range(len(levels_of(path))))


def _eventually(condition) -> bool:
    pause = threading.Event()
    return any(condition() or pause.wait(0.01) for _ in range(500))


def fill(log):
    """Write events of some 15 kB."""
    for _ in range(300):
        log.append((LEVEL, 1, "device", 1))
        assert log.flush()


def test_each_file_has_the_latest_plan_of_each_device_unless_it_fills_the_file(path):
    with EventLog(path, file_bytes=4000, files=100) as log:
        for device, policy in (("cpu", "first"), ("cpu", "second"), ("cuda:0", "other")):
            log.write("plan", {"device": device, "policy": policy, "slots": []})
        fill(log)
        log.write("plan", {"device": "cpu", "policy": "large", "slots": ["x" * 3000]})
        fill(log)
    heads = [Path(name).read_text().splitlines()[:3] for name in log_files(path)]
    plans = [[json.loads(line).get("policy") for line in head[1:]] for head in heads]
    assert plans[1] == ["second", "other"]
    assert plans[-1] == [None, None]  # too large to be repeated


def test_samples_are_taken_by_the_thread_of_the_log_a_few_times_a_second(path):
    clock, threads = ManualClock(), set()

    def sample():
        threads.add(threading.current_thread().name)
        return {"owners": {"optimizer": 7}, "limit_bytes": None, "process_bytes": 9}

    with EventLog(path, clock=clock) as log:
        log.sample = sample
        recorder = Recorder(clock=clock, log=log)
        for index in range(50):
            recorder.begin_step(index)
            clock.advance(10**7)
            recorder.end_step()
            log.flush()
    found = [record for record in read_log(path) if record["kind"] == "holdings"]
    assert found
    assert {(each["owners"]["optimizer"], each["process_bytes"]) for each in found} == {(7, 9)}
    times = [each["t_ns"] for each in found]
    assert all(after - before >= 2 * 10**8 for before, after in pairwise(times))
    assert threads == {"penstock-log"}
