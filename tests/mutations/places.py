"""List of places in the code that matter, read from ``places.toml``, and how each is found and broken.

A place is a piece of text that occurs once in the module that has it: white space counts as one blank,
so that formatting does not matter, and the module is a hint only, so that a place survives a move.
``within`` names the function or class that has the text, where the text alone occurs more often.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIST = Path(__file__).with_name("places.toml")
ROOT = Path(__file__).parents[2]


class LostError(Exception):
    """A place is not where it was, or is in several modules: mend ``places.toml``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One place: what it protects, how to break it, and the tests of which one must then fail."""

    name: str
    protects: str
    hint: str
    """Module that had it last, relative to the package."""
    find: str
    put: str
    """Text in place of ``find``."""
    tests: tuple[str, ...]
    """``file.py::test``, in whatever folder of the tests the file is."""
    within: str = ""
    """Qualified name of the function or class that has the text, or the end of that name."""


@dataclass(frozen=True, slots=True)
class Break:
    """A module with one place broken."""

    path: Path
    """The module, relative to the package."""
    text: str


def all_places() -> list[Place]:
    """Return the places of ``places.toml``, in its order."""
    entries = tomllib.loads(LIST.read_text())["place"]
    return [Place(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def broken(place: Place, package: Path) -> Break:
    """Find a place in a package and return its module with the place broken.

    Raises:
        LostError: No module has the place, or several have, or what is put there is no Python.
    """
    found = _matches(place, package / place.hint)
    if len(found) != 1:
        found = [each for path in sorted(package.rglob("*.py")) for each in _matches(place, path)]
    if len(found) != 1:
        where = ", ".join(str(path.relative_to(package)) for path, _, _ in found) or "nowhere"
        raise LostError(
            f"{place.name!r}: the text {place.find!r} must occur once in {package}, it is found in:"
            f" {where}; mend {LIST.name}"
        )
    path, start, end = found[0]
    text = path.read_text()
    made = text[:start] + place.put + text[end:]
    try:
        ast.parse(made)
    except SyntaxError as error:
        raise LostError(f"{place.name!r}: {place.put!r} is no Python there: {error}") from error
    return Break(path.relative_to(package), made)


def ids_of(place: Place, tests: Path) -> list[str]:
    """Return the tests of a place as pytest names them. Raises LostError if a file or test is missing."""
    found = []
    for each in place.tests:
        file, _, name = each.partition("::")
        paths = _files(tests).get(file, [])
        if len(paths) != 1:
            raise LostError(f"{place.name!r}: there must be one {file}, there are {len(paths)}")
        if not name:
            found.append(str(paths[0]))
            continue
        first = re.sub(r"\[.*", "", name).partition("::")[0]  # a class may inherit its tests
        if not re.search(rf"^(def |class |){first}\b", paths[0].read_text(), re.MULTILINE):
            raise LostError(f"{place.name!r}: {file} has no {first}")
        found.append(f"{paths[0]}::{name}")
    return found


def _matches(place: Place, path: Path) -> list[tuple[Path, int, int]]:
    text = path.read_text() if path.exists() else ""
    pattern = r"\s+".join(map(re.escape, place.find.split()))
    spans = [match.span() for match in re.finditer(pattern, text)]
    if spans and place.within:
        inside = list(_scopes(text, place.within))
        spans = [
            (start, end)
            for start, end in spans
            if any(low <= start and end <= high for low, high in inside)
        ]
    return [(path, start, end) for start, end in spans]


@cache
def _files(folder: Path) -> dict[str, list[Path]]:
    """Return the paths of all modules below a folder, by their names."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.py")):
        found.setdefault(path.name, []).append(path)
    return found


def _scopes(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield where functions and classes of a name begin and end in a text."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def walk(node: ast.AST, path: str) -> Iterator[tuple[int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                mine = f"{path}.{child.name}"
                if mine.endswith(f".{name}"):
                    assert child.end_lineno is not None
                    yield lines[child.lineno - 1], lines[child.end_lineno]
                yield from walk(child, mine)

    yield from walk(ast.parse(text), "")
