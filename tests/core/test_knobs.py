"""Environment variables: documented defaults, read at the time of use, checked."""

import os
import re
from pathlib import Path

import pytest

import penstock
from penstock.core import knobs
from penstock.core.errors import ConfigError
from penstock.core.units import parse_bytes

NAMES = knobs.KNOBS
SIZES = [name for name in NAMES if re.search("PIECE|SLAB|STRIPE|FLOOR|MEMORY", name)]
COUNTS = [name for name in NAMES if re.search("THREADS", name)]
SWITCHES = [name for name in NAMES if re.search("BUFFERED", name)]
PATHS = ["PENSTOCK_CACHE"]
CHOICES = {
    "PENSTOCK_GPU_DIRECT": ("auto", "off", "on"),
    "PENSTOCK_IO_ENGINE": ("aio", "auto", "threads"),
    "PENSTOCK_OWN_POOL": ("off", "on"),
    "PENSTOCK_RESTORE_INTO": ("arena", "auto", "heap"),
    "PENSTOCK_VERIFY": ("full", "off", "sampled"),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def public():
    return {
        value
        for name, value in vars(knobs).items()
        if callable(value) and not name.startswith("_") and value.__module__ == knobs.__name__
    }


def test_this_file_knows_all():
    assert public() == set(NAMES.values())
    assert set(NAMES) == {*SIZES, *COUNTS, *SWITCHES, *PATHS, *CHOICES}


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_states_name_and_default(name):
    stated = re.match(r"``(\w+)`` \(([^)]+)\): ", NAMES[name].__doc__)
    assert stated[1] == name
    value = NAMES[name]()
    if name in SIZES:
        assert value == parse_bytes(stated[2])
    elif name in CHOICES:
        assert value == stated[2]
    elif name in PATHS:
        assert value == os.path.expanduser(stated[2])
    else:
        assert int(value) == int(stated[2])


@pytest.mark.parametrize("name", SIZES)
def test_sizes(monkeypatch, name):
    for text, value in (("8MiB", 8 << 20), ("12345", 12345), ("1.5KiB", 1536)):
        monkeypatch.setenv(name, text)
        assert NAMES[name]() == value
    for text in ("0", "0B", "8M", "-1", "", "many", "²", "9" * 5000):
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=name):
            NAMES[name]()


@pytest.mark.parametrize("name", COUNTS)
def test_counts(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    assert NAMES[name]() == 7
    for text in ("0", "-1", "", "1.5", "four", "²", "9" * 5000):
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=name):
            NAMES[name]()


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(monkeypatch, name):
    for text, value in (("0", False), ("", False), ("1", True), ("yes", True)):
        monkeypatch.setenv(name, text)
        assert NAMES[name]() is value


@pytest.mark.parametrize("name", CHOICES)
def test_choices(monkeypatch, name):
    for text in CHOICES[name]:
        monkeypatch.setenv(name, text)
        assert NAMES[name]() == text
    for text in ("", "1", "ON", "always"):
        monkeypatch.setenv(name, text)
        with pytest.raises(
            ConfigError, match=f"{name}={text!r} is none of {', '.join(CHOICES[name])}"
        ):
            NAMES[name]()


def test_there_are_no_others():
    """Whatever the package mentions is defined in this one file, but for where tests spill to."""
    root = Path(penstock.__file__).parent
    mentioned = {
        found
        for path in root.rglob("*.py")
        for found in re.findall(r"\bPENSTOCK_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    assert mentioned - {"PENSTOCK_TEST_DIR"} == set(NAMES)
