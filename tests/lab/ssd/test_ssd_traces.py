"""Traces: what each format says, and how a bad line is reported."""

import json

import pytest

from penstock.core.errors import ConfigError
from penstock.lab.ssd.traces import TraceFormat, guess, read_trace

BLKPARSE = """\
  8,0    1        1     0.000000000  1234  Q   R 1000 + 8 [fio]
  8,0    1        2     0.000001000  1234  G   R 1000 + 8 [fio]
  8,0    1        3     0.000250000  1234  Q  WS 2000 + 16 [fio]
  8,0    1        4     0.000260000  1234  Q  DS 2000 + 16 [fio]
  8,0    1        5     0.000270000  1234  Q  FN [fio]
CPU1 (sda):
 Reads Queued:           1,        4KiB
"""
GOOD = {
    "mqsim": ("5000 0 1000 8 1\n255000 0 2000 16 0\n", [0, 250_000_000]),
    "disksim": ("0.5 0 1000 8 1\n0.75 0 2000 16 0\n", [0, 250_000_000]),
    "fio": (
        "fio version 3 iolog\n1 /f add\n2 /f open\n10 /f read 512000 4096\n"
        "260 /f write 1024000 8192\n300 /f close\n",
        [0, 250_000_000],
    ),
    "blkparse": (BLKPARSE, [0, 250_000_000]),
    "msr": (
        "128166372003061629,usr,0,Read,512000,4096,41286\n"
        "128166372003064129,usr,0,Write,1024000,8192,1963\n",
        [0, 250_000_000],
    ),
}
SIZE = 1 << 30


def requests(tmp_path, text, size=SIZE, **more):
    path = tmp_path / "trace"
    path.write_text(text)
    return [
        (one.arrival_ps, one.is_read, one.offset_bytes, one.nbytes)
        for one in read_trace(path, size, **more)
    ]


@pytest.mark.parametrize("name", GOOD)
def test_each_format_says_the_same(name, tmp_path):
    text, (first, second) = GOOD[name]
    assert guess(text.splitlines()[0]) == name
    expected = [(first, True, 512_000, 4096), (second, False, 1_024_000, 8192)]
    assert requests(tmp_path, text) == expected
    assert requests(tmp_path, text, kind=TraceFormat(name)) == expected


def test_fio_2_has_no_times_until_it_waits(tmp_path):
    text = "fio version 2 iolog\n/f add\n/f read 0 4096\n/f wait 100\n/f write 4096 4096\n/f sync 0 0\n"
    assert requests(tmp_path, text) == [(None, True, 0, 4096), (0, False, 4096, 4096)]


def test_addresses_beyond_the_end_are_folded(tmp_path):
    ((_, _, offset, nbytes),) = requests(tmp_path, "0 0 1000 8 1\n", size=100_000)
    assert offset + nbytes <= 100_000
    with pytest.raises(ConfigError, match="larger than the drive"):
        requests(tmp_path, "0 0 1000 8 1\n", size=1000)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("0 0 8 8 1\n0 0 8 8\n", 2, "arrival_ns device sector sectors type"),
        ("0 0 8 8 1\n\n0 0 8 8 2\n", 3, "arrival_ns device sector sectors type"),
        ("0 0 8 0 1\n", 1, "arrival_ns"),
        ("0.5 0 8 8 1\nx 0 8 8 1\n", 2, "arrival_ms device block blocks flags"),
        ("fio version 2 iolog\n/f frobnicate 0 1\n", 2, "file read|write offset bytes"),
        ("fio version 9 iolog\n", 1, "fio version 2 iolog"),
        ("fio version 2 iolog\n/f read 0 0\n", 2, "read|write"),
        (BLKPARSE.splitlines()[0] + "\n  8,0 1 2 0.1 9 Q R x + 8 [a]\n", 2, "major,minor cpu"),
        (BLKPARSE.splitlines()[0] + "\n  8,0 1 2\n", 2, "major,minor cpu"),
        ("1,usr,0,Read,0,4096,1\n1,usr,0,Reed,0,4096,1\n", 2, "Timestamp,Hostname"),
        ("1,usr,0,Read,0,-1,1\n", 1, "Timestamp,Hostname"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_what_was_expected(text, line, expected, tmp_path):
    with pytest.raises(ConfigError) as refused:
        requests(tmp_path, text)
    assert f"trace, line {line}: expected" in str(refused.value)
    assert expected in str(refused.value)


def test_no_trace(tmp_path):
    with pytest.raises(ConfigError, match="is empty"):
        requests(tmp_path, "\n")
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_trace(tmp_path / "none", SIZE))


def span(t_ns, stage, slot, nbytes, tier="flash"):
    fields = {"t_ns": t_ns, "dur_ns": 5, "nbytes": nbytes, "tier": tier, "slot": slot, "cause": ""}
    return json.dumps({"kind": "span", "stage": stage, **fields}) + "\n"


LOG = "".join(
    [
        '{"kind":"header","schema":1,"t_ns":0,"unix_ns":0,"pid":1}\n',
        span(3000, "write", "b", 300_000),  # ended first, began second
        span(1000, "write", "a", 5000),
        span(2000, "write", "a", 4000, tier="host"),
        '{"kind":"level","t_ns":4000,"memory":"device","nbytes":1}\n',
        span(5000, "read", "b", 300_000),
        span(6000, "write", "a", 6000),
        span(7000, "read", "a", 6000),
        '{"kind":"end"}\n',
    ]
)


def test_penstocks_own_log_in_the_order_in_which_spans_began(tmp_path):
    assert guess(LOG.splitlines()[0]) is TraceFormat.PENSTOCK
    told = requests(tmp_path, LOG)
    assert [(when // 1_000_000, is_read) for when, is_read, *_ in told] == [
        *[(0, False), *[(2, False)] * 3, *[(4, True)] * 3, (5, False), (6, True)],
    ]
    places = [(offset, nbytes) for *_, offset, nbytes in told]
    assert places[0] == (0, 5120)
    # what is longer than a drive takes at once is several requests, read where it was written
    assert [nbytes for _, nbytes in places[1:4]] == [131_072, 131_072, 38_400 - 512]
    assert places[1:4] == places[4:7]
    assert places[7] == places[8] == (0, 6144)  # it still fits


def test_a_log_that_was_rotated_is_one_trace(tmp_path):
    whole = requests(tmp_path, LOG)
    header, *lines = LOG.splitlines(keepends=True)
    for number, name in enumerate(("trace.1", "trace")):
        first = json.dumps(
            {**json.loads(header), "t_ns": 0, "unix_ns": 0, "pid": 1, "file": number}
        )
        part = lines[4:] if number else lines[:4]
        text = "".join([first, "\n", *part])
        (tmp_path / name).write_text(text)
    assert requests(tmp_path, text) == whole


def test_a_log_that_was_killed_has_a_torn_end_and_no_other_bad_line(tmp_path):
    whole = requests(tmp_path, LOG)
    assert requests(tmp_path, LOG + '{"kind":"sp') == whole
    bad = LOG.replace('{"kind":"level"', '{"kind"')
    with pytest.raises(ConfigError, match="line 5: expected a line of an event log"):
        requests(tmp_path, bad)
