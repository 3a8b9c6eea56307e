"""The rank of a process, and the names of its files."""

import pytest

from penstock.core.ranks import path_of_rank, rank


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
