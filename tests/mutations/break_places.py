"""Break each place of ``places.toml``, one at a time, and run the tests that must notice.

``make test-places`` runs it. For each place a process is forked that has torch loaded and Penstock not:
it sees a copy of the package, made of links, in which one module is broken, and so do the processes that
tests start. A place is *caught* when one of its tests fails; one that survives is broken once more, since
some tests depend on which thread comes first. A test that cannot be run, or a place that is not found, is
an error, and so is a test that fails with nothing broken.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from places import ROOT, Break, LostError, Place, all_places, broken, ids_of

from forked import run

TEST_LIMIT_S = 20
"""Seconds that one test may take: broken, it may wait for ever."""
IMPORTED = (
    *("numpy", "torch", "numba"),
    "torch._dynamo",  # which the first optimizer imports
    *("hypothesis", "anyio.pytest_plugin", "psutil", "pdb", "scipy.linalg", "scipy.special"),
)
"""Modules that most processes would import, if the one that they are forked from had not."""


def overlay(package: Path, change: Break, target: Path) -> None:
    """Make a copy of the package of links, with one module broken."""
    made = target / package.name
    made.mkdir()
    source = package
    parts = change.path.parts
    for depth, part in enumerate(parts):
        for each in source.iterdir():
            if each.name == "__pycache__":
                _link_compiled(each, made, change.path.stem if depth == len(parts) - 1 else "")
            elif each.name != part:
                (made / each.name).symlink_to(each)
        source, made = source / part, made / part
        if depth < len(parts) - 1:
            made.mkdir()
    made.write_text(change.text)


def _link_compiled(folder: Path, made: Path, without: str) -> None:
    """Link compiled modules one by one: what is compiled from here on must not come to the original."""
    cache = made / folder.name
    cache.mkdir()
    for each in folder.iterdir():
        if not each.name.startswith(f"{without}."):
            (cache / each.name).symlink_to(each)


class _Notes:
    """Notes of a run of pytest: which test failed first."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed += 1


def judge(tree: Path, ids: Sequence[str], change: Break | None, *, every: bool) -> str:
    """Run tests in this process; return ``"failed: TEST"``, ``"passed N"`` or ``"error: ..."``."""
    import pytest

    os.chdir(tree)
    directory = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="penstock-broken-"))
    notes = _Notes()
    output = directory / "output"
    with open(output, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        source = tree / "src"
        if change is not None:
            overlay(source / "penstock", change, directory)
            source = directory
        os.environ["PYTHONPATH"] = os.pathsep.join([str(source), str(tree / "tests")])
        sys.path[:0] = [str(source), str(tree / "tests")]
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
        options += ["-W", "ignore:Module already imported"]  # by the process that was forked from
        options += [f"--timeout={TEST_LIMIT_S}", f"--basetemp={directory / 'tmp'}"]
        status = pytest.main([*options, *(() if every else ("-x",)), *ids], plugins=[notes])
        sys.stdout.flush()
        said = " ".join(output.read_text(encoding="utf-8", errors="replace")[-400:].split())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if status in (0, 1) and (notes.failed or notes.passed):
        names = dict.fromkeys(each.rpartition("/")[2] for each in notes.failed)
        return f"failed: {', '.join(names)}" if names else f"passed {notes.passed}"
    return f"error: pytest ended with {int(status)}, {notes.passed} tests passed: {said}"


def clean(tree: Path, places: Sequence[Place], jobs: int) -> list[str]:
    """Run all tests of the places with nothing broken; return those that fail, with how they do."""
    ids = sorted({each for place in places for each in ids_of(place, tree / "tests")})
    parts = [ids[start::jobs] for start in range(jobs) if ids[start::jobs]]
    tasks = ((None, partial(judge, tree, part, None, every=True)) for part in parts)
    return [text for _, text in run(tasks, jobs) if not text.startswith("passed")]


def break_all(tree: Path, places: Sequence[Place], jobs: int, *, every: bool) -> bool:
    """Break each place and print which test notices; return True if all are noticed."""
    began = time.monotonic()
    package, tests = tree / "src" / "penstock", tree / "tests"
    tasks = []
    for place in places:
        try:
            change, ids = broken(place, package), ids_of(place, tests)
        except LostError as error:
            print(f"LOST      {error}", flush=True)
            continue
        tasks.append(((place, change), partial(judge, tree, ids, change, every=every)))
    caught = 0
    for is_second in (False, True):
        survived = []
        for task, said in run(((task, task[1]) for task in tasks), jobs):
            place, change = task[0]
            text = said or "no end"  # what limits the time of tests ends the process
            good = text.startswith(("failed: ", "no end", "died of"))
            is_error = text.startswith("error")
            survives = "SURVIVED" if is_second else "AGAIN"
            verdict = "caught" if good else "ERROR" if is_error else survives
            late = " (at the second try: its tests depend on time)" if good and is_second else ""
            print(f"{verdict:10}{place.name} ({change.path}){late}\n          {text}", flush=True)
            caught += good
            survived += [] if good or is_error else [task]
        tasks = survived
    wrong = len(places) - caught
    print(f"{len(places)} places: {caught} caught, {wrong} not; {time.monotonic() - began:.0f} s")
    return not wrong


def import_once() -> None:
    """Import before forking what most processes would: pytest's plugins, and all of Numba's kernels."""
    from _pytest.config import default_plugins

    for name in (*IMPORTED, *(f"_pytest.{each}" for each in default_plugins)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    target = importlib.import_module("numba.core.registry").cpu_target
    target.typing_context.refresh()
    target.target_context.refresh()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="places whose name or module contains this")
    # twice as many as cores: what is broken may do nothing but wait, until it has taken too long
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout to break")
    parser.add_argument(
        "--every", action="store_true", help="go on after the first test that fails"
    )
    parser.add_argument(
        "--unclean", action="store_true", help="do not run the tests unbroken first"
    )
    given = parser.parse_args()
    places = [p for p in all_places() if given.only in p.name or given.only in p.hint]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import_once()
    gc.freeze()
    tree = given.tree.resolve()
    if not given.unclean:
        failing = clean(tree, places, -(-given.jobs // 2))
        if failing:
            print("with nothing broken:", *failing, sep="\n")
            return 1
    return 0 if break_all(tree, places, given.jobs, every=given.every) else 1


if __name__ == "__main__":
    sys.exit(main())
