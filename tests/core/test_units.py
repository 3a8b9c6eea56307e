"""Sizes: strict in, one way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import units
from penstock.core.errors import ConfigError, SizeError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0B", 0),
        ("17 B", 17),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2MB", 2_000_000),
        ("2MiB", 2 << 20),
        ("1.5GiB", 3 << 29),
        ("1.2GiB", 1288490188),
        ("0.3MB", 300_000),
        ("1.0001KiB", 1024),
        ("24GB", 24 * 10**9),
        ("24GiB", 24 << 30),
        (" 0.001 kB ", 1),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 << 40),
        ("1PiB", 1 << 50),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes(text, nbytes):
    assert units.parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("24G", "ambiguous; write '24GiB' .* or '24GB'"),
        ("3k", "ambiguous; write '3KiB' .* or '3kB'"),
        ("1.5m", "unknown unit 'm'"),
        ("24", "no unit; write '24GiB'.* or the integer 24"),
        ("24gb", "unknown unit 'gb'; known are B, kB"),
        ("24Gib", "unknown unit 'Gib'"),
        ("-1GiB", "not a size"),
        ("1e9B", "not a size"),
        ("1,5GiB", "not a size"),
        ("GiB", "not a size"),
        ("", "not a size"),
        ("1.5B", "1.5 bytes, which is not a whole number"),
        ("0.0001kB", "not a whole number"),
        (-1, "-1 bytes is negative"),
        (1.5, "float, not an int or a str"),
        (True, "bool, not an int"),
        (None, "NoneType, not an int"),
    ],
)
def test_bad_sizes(value, message):
    with pytest.raises(SizeError, match=f"device_memory: .*{message}") as caught:
        units.parse_bytes(value, what="device_memory")
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("value", "expected"), [("3.5GB/s", 3_500_000_000), ("1MiB/s ", 1 << 20), (12, 12)]
)
def test_bandwidths(value, expected):
    assert units.parse_bandwidth(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("3.5GB", "not a bandwidth; write it as in '3.5GB/s'"),
        ("3.5G/s", "ambiguous"),
        ("0B/s", "never finish"),
        (0, "never finish"),
        (-1, "negative"),
    ],
)
def test_bad_bandwidths(value, message):
    with pytest.raises(SizeError, match=message):
        units.parse_bandwidth(value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: units.format_bytes(0), "0 B"),
        (lambda: units.format_bytes(1023), "1023 B"),
        (lambda: units.format_bytes(1024), "1.00 KiB"),
        (lambda: units.format_bytes(3 << 29), "1.50 GiB"),
        (lambda: units.format_bytes(-(3 << 29)), "-1.50 GiB"),
        (lambda: units.format_bytes(5 << 40), "5.00 TiB"),
        (lambda: units.format_bandwidth(3.5e9), "3.50 GB/s"),
        (lambda: units.format_bandwidth(2.5e12), "2.50 TB/s"),
        (lambda: units.format_bandwidth(999), "999 B/s"),
        (lambda: units.format_duration(0.0123), "12.3 ms"),
        (lambda: units.format_duration(12e-6), "12.0 µs"),
        (lambda: units.format_duration(1.5), "1.50 s"),
        (lambda: units.format_duration(150), "2 min 30 s"),
    ],
)
def test_printing(call, text):
    assert call() == text


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30))
def test_rounding(value, multiple):
    down, up = units.round_down(value, multiple), units.round_up(value, multiple)
    assert down % multiple == up % multiple == 0
    assert down <= value <= up
    assert up - down in (0, multiple)
    assert (up == down) == (value % multiple == 0)


@given(st.integers(0, 10**6), st.sampled_from(["B", "kB", "KiB", "MB", "MiB", "GB", "GiB", "TiB"]))
def test_whole_numbers_are_exact(number, unit):
    assert units.parse_bytes(f"{number}{unit}") == number * units.parse_bytes(f"1{unit}")
