"""Grids of parameters and the rows of them that ``make test`` runs."""

from itertools import combinations

import pytest

from grids import grid, pairwise, parametrize

CHOICES = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": (None, 0.5)}


def pairs(rows):
    return {pair for row in rows for pair in combinations(row.items(), 2)}


def test_every_pair_occurs_in_a_few_rows_and_they_are_always_the_same():
    rows = grid(CHOICES)
    assert len(rows) == 3 * 2 * 2 * 2
    some = pairwise(rows)
    assert pairs(some) == pairs(rows)
    assert len(some) <= 8
    assert some == pairwise(grid(CHOICES))
    assert [row for row in rows if row in some] == some


def test_what_is_impossible_is_in_no_row():
    rows = grid(CHOICES, lambda a, b, c, d: a != 3 or not c)
    assert len(rows) == 24 - 4
    assert pairs(pairwise(rows)) == pairs(rows)


@pytest.mark.parametrize("choices", [{"a": (1, 2), "b": (3, 4)}, {"a": (1, 2)}])
def test_of_two_parameters_all_rows_are_needed(choices):
    assert pairwise(grid(choices)) == grid(choices)


def test_the_rows_that_no_pair_needs_are_slow():
    mark = parametrize(CHOICES)
    names, params = mark.args
    assert names == ["a", "b", "c", "d"]
    assert len(params) == 24
    quick = [dict(zip(names, each.values, strict=True)) for each in params if not each.marks]
    assert quick == pairwise(grid(CHOICES))
    assert {mark.name for each in params for mark in each.marks} == {"slow"}
    assert params[0].id == "1-x-False-None"
