"""``--help`` of every command and subcommand, found by walking over their parsers."""

import argparse
import re
from pathlib import Path

import pytest

import penstock
from penstock import cli
from penstock.cli import main


def parsers(words, parser):
    """Yield a command's words and its parser, and those of its subcommands."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from parsers([*words, name], each)


COMMANDS = [
    found for name in cli._COMMANDS for found in parsers([name], cli.module_of(name).parser())
]
each_command = pytest.mark.parametrize(
    ("words", "parser"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS]
)


def arguments(parser):
    """Return what a user can give, with the name that help has for it."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return {"/".join(each.option_strings) or each.metavar or each.dest: each for each in shown}


def help_of(words, capsys):
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@each_command
def test_help_is_printed_within_100_columns(words, parser, capsys):
    text = help_of(words, capsys)
    assert f"usage: penstock {' '.join(words)} " in text
    assert max(map(len, text.splitlines())) <= 100
    described = text.split("\n\n")[1]
    assert re.match(r"[A-Z].*\.", described, re.DOTALL), "no sentence says what it does"


@each_command
def test_every_argument_says_what_it_is(words, parser):
    """In words that stand without the name of the argument, and with the default if there is one."""
    for name, action in arguments(parser).items():
        if isinstance(action, argparse._SubParsersAction):
            assert all(choice.help for choice in action._choices_actions), name
            continue
        assert action.help, name
        assert not re.match(r"\(|(of|if|that|who|for|which of) ", action.help), (name, action.help)
        if action.nargs != 0 and action.default not in (None, [], argparse.SUPPRESS):
            assert "(default: " in action.help, (name, action.help)


@pytest.mark.parametrize(
    "words", [[], *(words for words, parser in COMMANDS if parser._subparsers)], ids=str
)
def test_every_command_is_listed_apart_from_its_description(words, capsys):
    text = help_of(words, capsys)
    listed = {words_[-1] for words_, _ in COMMANDS if words_[:-1] == words}
    assert listed
    for name in listed:
        assert re.search(rf"^ +{name}\s+[a-z]", text, re.MULTILINE), name


def test_strings_that_are_joined_have_a_space_between_words():
    """Over the whole package: one line ends with a word, and the next begins with one."""
    joined = re.compile(r"[^\n]*[\w.,;:)`](?<!\\n)\"\n\s+[rf]*\"[\w(`][^\n]*")
    for path in Path(penstock.__file__).parent.rglob("*.py"):
        found = joined.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found[0]}"
