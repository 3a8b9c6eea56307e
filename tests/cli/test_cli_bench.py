"""``penstock bench io``: what is moved, what is printed, what is saved. Not how fast."""

import itertools
import json
import os
import threading

import numpy as np
import pytest

from penstock import NoSpaceError, TransferError
from penstock.cli import bandwidth, main
from penstock.cli.bandwidth import Course
from penstock.core.errors import ConfigError
from penstock.core.units import KIB
from penstock.io import threads
from penstock.io.threads import ThreadEngine
from penstock.plan.machine import Machine

SMALL = ["--size", "32MiB", "--seconds", "0.01"]


@pytest.fixture
def course(disk_path):
    """Two files of four requests, with a buffer of two."""
    folders = [disk_path / "a", disk_path / "b"]
    for folder in folders:
        folder.mkdir()
    engine = ThreadEngine(2, 16 * KIB)
    sizes = {"request_bytes": 64 * KIB, "buffer_bytes": 128 * KIB}
    with Course(folders, 520 * KIB, engine, **sizes) as course:
        yield course


def test_files_take_turns_and_requests_stay_inside_them(course):
    assert course.file_bytes == 512 * KIB
    for kind in bandwidth.KINDS:
        requests = list(course.requests(kind, 512 * KIB, 384 * KIB))
        ranges = [(r.file.fd, r.offset_bytes, r.offset_bytes + r.nbytes) for r in requests]
        assert len(set(ranges)) == len(ranges)
        for file in course.files:
            of_file = sorted(each[1:] for each in ranges if each[0] == file.fd)
            assert of_file[0][0] == 0
            assert of_file[-1][1] == 256 * KIB == file.size_bytes
            assert all(a[1] == b[0] for a, b in itertools.pairwise(of_file))
        assert all(0 <= r.address - course.address <= 128 * KIB - r.nbytes for r in requests)
        ops = {r.op for r in requests}
        assert ops == {"read": {"read"}, "overwrite": {"write"}, "mixed": {"read", "write"}}[kind]
    assert {r.nbytes for r in course.requests("mixed", 512 * KIB, 0)} == {16 * KIB}


@pytest.mark.parametrize("side", ["engine_pass", "plain_pass"])
def test_both_sides_move_the_same_bytes(course, side):
    move = getattr(course, side)
    written = np.random.default_rng(1).integers(0, 256, 128 * KIB, dtype=np.uint8)
    course._memory[:] = written
    assert move(list(course.requests("overwrite", 128 * KIB, 128 * KIB))) > 0
    for file in course.files:
        course._memory[:] = 0
        (request,) = (r for r in course.requests("read", 128 * KIB, 128 * KIB) if r.file is file)
        move([request])
        at = request.address - course.address
        assert (course._memory[at : at + request.nbytes] == written[at : at + request.nbytes]).all()


def test_the_plain_side_tells_a_failure(course):
    requests = list(course.requests("read", 512 * KIB, 0))
    os.ftruncate(course.files[1].fd, 0)
    with pytest.raises(TransferError, match="plain pass"):
        course.plain_pass(requests)


def test_the_plain_side_uses_nothing_of_the_engine(course, monkeypatch):
    def refuse(*_):
        raise AssertionError("the limit goes through the engine")

    requests = list(course.requests("mixed", 512 * KIB, 0))
    monkeypatch.setattr(threads, "_move", refuse)
    assert course.plain_pass(requests) > 0


def plain_threads():
    return [
        each for each in threading.enumerate() if getattr(each, "_target", None) is bandwidth._work
    ]


def test_an_interrupt_while_plain_threads_start_leaves_none(course, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        thread.daemon = True  # else this test, where it fails, would not end
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        course.plain_pass(list(course.requests("read", 512 * KIB, 0)))
    assert not plain_threads()


def test_an_interrupt_while_plain_threads_work_ends_them(course, monkeypatch):
    join, enough, calls = threading.Thread.join, threading.Event(), []

    def call(fd, buffers, offset):
        calls.append(offset)
        enough.wait()
        return len(buffers[0])

    def interrupted(thread):
        monkeypatch.setattr(threading.Thread, "join", lambda each: (enough.set(), join(each)))
        raise KeyboardInterrupt

    pieces = [(call, 0, memoryview(b"1234"), index) for index in range(9)]
    monkeypatch.setattr(course, "_pieces", lambda requests: pieces)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            course.plain_pass([])
        assert not plain_threads()
        assert len(calls) <= course.engine.spec.workers
    finally:
        enough.set()


def test_sides_take_turns_in_changing_order(disk_path, monkeypatch):
    calls = []

    def counted(side, move):
        def count(self, requests):
            calls.append(side)
            return move(self, requests)

        return count

    for side in ("engine_pass", "plain_pass"):
        monkeypatch.setattr(Course, side, counted(side[0], getattr(Course, side)))
    shares = []
    measured = bandwidth.measure(
        [disk_path], file_bytes=16 << 20, seconds=0.001, threads=3, progress=shares.append
    )
    assert "".join(calls) == "e" + "epepep" + "pepepe" + "epepep"  # the first fills the file
    assert [rate.rounds for rate in measured.rates] == [3, 3, 3]
    assert (measured.threads, measured.pass_bytes, measured.file_bytes) == (3, 16 << 20, 16 << 20)
    assert measured.rate("mixed").kind == "mixed"
    assert 0 < measured.latency_s < 1
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_what_cannot_be_measured(disk_path):
    with pytest.raises(ConfigError, match=r"at least 16\.00 MiB"):
        bandwidth.measure([disk_path, disk_path], file_bytes=31 << 20)
    with pytest.raises(ConfigError, match="time to measure is"):
        bandwidth.measure([disk_path], seconds=float("nan"))
    with pytest.raises(NoSpaceError):
        bandwidth.measure([disk_path], file_bytes=1 << 55)
    with pytest.raises(TransferError, match="No such file"):
        bandwidth.measure([disk_path / "none"])
    assert list(disk_path.iterdir()) == []


def test_json_is_one_document_and_the_machine_is_saved(disk_path, capsys):
    saved = disk_path / "machine.json"
    argv = ["bench", "io", "--dir", str(disk_path), *SMALL, "--save", str(saved), "--json"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert not captured.err
    assert document["schema"] == 1
    rates = {rate["kind"]: rate for rate in document["rates"]}
    assert list(rates) == ["read", "overwrite", "mixed"]
    assert all(rate["ratio"] > 0 for rate in rates.values())
    machine = Machine.load(saved)
    assert machine.flash_read_bytes_per_s == rates["read"]["engine_bytes_per_s"]
    assert machine.flash_write_bytes_per_s == rates["overwrite"]["engine_bytes_per_s"]
    assert machine.flash_latency_s == document["latency_s"]
    assert machine.host_read_bytes_per_s > 0
    assert list(disk_path.iterdir()) == [saved]


def test_the_table_names_both_sides_and_their_ratio(disk_path, capsys):
    assert main(["bench", "io", "--dir", str(disk_path), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "plain calls penstock" in " ".join(out.split())  # columns are as wide as what is in them
    for word in ("read", "overwrite", "mixed", " x\n", "6 threads"):
        assert word in out
