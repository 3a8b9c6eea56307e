"""What is no tensor: kept exactly, or refused with what to do."""

import argparse
import dataclasses
import datetime
import decimal
import enum
import json
import random
from collections import UserDict, deque, namedtuple
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
import torch
from checkpoint_runs import small_store

from penstock import CheckpointError

STORE = small_store()
SCHEMA = Path(__file__).parents[2] / "docs" / "checkpoint-manifest.schema.json"


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Progress:
    step: int = 0


Pair = namedtuple("Pair", "a b")


class Attributes(dict):
    pass


class Text(str):
    pass


OTHERS = {
    "a set": {"b", 3, None, True, (1, "x"), b"\0", 2.5},
    "an empty set": set(),
    "a frozen set": frozenset({1, frozenset({2})}),
    "a set of paths": {Path("/data/a"), Path("b")},
    "a complex number": complex(1.5, float("-inf")),
    "zeros with signs": complex(-0.0, 0.0),
    "a path": Path("runs") / "\u00fc b" / "..",
    "a dictionary of them": {Path("a"): 1, frozenset({1}): 2, 1j: 3},
}
TAGGED = {
    "large": -(2**200),
    "nan": float("nan"),
    "bytes": b"\xff",
    "empty tuple": (),
    "keys": {(1, None): 2, 1.5: 3, True: 4},
    "a dollar": {"$set": [1]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_sets_numbers_and_paths_come_back(disk_path, name):
    value = OTHERS[name]
    STORE.save(disk_path / "a", {"value": [value], "weight": torch.ones(3)})
    document = json.loads((disk_path / "a/manifest.json").read_text())
    assert document["penstock_checkpoint"] == 3
    pytest.importorskip("jsonschema").validate(document, json.loads(SCHEMA.read_text()))
    loaded = STORE.load(disk_path / "a")["value"][0]
    assert type(loaded) is type(value)
    assert loaded == value
    if not isinstance(value, set | frozenset | dict):
        assert repr(loaded) == repr(value)
    into = {"value": [None], "weight": torch.zeros(3)}
    assert STORE.load(disk_path / "a", into)["value"] == [value]


@pytest.mark.parametrize("name", TAGGED)
def test_what_json_has_no_form_for_comes_back(disk_path, name):
    STORE.save(disk_path / "a", {"value": TAGGED[name]})
    assert repr(STORE.load(disk_path / "a")["value"]) == repr(TAGGED[name])


def test_a_set_is_saved_in_one_order_and_loaded_in_place(disk_path):
    for name, words in (("a", "cab"), ("b", "bca")):
        STORE.save(disk_path / name, {"seen": set(words)})
    states = [json.loads((disk_path / n / "manifest.json").read_text())["state"] for n in "ab"]
    assert states[0] == states[1] == {"seen": {"$set": ["a", "b", "c"]}}
    seen = {"x"}
    STORE.load(disk_path / "a", {"seen": seen})
    assert seen == set("abc")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Mode.FAST, "give its .value, and make it anew"),
        (Level.HIGH, "give its .value"),
        (Progress(), "give dataclasses.asdict(it)"),
        (Pair(1, 2), "give it._asdict()"),
        (Attributes(a=1), "give dict(it)"),
        (UserDict(a=1), "give dict(it)"),
        (Text("a"), "give str(it)"),
        (deque([1]), "give list(it)"),
        (argparse.Namespace(a=1), "give vars(it)"),
        (datetime.datetime(2026, 1, 1), "give its isoformat()"),
        (datetime.timedelta(1), "give its total_seconds()"),
        (decimal.Decimal("0.1"), "give str(it)"),
        (PurePosixPath("a"), "give str(it)"),
        (PureWindowsPath("a"), "give str(it)"),
        (range(3), "give its start, stop and step"),
        (slice(3), "give its start, stop and step"),
        (bytearray(b"a"), "give bytes(it)"),
        ({1: 2}.keys(), "give set(it)"),
        (np.datetime64("2026-01-01"), "give str(it)"),
        (torch.Generator(), "give its get_state(), and set_state() after the load"),
        (np.random.default_rng(0), "give its bit_generator.state"),
        (random.Random(0), "give its getstate()"),
        (print, "leave it out: code is no state"),
        (Progress, "leave it out: code is no state"),
        (object(), "give its state_dict(), convert it, or leave it out"),
    ],
)
def test_what_has_no_form_is_refused_with_what_to_do(disk_path, value, advice):
    with pytest.raises(CheckpointError) as refused:
        STORE.save(disk_path / "a", {"trainer": {"odd": value}})
    assert str(refused.value).startswith("trainer.odd: ")
    assert advice in str(refused.value)
    assert not any(disk_path.iterdir())


def test_the_advice_on_generators_is_right(disk_path):
    ours = [torch.Generator().manual_seed(3), np.random.default_rng(3), np.random.RandomState(3)]
    theirs = [torch.Generator(), np.random.default_rng(), np.random.RandomState()]
    state = [ours[0].get_state(), ours[1].bit_generator.state, list(ours[2].get_state())]
    STORE.save(disk_path / "a", {"generators": state})
    loaded = STORE.load(disk_path / "a")["generators"]
    theirs[0].set_state(loaded[0])
    theirs[1].bit_generator.state = loaded[1]
    theirs[2].set_state(loaded[2])
    draws = [
        (torch.rand(3, generator=each[0]).tolist(), each[1].random(), each[2].random())
        for each in (ours, theirs)
    ]
    assert draws[0] == draws[1]
