from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith.config import format_duration, parse_bytes, parse_duration
from monolith.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (2.5, 2.5),
        ("90", 90),
        ("0", 0),
        ("10m", 600),
        ("9w", 9 * 7 * 86400),
        ("1h30m", 5400),
        ("1d 2h", 93600),
        ("500ms", 0.5),
        ("7us", 7e-6),
        ("1.5h", 5400),
        ("-5s", -5),
    ],
)
def test_a_duration_is_seconds_or_numbers_with_units(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "m", "10 parsecs", "10m!", "--5s", "nan", "inf", float("inf"), "1e300"])
def test_anything_else_is_no_duration(text):
    with pytest.raises(ConfigError, match=r"is not a duration|longer than"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (timedelta(), "0s"),
        (timedelta(minutes=10), "10m"),
        (timedelta(weeks=9), "9w"),
        (timedelta(seconds=90), "90s"),
        (timedelta(milliseconds=1500), "1500ms"),
        (timedelta(hours=-2), "-2h"),
    ],
)
def test_a_duration_is_printed_in_its_largest_exact_unit(value, text):
    assert format_duration(value) == text


@given(st.timedeltas())
def test_every_duration_survives_printing(value):
    assert parse_duration(format_duration(value)) == value


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (7, 7),
        ("4096", 4096),
        ("1_000", 1000),
        ("8B", 8),
        ("10MB", 10_000_000),
        ("64GiB", 64 << 30),
        ("1.5 KiB", 1536),
        ("2PiB", 2 << 50),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "64G", "64 gib", "-1MB", "1iB", "1.5B", "1e3"])
def test_anything_else_is_no_size(text):
    with pytest.raises(ConfigError, match=r"not a size|not a whole number"):
        parse_bytes(text)
