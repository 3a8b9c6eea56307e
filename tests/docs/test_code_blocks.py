"""The manual's code runs, and its commands exist.

Python blocks of a page run in order in one namespace, in a process of their own and an empty
directory. Blocks opened with ``python no-run`` are only compiled. Of commands the sub-command and
every option are looked up in its ``--help``.
"""

import contextlib
import functools
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").glob("**/*.md") if "_build" not in page.parts),
]
BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """(info, line, text) of the fenced blocks of a page in one language."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        info = match[1].split()
        if info[:1] == [language]:
            yield info, text[: match.start()].count("\n") + 2, match[2]


def python_source(page):
    """The runnable blocks as one program whose line numbers are those of the page."""
    lines = []
    for info, first, text in blocks(page, "python"):
        if "no-run" not in info:
            lines += [""] * (first - 1 - len(lines))
            lines += text.splitlines()
    return "\n".join(lines) + "\n"


def commands(page):
    """Each ``$ penstock ...`` line, as a list of words."""
    for _, _, text in blocks(page, "console"):
        joined = text.replace("\\\n", " ")
        for line in joined.splitlines():
            words = shlex.split(line.removeprefix("$ ")) if line.startswith("$ ") else []
            if words[:1] == ["penstock"]:
                yield words


def named(pages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", named(PAGES))
def test_every_python_block_compiles(page):
    for _, line, text in blocks(page, "python"):
        compile("\n" * (line - 1) + text, str(page), "exec")


@pytest.mark.parametrize("page", named(page for page in PAGES if python_source(page).strip()))
def test_the_python_blocks_of_a_page_run_in_order(page, disk_path):
    program = disk_path / page.with_suffix(".py").name
    program.write_text(python_source(page))
    work = disk_path / "work"
    work.mkdir()
    done = preloaded.run(["-W", "error", program], cwd=work)
    assert done.returncode == 0, f"{page} (lines are the page's):\n{done.stderr}"


@functools.cache
def help_of(*subcommand):
    from penstock.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as left:
        main([*subcommand, "--help"])
    assert left.value.code in (0, None), f"penstock {' '.join(subcommand)}: no such command"
    return out.getvalue()


def parts(words):
    """A command as (sub-commands, our options): what follows a script's name is the script's."""
    subcommand, options, rest = [], [], words[1:]
    while rest and not rest[0].startswith("-") and re.fullmatch(r"[a-z]+(-[a-z]+)*", rest[0]):
        subcommand.append(rest.pop(0))
    for word in rest:
        if subcommand in (["run"], ["plan"]) and (word.endswith(".py") or word == "-m"):
            break
        if word.startswith("--"):
            options.append(word.partition("=")[0])
    return subcommand, options


def test_commands_are_taken_apart():
    line = "penstock run --device-memory 2GiB --flash=/a train.py --its --own"
    assert parts(line.split()) == (["run"], ["--device-memory", "--flash"])
    line = "penstock plan --flash . --script train.py --its --own"
    assert parts(line.split()) == (["plan"], ["--flash", "--script"])
    assert parts(["penstock", "bench", "io", "/dir", "--json"]) == (["bench", "io"], ["--json"])


@pytest.mark.parametrize("page", named(page for page in PAGES if any(commands(page))))
def test_the_commands_of_a_page_exist(page):
    for words in commands(page):
        subcommand, options = parts(words)
        known = re.findall(r"--[a-z][a-z-]*", help_of(*subcommand))
        for option in options:
            assert option in known, f"{page}: {shlex.join(words)}: {option} is not in its --help"


def test_every_link_between_pages_leads_somewhere():
    """Also from the README, which Sphinx does not see."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target} does not exist"


def first_commands():
    """What ``docs/index.md`` begins with; what takes more than ten seconds is slow."""
    for _, _, text in blocks(ROOT / "docs" / "index.md", "console"):
        command = text.strip().removeprefix("$ ")
        long = command.startswith(("penstock run", "torchrun", "penstock jobs", "penstock plan"))
        marks = [pytest.mark.slow] if long else []
        yield pytest.param(command, marks=marks, id=" ".join(command.split()[:3]))


@pytest.mark.parametrize("command", list(first_commands()))
def test_what_the_manual_begins_with_works_in_a_checkout(command, disk_path, monkeypatch):
    for each in ("examples", "docs"):
        shutil.copytree(ROOT / each, disk_path / each, ignore=shutil.ignore_patterns("_build"))
    folder = Path(sys.executable).parent
    monkeypatch.setenv("HOME", str(disk_path))
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    name, *arguments = command.split()
    done = subprocess.run(
        [folder / name, *arguments],
        cwd=disk_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
