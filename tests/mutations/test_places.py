"""Each place that `make test-places` breaks is there, once, and so are the tests that must notice.

A place that has moved is found where it is now. One that is not found, because its text has changed or
is gone, is to be mended in `places.toml`: what it protects has not gone with it.
"""

import pytest
from places import ROOT, LostError, Place, all_places, broken, ids_of

PACKAGE, TESTS = ROOT / "src" / "penstock", ROOT / "tests"
PLACES = all_places()
AREAS = ("core", "io", "store", "runtime", "hooks", "optim", "checkpoint", "data", "swap")


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_place_is_found_once_and_so_are_its_tests(place):
    original = (PACKAGE / broken(place, PACKAGE).path).read_text()
    assert broken(place, PACKAGE).text != original
    assert ids_of(place, TESTS)


def test_there_are_as_many_as_there_were():
    """Who deletes one because its code is gone has to find what protects the same now."""
    assert len(PLACES) >= 90
    assert len({place.name for place in PLACES}) == len(PLACES)
    areas = [str(broken(place, PACKAGE).path).partition("/")[0] for place in PLACES]
    assert all(areas.count(area) >= 3 for area in AREAS)


def a_place(**changes):
    fields = {
        "name": "it",
        "protects": "what",
        "hint": "a.py",
        "find": "x  =  1",
        "put": "x = 2",
        "tests": ("test_places.py::test_places_move",),
    }
    return Place(**{**fields, **changes})


def test_places_move(tmp_path):
    """To another module, or another line: it is the text that counts, and not its blanks."""
    (tmp_path / "b.py").write_text(
        "def f():\n    x = \\\n        0\ndef g():\n    x =\\\n 1\n    x = 1\n"
    )
    assert broken(a_place(), tmp_path).path.name == "b.py"
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.py").write_text("class C:\n    def f(self):\n        x = 1\n")
    with pytest.raises(LostError, match=r"must occur once .* it is found in: b\.py, c/a\.py"):
        broken(a_place(), tmp_path)
    found = broken(a_place(within="C.f"), tmp_path)
    assert found.text.endswith("x = 2\n")
    assert broken(a_place(hint="c/a.py"), tmp_path).path.parts == ("c", "a.py")
    with pytest.raises(LostError, match="nowhere"):
        broken(a_place(find="x = 3"), tmp_path)
    with pytest.raises(LostError, match="is no Python there"):
        broken(a_place(within="C.f", put="x = = 1"), tmp_path)
