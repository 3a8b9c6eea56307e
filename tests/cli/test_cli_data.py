"""``penstock data``: info, verify, pack and bench, for people and as JSON, and what is refused."""

import json
import os

import numpy as np
import pytest

from penstock.cli import main


@pytest.fixture(autouse=True)
def here(disk_path, monkeypatch):
    monkeypatch.chdir(disk_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(disk_path / "indexes"))
    array = np.random.default_rng(0).integers(0, 256, (300, 1000), np.uint8)
    np.save(disk_path / "a.npy", array)
    np.arange(1000, dtype="<u2").tofile(disk_path / "t.bin")


def run(capsys, *argv, code=0):
    assert main(["data", *argv]) == code
    return capsys.readouterr().out


def document(capsys, *argv, code=0):
    return json.loads(run(capsys, *argv, "--json", code=code))


def test_info(capsys):
    facts = document(capsys, "info", "a.npy")
    assert (facts["format"], facts["samples"], facts["data_bytes"]) == ("npy", 300, 300_000)
    assert facts["index_built"]
    assert os.path.exists(facts["index_path"])
    assert not document(capsys, "info", "a.npy")["index_built"]
    text = run(capsys, "info", "t.bin", "--format", "tokens", "--option", "context=99")
    assert "tokens" in text


def test_pack_and_verify(capsys):
    written = document(capsys, "pack", "a.npy", "a.pstk", "--align", "512")
    assert (written["records"], written["align_bytes"]) == (300, 512)
    assert "300 records" in run(capsys, "pack", "a.npy", "b.pstk")
    verdict = document(capsys, "verify", "a.pstk", "--decode")
    assert (verdict["samples"], verdict["bad"], verdict["checksums"]) == (300, 0, True)
    facts = os.stat("a.pstk")
    with open("a.pstk", "r+b") as file:
        file.seek(4096 + 512 * 2 * 7)
        file.write(b"\x00\x01\x02\x03\x04\x05")
    os.utime("a.pstk", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    text = run(capsys, "verify", "a.pstk", code=1)
    assert "1 bad" in text
    assert "sample 7 of" in text
    verdict = document(capsys, "verify", "a.npy")
    assert not verdict["checksums"]


def test_bench(capsys):
    argv = ("bench", "a.npy", "--seconds", "0.05", "--memory", "256KiB", "--batch", "4")
    found = document(capsys, *argv)
    assert [each["order"] for each in found["orders"]] == ["sequential", "window", "full"]
    for each in found["orders"]:
        assert each["samples_per_s"] > 0
        assert each["device_bytes_per_s"] > 0
        assert each["held_bytes"] <= 256 << 10
    told = run(capsys, *argv, "--decode")
    assert all(each in told for each in ("sequential", "full", " held"))


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["info", "missing"], 1, "is missing"),
        (["info", "t.bin"], 2, "needs the option context="),
        (["info", "t.bin", "--option", "context"], 2, "has no value"),
        (["info", "a.npy", "--format", "csv"], 2, "none of packed"),
        (["pack", "a.npy", "a.txt"], 2, "must end in .pstk"),
        (["pack", "a.npy", "a.pstk", "--align", "100"], 2, "no power of two"),
        (["bench", "a.npy", "--seconds", "0"], 2, "more than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(argv, code, says, capsys):
    assert main(["data", *argv]) == code
    assert says in capsys.readouterr().err
