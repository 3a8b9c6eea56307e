"""``penstock ssd``: what is told, and what is refused."""

import json
import random
import signal
from xml.etree import ElementTree

import pytest

from penstock.cli import main
from penstock.lab.cli import ssd_sweep
from penstock.lab.cli.ssd_pace import Pace
from penstock.observe.clock import ManualClock

UPDATE = ["ssd", "weight-update", "--device", "optimstore", "--parameters", "6.7e9"]


def output(argv, capsys):
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(argv, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_a_weight_update_is_told_for_people(capsys):
    told = output([*UPDATE, "--optimizer", "adam", "--placement", "host,controller,die"], capsys)
    assert "38.95 s" in told
    assert "2.81 x" in told
    for word in ("movement", "ssd", "system", "80.4 GB", "retention credit"):
        assert word in told


def test_and_as_json(capsys):
    one = json.loads(output([*UPDATE, "--placement", "host,die", "--json"], capsys))
    host, die = one["placements"]
    assert one["device"]["geometry"]["channels"] == 8
    assert one["update"]["state_bytes"] == [4, 4, 4]
    assert host["speedup"] == 1
    assert die["speedup"] == pytest.approx(host["time_s"] / die["time_s"])
    for boundary in ("movement", "ssd", "system"):
        energy = die["energy_j"][boundary]
        assert energy["total"] == pytest.approx(sum(energy["components"].values()))
    assert die["wear"]["written_bytes"] == 12 * 6_700_000_000


@pytest.mark.parametrize("engine", ["timeline", "events"])
def test_an_engine_tells_the_same_within_3_per_cent(engine, capsys):
    small = ["ssd", "weight-update", "--device", "optimstore", "--parameters", "3e7", "--json"]
    formula = json.loads(output(small, capsys))
    one = json.loads(output([*small, "--engine", engine], capsys))
    assert one["engine"] == engine
    for mine, its in zip(one["placements"], formula["placements"], strict=True):
        assert mine["time_s"] == pytest.approx(its["time_s"], rel=0.03)


def test_fields_of_the_device_are_set(capsys):
    faster = [*UPDATE, "--placement", "die", "--json", "--set", "geometry.chips_per_channel=8"]
    (before,) = json.loads(output([*UPDATE, "--placement", "die", "--json"], capsys))["placements"]
    (after,) = json.loads(output(faster, capsys))["placements"]
    assert before["time_s"] / after["time_s"] == pytest.approx(2)


def test_a_weight_update_is_drawn(tmp_path, capsys):
    path = tmp_path / "update.svg"
    output([*UPDATE, "--placement", "host,controller,die,split", "--plot", str(path)], capsys)
    assert len(list(ElementTree.parse(path).iter())) > 200


def test_states_that_do_not_fit_are_told(capsys):
    large = ["ssd", "weight-update", "--device", "optimstore", "--parameters", "1e12"]
    assert "The drive is too small: these states take" in output(large, capsys)
    assert json.loads(output([*large, "--json"], capsys))["room"]["fits"] is False
    swept = [*SWEEP, "--field", "geometry.blocks_per_plane=16,2048", "--placement", "host"]
    assert "2 devices, of which 1 are too small" in output(swept, capsys)
    fits = [
        point["room"]["fits"] for point in json.loads(output([*swept, "--json"], capsys))["points"]
    ]
    assert fits == [False, True]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--placement", "host,dye"], "did you mean 'die'"),
        (["--placement", "die,die"], "name each placement once"),
        (["--optimizer", "adma"], "did you mean 'adam'"),
        (["--parameters", "many"], "not a number"),
        (["--parameters", "1.5"], "a whole number"),
        (["--parameters", "0"], "1 or more"),
        (["--device", "optimstor"], "did you mean 'optimstore'"),
        (["--set", "geometry.channels"], "has no value"),
        (["--set", "geometry.chanels=2"], "did you mean 'geometry.channels'"),
        (["--set", "geometry.channels=0"], "geometry.channels is 0"),
        (["--state-bytes", "4,x,2"], "not whole numbers"),
        (["--plot", "/nowhere/a.svg"], "cannot be written"),
        (["--plot", "a.nonsense"], "does not end with .svg"),
    ],
)
def test_what_makes_no_sense_is_refused(more, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in refusal([*UPDATE, *more], capsys)


RUN = ["ssd", "run", "mqsim-default"]


def test_a_run_is_told_for_people(capsys):
    told = output([*RUN, "randrw", "--requests", "200", "--queue-depth", "4"], capsys)
    for word in ("200 in", "latency of reads", "p99", "write amplification", "energy of the drive"):
        assert word in told


def test_a_run_as_json(capsys):
    more = ["--requests", "1e2", "--request-size", "8KiB", "--json"]
    one = json.loads(output([*RUN, "randread", *more], capsys))
    assert one["requests"] == 100
    assert one["latency_us"]["read"]["mean"] == pytest.approx(102.4, rel=0.01)
    assert "write" not in one["latency_us"]
    assert one["energy_j"]["total"] == pytest.approx(sum(one["energy_j"]["components"].values()))


def test_a_count_is_one_that_can_be_counted(capsys):
    for text in ("1e308", "1e16", "9007199254740993", "0", "1.5", "nan", "inf"):
        assert "--requests is" in refusal([*RUN, "randread", "--requests", text], capsys)
        assert "--parameters is" in refusal([*UPDATE[:-1], text], capsys)
    assert output([*UPDATE[:-1], str(2**53)], capsys)


def test_a_run_ends_after_some_time_with_what_was_done(capsys, tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("".join(f"{i} 0 {8 * i} 8 1\n" for i in range(100)))
    for workload in (["randread", "--requests", "1e15"], [str(trace)]):
        assert main([*RUN, *workload, "--stop-after", "1e-9", "--json"]) == 0
        captured = capsys.readouterr()
        one = json.loads(captured.out)
        assert one["stopped"] == "its time is up"
        assert 0 < one["requests"] < 100
        assert f"the first {one['requests']} requests" in captured.err
    whole = json.loads(output([*RUN, str(trace), "--json"], capsys))
    assert (whole["requests"], whole["stopped"]) == (100, None)
    part = json.loads(output([*RUN, str(trace), "--requests", "7", "--json"], capsys))
    assert (part["requests"], part["stopped"]) == (7, None)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_that_makes_no_sense(seconds, capsys):
    assert "--stop-after is" in refusal([*RUN, "randread", f"--stop-after={seconds}"], capsys)


def test_a_run_that_is_interrupted_tells_what_was_done(capsys, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    asked = 0
    next_place = random.Random.random

    def press_ctrl_c(self):
        nonlocal asked
        asked += 1
        if asked == 500:
            signal.raise_signal(signal.SIGINT)
        return next_place(self)

    class Pressed(random.Random):
        random = press_ctrl_c

    try:
        monkeypatch.setattr("penstock.lab.ssd.requests.random.Random", Pressed)
        assert main([*RUN, "randread", "--requests", "1e15", "--json"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    captured = capsys.readouterr()
    one = json.loads(captured.out)
    assert one["stopped"] == "interrupted"
    assert 0 < one["requests"] <= 500
    assert "interrupted: this is what the first" in captured.err


def test_how_far_it_is(monkeypatch):
    clock, told = ManualClock(), []
    pace = Pace(1000, None, clock=clock)
    pace.tell = told.append
    for _ in pace.of(iter(range(200))):
        clock.advance(10**7)
    assert told[0] == "32 requests, 3.2%"
    assert len(told) == 6  # of 12 looks: not more often than five times a second


def test_a_run_is_drawn_over_time(tmp_path, capsys):
    path = tmp_path / "run.svg"
    more = ["--requests", "300", "--queue-depth", "16", "--power-cap", "12", "--plot", str(path)]
    output([*RUN, "randrw", *more], capsys)
    assert len(list(ElementTree.parse(path).iter())) > 100
    assert "leaves nothing for flash" in refusal([*RUN, "randrw", "--power-cap", "1"], capsys)


def test_a_run_tells_of_its_cache_and_its_map(capsys):
    settings = ["--set", "cache.capacity_bytes=65536", "--set", "ftl.map_cache_bytes=64"]
    load = ["randrw", "--requests", "300", "--request-size", "8KiB", "--filled", "0.00001"]
    more = [*load, "--working-set", "0.00001", "--hot", "0.9,0.1", "--flush-every", "10", *settings]
    one = json.loads(output([*RUN, *more, "--json"], capsys))
    assert one["cache"]["write_hits"] > 0
    assert one["map"]["reads"] > 100
    assert one["power_loss"]["flush_s"] > 0
    told = output([*RUN, *more], capsys)
    for word in ("found in memory", "write cache", "at a loss of power"):
        assert word in told
    plain = json.loads(output([*RUN, "randread", "--requests", "10", "--json"], capsys))
    assert (plain["cache"], plain["map"], plain["power_loss"]) == (None, None, None)


def test_a_machine_is_drawn(tmp_path, capsys):
    path = tmp_path / "machine.svg"
    output(["ssd", "machine", "mqsim-default", "--plot", str(path)], capsys)
    assert len(list(ElementTree.parse(path).iter())) > 100


def test_a_trace_is_run(tmp_path, capsys):
    path = tmp_path / "a.trace"
    path.write_text("0 0 0 16 1\n1000000 0 16 16 0\n")
    one = json.loads(output([*RUN, str(path), "--json"], capsys))
    assert (one["reads"], one["writes"]) == (1, 1)
    assert "has times" in refusal([*RUN, str(path), "--queue-depth", "4"], capsys)
    path.write_text("0 0 0 16 1\nnonsense\n")
    assert "line 2: expected" in refusal([*RUN, str(path)], capsys)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*RUN, "randreed"], "did you mean 'randread'"),
        ([*RUN, "randread", "--read-share", "0.5"], "is for randrw"),
        (
            [*RUN, "read", "--hot", "0.9,0.1"],
            "--hot is for randread, randwrite, randrw, not for read",
        ),
        ([*RUN, "randread", "--start", "4KiB"], "--start is for read, write, not for randread"),
        (
            [*RUN, "read", "--flush-every", "10"],
            "--flush-every is for randwrite, randrw, write, not for read",
        ),
        ([*RUN, "randread", "--format", "msr"], "--format is for a trace, not for randread"),
        ([*RUN, __file__, "--request-size", "4KiB"], "--request-size is for randread"),
        ([*RUN, "randread", "--request-size", "100"], "use a multiple of 512"),
        ([*RUN, "randread", "--request-size", "0B"], "it must be 512 or more"),
        ([*RUN, "randread", "--requests", "0"], "1 or more"),
        ([*RUN, "randread", "--hot", "0.9"], "not two shares"),
        ([*RUN, "randread", "--hot", "2,0.1"], "hot_share is 2"),
        ([*RUN, "randread", "--working-set", "0"], "must be a share above 0 and up to 1"),
        ([*RUN, "randwrite", "--flush-every", "-1"], "flush_every is -1"),
        (["ssd", "run", "mqsim-defolt", "randread"], "did you mean 'mqsim-default'"),
    ],
)
def test_runs_that_make_no_sense_are_refused(argv, says, capsys):
    assert says in refusal(argv, capsys)


SWEEP = ["ssd", "sweep", "--device", "optimstore", "--parameters", "6.7e9"]


def test_a_sweep_makes_every_combination(capsys, tmp_path):
    path = tmp_path / "sweep.svg"
    fields = ["--field", "geometry.channels=4,8", "--field", "cell.program_ns=[100000],[400000]"]
    argv = [*SWEEP, *fields, "--placement", "host,die", "--plot", str(path)]
    one = json.loads(output([*argv, "--json"], capsys))
    made = [tuple(point["fields"].values()) for point in one["points"]]
    assert made == [(4, [100000]), (4, [400000]), (8, [100000]), (8, [400000])]
    times = [point["placements"][1]["time_s"] for point in one["points"]]
    assert times[2] == pytest.approx(times[0] / 2)
    assert times[2] == pytest.approx(13.849, abs=0.001)
    assert times[3] > times[2]
    assert len(list(ElementTree.parse(path).iter())) > 100
    told = output(argv, capsys)
    assert "4 devices" in told
    assert "gain, die" in told


def test_a_sweep_over_words_and_an_engine(capsys):
    argv = [
        *SWEEP,
        "--field",
        "ftl.victim=greedy,fifo",
        "--engine",
        "timeline",
        "--placement",
        "die",
    ]
    assert "2 devices" in output(argv, capsys)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("geometry.channels", "has no values"),
        ("geometry.chanels=1,2", "did you mean 'geometry.channels'"),
        ("geometry.channels=1,0", "geometry.channels is 0"),
        ("geometry.channels=" + ",".join(["1"] * 100_001), "at most 100000"),
    ],
)
def test_sweeps_that_make_no_sense_are_refused(field, says, capsys):
    assert says in refusal([*SWEEP, "--field", field], capsys)


@pytest.mark.parametrize(
    ("plot", "says"),
    [
        ("many.svg", "18 lines are too many"),
        ("x.gif", "does not end with .svg"),
        ("no/x.svg", "cannot be written"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_any_work(
    plot, says, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ssd_sweep, "simulate", None)
    fields = ["--field", "geometry.channels=4,8", "--field", "unit.divider=1,2,3,4,5,6"]
    assert says in refusal([*SWEEP, *fields, "--plot", plot], capsys)


def test_a_field_is_swept_once(capsys):
    twice = ["--field", "unit.divider=1,2", "--field", "unit.divider=4"]
    assert "unit.divider more than once" in refusal([*SWEEP, *twice], capsys)


def test_each_value_of_a_field_is_swept_once(capsys):
    assert "has 2 more than once" in refusal([*SWEEP, "--field", "unit.divider=2,4,2"], capsys)
