"""The rank of a process, and the names of its files."""

import pytest
import torch

from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError, SizeError
from penstock.core.ranks import local_rank, own_of, path_of_rank, rank
from penstock.core.units import MIB, parse_bandwidth, parse_bytes
from penstock.optim import FlashAdamW, StatesConfig


@pytest.fixture
def second_of_four(monkeypatch):
    """This process is rank 5 of 8, and the second of four on its machine."""
    numbers = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    for name, number in numbers.items():
        monkeypatch.setenv(name, str(number))


@pytest.mark.parametrize(
    ("number", "size", "expected"),
    [
        ("0", "2", 0),
        ("11", "16", 11),
        ("0", "1", None),
        (None, "2", None),
        ("1", None, None),
        ("2", "2", None),
        *((bad, "2", None) for bad in ("", "-1", "one", "1.0", "²", "9" * 5000)),
        *(("0", bad, None) for bad in ("", "-2", "two", "²")),
    ],
)
def test_the_rank_is_what_a_launcher_says(monkeypatch, number, size, expected):
    for name, text in (("RANK", number), ("WORLD_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, text)
    assert rank() == expected
    assert path_of_rank("log.jsonl") == (
        "log.jsonl" if expected is None else f"log.rank{rank()}.jsonl"
    )


def test_the_rank_stands_before_the_suffix(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for path, expected in {
        "log.jsonl": "log.rank1.jsonl",
        "/a.b/trace.json.gz": "/a.b/trace.rank1.json.gz",
        "kept": "kept.rank1",
        "/runs.d/kept": "/runs.d/kept.rank1",
        ".kept": ".kept.rank1",
        "x.gz": "x.rank1.gz",
    }.items():
        assert path_of_rank(path) == expected
    assert path_of_rank(tmp_path / "log.jsonl") == str(tmp_path / "log.rank1.jsonl")


def test_the_local_rank_is_what_a_launcher_says(second_of_four, monkeypatch):
    assert local_rank() == 1
    for bad in ("", "-1", "one", "²", "9" * 5000):
        monkeypatch.setenv("LOCAL_RANK", bad)
        assert local_rank() is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert local_rank() is None


@pytest.mark.parametrize(
    ("places", "ranks", "expected"),
    [
        ("ab", 2, ["a", "b"]),
        ("a", 3, ["a", "a", "a"]),
        ("ab", 4, ["a", "b", "a", "b"]),
        ("abc", 4, ["a", "b", "c", "a"]),
        ("abcd", 2, ["ac", "bd"]),
        ("abc", 2, ["ac", "b"]),
    ],
)
def test_places_are_dealt_out_to_local_ranks(places, ranks, expected):
    places = tuple(places)
    assert ["".join(own_of(places, local, ranks)) for local in range(ranks)] == expected
    assert own_of(places, None, ranks) == places


def test_with_an_unknown_number_of_local_ranks_each_has_one_place():
    assert [own_of(("a", "b"), local, 1) for local in (1, 2, 3)] == [("b",), ("a",), ("b",)]


def test_each_rank_has_its_own_directories_of_a_configuration(second_of_four, monkeypatch):
    given = {"flash": ("/nvme0", "/nvme1", "/nvme2"), "memory": "8GiB/node"}
    assert OffloadConfig(**given).directories == ("/nvme0", "/nvme1", "/nvme2")
    config = OffloadConfig(**given, flash_by_rank=True)
    assert config.directories == ("/nvme1",)
    assert config.memory == 2048 * MIB
    with pytest.raises(ConfigError, match="flash_by_rank is set, but no flash directory is named"):
        OffloadConfig(host_memory="1GiB", flash_by_rank=True)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="LOCAL_RANK is not in the environment"):
        OffloadConfig(**given, flash_by_rank=True)
    monkeypatch.delenv("RANK")
    assert OffloadConfig(**given, flash_by_rank=True).directories == given["flash"]


def test_states_of_each_rank_are_in_its_own_directories(second_of_four, monkeypatch):
    places = {"flash": ("/nvme0", "/nvme1", "/nvme2")}
    assert StatesConfig(**places).directories == places["flash"]
    assert StatesConfig(**places, flash_by_rank=True).directories == ("/nvme1",)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="LOCAL_RANK is not in the environment"):
        FlashAdamW([torch.ones(5)], flash_by_rank=True, **places)


def test_a_size_per_node_is_divided_by_the_processes_there(second_of_four, monkeypatch):
    assert parse_bytes("64MiB/node") == 16 * MIB
    assert parse_bytes(" 1.5 GiB/node ") == 384 * MIB
    assert OffloadConfig(device_memory="64MiB/node", flash="/nvme").device_bytes == 16 * MIB
    for bad in ("64/node", "64MiB/nodes", "64MiB/node/node", "/node", "MiB/node"):
        with pytest.raises(SizeError):
            parse_bytes(bad)
    for bad in ("1GB/node/s", "1GB/s/node"):
        with pytest.raises(SizeError, match="is not a bandwidth"):
            parse_bandwidth(bad)
    monkeypatch.delenv("RANK")
    assert parse_bytes("64MiB/node") == 64 * MIB
