"""What the source must be like to read, by ``scripts/survey``."""

import ast
import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def script(name):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def survey():
    return script("survey")


@pytest.fixture(scope="module")
def trees(survey):
    return {
        survey.module_of(path): ast.parse(path.read_text())
        for path in sorted(survey.SOURCE.rglob("*.py"))
    }


def test_there_is_no_circle_of_modules(survey, trees):
    assert survey.circles_of(survey.imports_of(trees)) == []


def test_circles_are_found_in_any_order(survey):
    assert survey.circles_of({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert survey.circles_of({"a": {"c"}, "b": {"a"}, "c": {"b"}}) == [["a", "b", "c"]]
    assert survey.circles_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_imports_for_typing_count(survey):
    source = "if TYPE_CHECKING:\n    from p import b\n    import p.c\n"
    found = survey.imports_of(
        {"p.a": ast.parse(source), "p.b": ast.parse(""), "p.c": ast.parse("")}
    )
    assert found["p.a"] == {"p.b", "p.c"}


def test_what_should_exist_once_is_counted_until_the_shared_module_serves(survey, monkeypatch):
    monkeypatch.setattr(survey, "SHARED", {"pools": (("pool",), ("Ring", "Owner:Arena", "Gone"))})
    monkeypatch.setattr(survey, "OWN", {"pools": ("Mine",)})
    parts = {
        "penstock.store.pool": "class Pool: ...",
        "penstock.io.arena": "class Arena: ...",
        "penstock.optim.ring": "class Ring: ...",
        "penstock.optim.user": "a = Ring()\nclass Owner:\n    def f(self): return Arena()",
        "penstock.optim.engine": "engine = aio.default_engine()",
        "penstock.io.aio": "def default_engine(): return AioEngine()",
    }

    def counted(**changed):
        trees = {module: ast.parse(text) for module, text in (parts | changed).items()}
        found = survey.counted_once(trees)
        assert found["modules that make an engine"] == ["penstock.optim.engine"]
        return found["pools"]

    assert counted() == ["penstock.store.pool", "Ring", "Owner:Arena"]
    parts["penstock.optim.ring"] = "from penstock.store.pool import Pool\nclass Ring: ..."
    assert counted() == ["penstock.store.pool", "Owner:Arena"]
    parts["penstock.optim.user"] = "class Owner:\n    def f(self, pool): return pool.take()"
    assert counted() == ["penstock.store.pool"]
    parts["penstock.optim.mine"] = "from penstock.store.pool import Pool\nmine = Mine()"
    assert counted() == ["penstock.store.pool", "Mine"]


def test_offloading_loads_few_modules(survey):
    assert survey.loaded() <= 120


def test_what_should_exist_once_does_not_become_more(survey, trees):
    found = survey.counted_once(trees)
    most = (2, 6, 7, 4, 1)
    assert all(len(names) <= limit for names, limit in zip(found.values(), most, strict=True))


@pytest.mark.parametrize(
    ("trip", "files", "hand_overs"),
    [("activation", 30, 50), ("record", 22, 32), ("checkpoint", 25, 46)],
)
def test_a_datums_way_does_not_become_longer(trip, files, hand_overs):
    trips = script("trips")
    for _ in range(3):  # on a busy machine there are waits, which are not on the way elsewhere
        found = trips.measure(trip)
        counted = len(found["files"]), len(found["hand_overs"])
        if counted[0] <= files and counted[1] <= hand_overs:
            break
    assert counted > (3, 3)
    assert counted[0] <= files, found["files"]
    assert counted[1] <= hand_overs, found["hand_overs"]


def test_the_readme_is_one_screen_and_a_half():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert sum(line.startswith("| ") for line in lines) <= 13  # a heading, and twelve rows


NO_NAMES_OF_MODULES = {
    *(
        "about",
        "above",
        "ahead",
        "aside",
        "away",
        "before",
        "beside",
        "beyond",
        "together",
        "under",
    ),
    *(
        "asking",
        "ending",
        "foreseen",
        "given",
        "hidden",
        "kept",
        "laid",
        "leaving",
        "mixing",
        "moving",
    ),
    *("protected", "recomputing", "remade", "reporting", "returning", "saving", "spoiled", "told"),
    *(
        "axis",
        "case",
        "crew",
        "early",
        "fresh",
        "front",
        "garbage",
        "halves",
        "held",
        "keeper",
        "least",
    ),
    *(
        "look",
        "orphans",
        "parcels",
        "plant",
        "repeats",
        "rerun",
        "room",
        "shelf",
        "supply",
        "teams",
    ),
    *("teller", "turns", "twins"),
}
"""Prepositions, participles and metaphors that modules were called once, and their kind."""


def test_a_public_class_has_a_name_of_its_own(survey, trees):
    twice = {n: where for n, where in survey.class_names(trees).items() if len(where) > 1}
    assert not twice


def test_docstrings_say_what_a_thing_is_in_a_phrase_that_stands_alone(survey, trees):
    questions = list(survey.question_docstrings(trees))
    assert questions == []


def test_modules_are_called_by_nouns_of_the_field(trees):
    bad = [module for module in trees if module.rpartition(".")[2] in NO_NAMES_OF_MODULES]
    assert bad == []
