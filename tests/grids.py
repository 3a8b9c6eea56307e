"""Grids of parameters: every pair of values in ``make test``, every combination in ``make test-all``."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest


def grid(choices, possible=None):
    """Return all combinations as dictionaries, but those of which ``possible(**row)`` is false."""
    rows = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    return [row for row in rows if possible is None or possible(**row)]


def pairwise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return some of the rows, in which each pair of values occurs that occurs in any; always the same.

    Of several rows with as many pairs that are still missing, the first is taken. With two names or
    fewer that is every row.
    """
    pairs = [set(combinations(row.items(), min(2, len(row)))) for row in rows]
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [row for index, row in enumerate(rows) if index in chosen]


def parametrize(choices, possible=None):
    """Parametrize a test with all rows of a grid; those that no pair needs are ``slow``."""
    rows = grid(choices, possible)
    needed = pairwise(rows)
    return pytest.mark.parametrize(
        list(choices),
        [
            pytest.param(
                *row.values(),
                id="-".join(map(str, row.values())),
                marks=[] if row in needed else pytest.mark.slow,
            )
            for row in rows
        ],
    )
