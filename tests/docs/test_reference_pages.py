"""Tables that repeat what the code says, and must not drift from it."""

import argparse
import dataclasses
import re
import tomllib
from pathlib import Path

import penstock
from penstock import cli
from penstock.core import errors, knobs

ROOT = Path(__file__).parents[2]


def page(name):
    return (ROOT / "docs" / name).read_text()


def rows(name):
    """The first two cells of each table row of a page, without back quotes."""
    found = re.findall(r"^\| `([^`]+)` \| `([^`]*)` \|", page(name), re.MULTILINE)
    return dict(found)


def test_every_knob_is_on_its_page_with_its_default():
    source = Path(knobs.__file__).read_text()
    in_code = dict(re.findall(r'"""``(PENSTOCK_\w+)`` \(([^)]+)\)', source))
    on_page = {name: default for name, default in rows("knobs.md").items() if name.isupper()}
    assert on_page == in_code
    assert set(in_code) == set(re.findall(r'"(PENSTOCK_\w+)"', source))


def test_every_setting_is_on_its_page_with_its_default():
    fields = {
        field.name: repr(field.default).replace("'", '"')
        for field in dataclasses.fields(penstock.OffloadConfig)
    }
    assert {name: text for name, text in rows("knobs.md").items() if name.islower()} == fields


def test_every_option_of_run_is_in_its_table():
    actions = cli.module_of("run").parser()._actions
    shown = [each for each in actions if each.help != argparse.SUPPRESS]
    options = {each.option_strings[-1] for each in shown if each.option_strings} - {"--help"}
    section = re.search(
        r"^## `penstock run`\n(.*?)^### ", page("cli.md"), re.MULTILINE | re.DOTALL
    )[1]
    cells = " ".join(re.findall(r"^\| (`-.*?) \| ", section, re.MULTILINE))
    assert set(re.findall(r"`(-[a-z-]+)", cells)) == options


def test_the_layers_in_the_design_are_those_that_are_enforced():
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert "```text\n" + "\n".join(layers) + "\n```" in page("design.md")


def test_the_tree_of_errors_is_the_one_in_the_code():
    tree = re.search(r"::\n\n(.*?)\n\nEach message", errors.__doc__, re.DOTALL)[1]
    shown = "\n".join(line.removeprefix("    ") for line in tree.splitlines())
    assert shown in page("api.md")


def test_every_export_is_in_the_reference():
    text = page("api.md")
    for name in penstock.__all__:
        assert name.startswith("__") or re.search(rf"\b{name}\b", text), name
