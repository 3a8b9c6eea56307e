"""Files that users hand in: pipes are refused, and any bytes give a clear error or a valid result."""

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from hanging import within_s
from penstock import checkpoint
from penstock.checkpoint import Checkpointer
from penstock.cli import main
from penstock.cli.plan_network import _read as read_profile
from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.files import open_regular, parse_json, parse_toml, read_text
from penstock.data import FlashDataset
from penstock.data.build import open_index
from penstock.data.packing import pack
from penstock.jobs import Client, Description
from penstock.jobs.description import load as load_jobs
from penstock.jobs.record import StateDirectory
from penstock.lab.ssd.description import describe
from penstock.lab.ssd.mqsim_xml import parse as parse_xml
from penstock.lab.ssd.traces import TraceFormat, read_trace
from penstock.observe.clock import ManualClock
from penstock.observe.events import Stage
from penstock.observe.log import EventLog
from penstock.observe.recorder import Recorder
from penstock.observe.records import read_events
from penstock.observe.summary import RunFacts, summarize
from penstock.optim.config import StatesConfig
from penstock.plan import Budgets, Machine, PassProfile, SlotKey, SlotProfile, policies
from penstock.plan.profile import Profile
from penstock.report.run_file import read_run
from penstock.runtime.user_plan import load_plan
from penstock.store.flash import FlashTier
from tries import tries

MACHINE = Machine.preset("cpu")
SLOT = SlotProfile(
    key=SlotKey("net.0", 0, 1 << 20),
    pass_index=0,
    saved_at_ns=1,
    needed_at_ns=9,
    kind="Linear",
    held_elsewhere=False,
    dtype="float32",
)
PROFILE = Profile("cpu", (SLOT,), (PassProfile(0, 0, 5, 10),))


def a_log():
    """An event log with a step, and its summary."""
    path = Path(os.environ["PENSTOCK_CACHE"], "events.jsonl")
    with EventLog(path) as log:
        clock = ManualClock()
        recorder = Recorder(clock=clock, log=log)
        recorder.begin_step(0)
        recorder.span(Stage.WRITE, 0, 1000, nbytes=4096, tier="flash", slot="x")
        recorder.level("device", 4096)
        clock.advance(10**9)
        recorder.end_step()
        facts = RunFacts(policy="auto", device="cpu", budget_bytes=None, steps=1)
        summary = summarize(recorder.snapshot(), facts).to_json()
        log.conclude(summary)
    return path.read_bytes(), json.dumps(summary).encode()


def a_plan():
    return policies.get("all")(PROFILE, MACHINE, Budgets(1 << 30, 0, 1 << 40)).to_json().encode()


def a_device():
    import penstock.lab.ssd.devices

    return (Path(penstock.lab.ssd.devices.__path__[0]) / "optimstore.toml").read_bytes()


def jobs_of(path):
    load_jobs(path).check_places()


def requests_of(path, kind):
    for request in read_trace(path, 1 << 30, kind=kind):
        assert 0 <= request.offset_bytes <= request.offset_bytes + request.nbytes <= 1 << 30


JOBS = b'[machine]\nmemory = "1GiB"\n\n[[job]]\nname = "a"\nmodule = "json"\nmemory = 7\nenv = {A = ""}\n'
FIO = b"fio version 3 iolog\n1 f add\n2 f open\n3 f read 0 4096\n4 f write 8192 512\n5 f close\n"
BLK = b"  8,0 1 1 0.000000001 7 Q R 8 + 8 [fio]\n  8,0 1 2 0.1 7 Q W 16 + 8 [fio]\n"
MSR = (
    b"Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime\n128166372003,a,0,Read,0,4096,1\n"
)
READERS = {
    "machine.toml": (lambda: MACHINE.to_toml().encode(), Machine.load),
    "machine.json": (lambda: MACHINE.to_json().encode(), Machine.load),
    "profile.json": (lambda: PROFILE.to_json().encode(), read_profile),
    "plan.json": (a_plan, load_plan),
    "offload.toml": (
        lambda: b'[offload]\ndevice_memory = "1GiB"\nflash = ["."]\n',
        OffloadConfig.from_toml,
    ),
    "jobs.toml": (lambda: JOBS, jobs_of),
    "events.jsonl": (lambda: a_log()[0], read_run),
    "all-events.jsonl": (lambda: a_log()[0], read_events),
    "summary.json": (lambda: a_log()[1], read_run),
    "device.toml": (a_device, describe),
    "device.xml": (lambda: b"<A><B>1</B></A>", lambda path: parse_xml(path, "A")),
    "penstock.jsonl": (lambda: a_log()[0], lambda path: requests_of(path, TraceFormat.PENSTOCK)),
    "fio.log": (lambda: FIO, lambda path: requests_of(path, TraceFormat.FIO)),
    "blk.txt": (lambda: BLK, lambda path: requests_of(path, TraceFormat.BLKPARSE)),
    "msr.csv": (lambda: MSR, lambda path: requests_of(path, TraceFormat.MSR)),
    "mqsim.txt": (lambda: b"1 0 8 8 1\n9 0 64 8 0\n", lambda path: requests_of(path, None)),
    "disksim.txt": (lambda: b"0.5 0 8 8 1\n9.1 0 64 8 0\n", lambda path: requests_of(path, None)),
}


@pytest.fixture(scope="module")
def valid():
    """The bytes of a valid file, by its name."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = READERS[name][0]()
        return known[name]

    return of


@pytest.mark.parametrize("name", READERS)
def test_a_valid_file_is_read(name, valid, tmp_path):
    path = tmp_path / name
    path.write_bytes(valid(name))
    READERS[name][1](str(path))


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_refused(name, tmp_path):
    path, read = tmp_path / name, READERS[name][1]
    os.mkfifo(path)
    error = within_s(60, lambda: read(str(path)))
    assert isinstance(error, ConfigError)
    assert name in str(error)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="directory"):
        read(str(path))
    path.rmdir()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="it is a device"):
        read(str(path))


MAY_BE_TORN = ("penstock.jsonl", "mqsim.txt", "disksim.txt")
"""Traces whose last line may be that of a killed process, if they look like an event log."""
ENDLESS = {
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "toml": b"x = " + b"[" * 100_000,
    "digits": b"9" * 10_000,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", ENDLESS)
def test_what_is_nested_without_end_is_refused(name, text, tmp_path):
    path = tmp_path / name
    path.write_bytes(ENDLESS[text] + b"\n")
    with suppress(PenstockError) if name in MAY_BE_TORN else pytest.raises(PenstockError):
        READERS[name][1](str(path))


@st.composite
def edits(draw):
    """A function that changes some bytes."""
    at, cut = draw(st.floats(0, 1)), draw(st.integers(0, 12))
    words = [
        b"-1",
        b"1e999",
        b"[",
        b'"',
        b"null",
        b"{}",
        b"9" * 400,
        b"NaN",
        b"\xff",
        b"-0",
        b"true",
    ]
    put = draw(st.one_of(st.binary(max_size=4), st.sampled_from(words)))

    def edit(data):
        place = int(at * len(data))
        return data[:place] + put + data[place + cut :] if cut else data[:place] + put

    return edit


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=tries(150))
@given(edit=edits())
def test_damaged_files_give_a_clear_error_or_a_valid_result(name, valid, edit, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"damaged-{name}"
    path.write_bytes(edit(valid(name)))
    with suppress(PenstockError):
        READERS[name][1](str(path))


@settings(max_examples=tries(50))
@given(edit=edits())
def test_a_damaged_run_is_reported_or_refused_in_a_line(valid, edit, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "reported.jsonl"
    path.write_bytes(edit(valid("events.jsonl")))
    assert main(["report", str(path), "--json"]) in (0, 1, 2)


# -- jobs ----------------------------------------------------------------------------------------------

WRONG = (
    None,
    True,
    -1,
    0,
    1.5,
    "",
    "x",
    [],
    [1],
    [None],
    {},
    {"a": 1},
    {1: "a"},
    float("nan"),
    10**30,
    "a\0b",
)
MACHINE_KEYS = (
    *("memory", "flash", "flash_capacity", "device_memory", "slice", "patience", "grace", "asleep"),
    *("log", "enforce", "prefetch"),
)
JOB_KEYS = (
    *(
        "name",
        "script",
        "module",
        "args",
        "options",
        "memory",
        "device_memory",
        "weight",
        "priority",
    ),
    *("durable", "cwd", "env"),
)


def described(document):
    """What refuses it; "test" if it is a description."""
    try:
        Description.from_json(document, source="test")
    except ConfigError as error:
        return str(error)
    return "test"


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_jobs_of_wrong_types_are_refused(value):
    machine, job = {"memory": "1GiB"}, {"name": "a", "module": "m"}
    assert "test" in described(value)
    assert "test" in described({"machine": value, "job": [job]})
    assert "test" in described({"machine": machine, "job": value})
    assert "test" in described({"machine": machine, "job": [value]})
    for key in MACHINE_KEYS:
        assert "test" in described({"machine": {**machine, key: value}, "job": [job]})
    for key in JOB_KEYS:
        assert "test" in described({"machine": machine, "job": [{**job, key: value}]})
    for kind in (machine, job):
        assert "test" in described({"machine": machine, "job": [job], **{str(value): kind}})


def test_a_description_without_end_is_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested too deep"):
        Description.from_json({"machine": {"memory": deep}}, source="test")


def test_memory_of_the_machine_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="memory"):
        Description.from_json(
            {"machine": {"memory": None}, "job": [{"name": "a", "module": "m"}]}, source="test"
        )


# -- paths ----------------------------------------------------------------------------------------------


def a_set(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4)))
    return tmp_path / "a.npy"


STATE = {"x": torch.zeros(4)}
PATHS = {
    "offload flash": lambda bad, _: penstock.offload(flash=bad),
    "offload several": lambda bad, _: penstock.offload(flash=[".", bad]),
    "event_log": lambda bad, _: penstock.OffloadConfig(event_log=bad),
    "optimizer": lambda bad, _: StatesConfig(flash=bad),
    "tier": lambda bad, _: FlashTier(bad, capacity_bytes=1 << 20, engine=None, recorder=None),
    "save": lambda bad, _: checkpoint.save(bad, STATE),
    "base": lambda bad, there: checkpoint.save(there / "c", STATE, base=bad),
    "load": lambda bad, _: checkpoint.load(bad),
    "verify": lambda bad, _: checkpoint.verify(bad),
    "checkpointer": lambda bad, _: Checkpointer(bad),
    "data set": lambda bad, _: FlashDataset(bad),
    "data sets": lambda bad, _: FlashDataset([bad]),
    "index_dir": lambda bad, there: FlashDataset(a_set(there), index_dir=bad),
    "pack": lambda bad, there: pack(open_index(a_set(there)), bad),
    "client": lambda bad, _: Client(bad),
    "manager": lambda bad, _: StateDirectory(bad),
}


@pytest.mark.parametrize("bad", ["", "a\0b", "a\ud800"])
@pytest.mark.parametrize("where", PATHS)
def test_a_path_that_is_none_is_refused(where, bad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is an empty path" if not bad else "no path can have"):
        PATHS[where](bad, tmp_path)


COMMANDS = (
    ["run", "--flash", "", "--device-memory", "1MiB", "x.py"],
    ["run", "--event-log", "", "x.py"],
    ["run", "--trace", "", "x.py"],
    ["run", "--flash", ".", "--state", "", "x.py"],
    ["bench", "io", "--dir", ""],
    ["doctor", "--dir", ""],
    ["checkpoint", "list", ""],
    ["checkpoint", "info", ""],
    ["checkpoint", "verify", ""],
    ["data", "info", ""],
    ["jobs", "status", "--state", ""],
    ["characterize", "--out", ""],
)


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_command_refuses_an_empty_path(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    assert main(argv) == 2
    assert "empty path" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["x.py"]


# -- the one place -----------------------------------------------------------------------------------


def test_a_regular_file_is_opened_and_waits_as_ever(tmp_path):
    (tmp_path / "a").write_text("text")
    fd = open_regular(str(tmp_path / "a"))
    assert os.get_blocking(fd)
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert read_text(tmp_path / "a") == "text"


def test_errors_of_parsers_are_value_errors():
    for text in ("[" * 100_000, "{", "9" * 10_000, b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)
    for text in ("x = " + "[" * 100_000, "x", "x = " + "9" * 10_000):
        with pytest.raises(ValueError, match=r"."):
            parse_toml(text)
