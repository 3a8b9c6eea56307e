"""Side-by-side tables."""

from __future__ import annotations

import math

import pytest

from penstock.core.errors import ConfigError
from penstock.core.units import GIB, MIB
from penstock.report.table import Row, side_by_side, to_text


def line_of(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(label))


def test_a_table_has_a_column_per_run_and_a_verdict():
    rows = [
        Row.of_bits("loss of step 1", 2.25, 2.25),
        Row.of_bytes("peak resident", 3 * GIB, 300 * MIB),
        Row.of_seconds("step time", 1.2, 1.25),
        Row("policy", ("-", "auto")),
    ]
    table = side_by_side("Ten steps", ("without", "with"), rows)
    text = to_text(table, width=100)
    assert text.splitlines()[0] == "Ten steps"
    assert text.splitlines()[1].split() == ["without", "with", "verdict"]
    assert line_of(text, "loss of step 1").split()[-4:] == ["2.25", "2.25", "same", "bits"]
    assert line_of(text, "peak resident").endswith("3.00 GiB   300.00 MiB   10.2 x less")
    assert line_of(text, "step time").endswith("1.20 s       1.25 s       1.042 x")
    assert line_of(text, "policy").split() == ["policy", "-", "auto"]


def test_floats_one_bit_apart_are_different_and_shown_apart():
    row = Row.of_bits("loss", 2.25, math.nextafter(2.25, 3))
    assert (row.verdict, row.good) == ("DIFFERENT", False)
    assert row.values[0] != row.values[1]


@pytest.mark.parametrize(
    ("values", "same"),
    [((0.0, -0.0), False), ((math.nan, math.nan), True), ((1.0, 1.0, 1.0), True), ((1.0,), True)],
)
def test_bits_are_compared_not_values(values, same):
    assert Row.of_bits("x", *values).good is same


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((100, 50), "2.0 x less"), ((50, 100), "2.00 x more"), ((7, 7), "equal"), ((0, 5), "")],
)
def test_sizes_are_compared_in_words(values, verdict):
    assert Row.of_bytes("x", *values).verdict == verdict


def test_a_ratio_needs_a_positive_reference():
    assert Row.of_seconds("x", 0.0, 1.0).verdict == ""


def test_without_verdicts_there_is_no_such_column():
    assert "verdict" not in to_text(side_by_side("t", ("a",), [Row("x", ("1",))]), width=80)


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="'loss' has 1 values for 2 columns"):
        side_by_side("t", ("a", "b"), [Row("loss", ("1",))])


def test_brackets_are_text_and_lines_keep_to_the_width():
    rows = [Row("layers[0].[bold]fc " * 5, ("1" * 40, "2" * 40))]
    text = to_text(side_by_side("t", ("without", "with"), rows), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("[0]") == 5
