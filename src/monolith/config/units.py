"""Durations and sizes as people write them: "10m", "9w", "64GiB"."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from fractions import Fraction

from monolith.errors import ConfigError

_MICROSECONDS = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_BYTES = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d|w)\s*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?i?B)?")


def parse_duration(value: str | float) -> timedelta:
    """A duration from seconds or from text: 2.5, "90", "10m", "1h30m", "-5s".

    Units are us, ms, s, m, h, d and w.

    Raises:
        ConfigError: Not a duration, or longer than a `timedelta` can hold.
    """
    if isinstance(value, str):
        text = value.strip()
        sign, body = (-1, text[1:]) if text.startswith("-") else (1, text)
        parts = list(_PART.finditer(body))
        if parts and "".join(part[0] for part in parts) == body:
            total = sum((Fraction(part[1]) * _MICROSECONDS[part[2]] for part in parts), Fraction())
            return _duration(value, sign * total)
        try:
            seconds = float(text)
        except ValueError:
            raise ConfigError(
                f'{value!r} is not a duration; write seconds, or a number with us, ms, s, m, h, d or w: "10m"'
            ) from None
    else:
        seconds = value
    if not math.isfinite(seconds):
        raise ConfigError(f"{value!r} is not a duration: it must be finite")
    return _duration(value, Fraction(seconds) * _MICROSECONDS["s"])


def format_duration(value: timedelta) -> str:
    """The shortest exact text that `parse_duration` reads back: "10m", "90s", "9w"."""
    microseconds = value // timedelta(microseconds=1)
    for unit, size in sorted(_MICROSECONDS.items(), key=lambda item: -item[1]):
        if microseconds % size == 0 and microseconds:
            return f"{microseconds // size}{unit}"
    return "0s"


def parse_bytes(value: str | int) -> int:
    """A number of bytes from text: "64GiB", "1.5MB", "4096".

    KB, MB, ... are powers of 1000; KiB, MiB, ... of 1024.

    Raises:
        ConfigError: Not a size, or not a whole number of bytes.
    """
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value.strip().replace("_", ""))
    if match is None or (match[2] or "B") not in _BYTES:
        raise ConfigError(
            f'{value!r} is not a size; write bytes or a number with a unit, as in "64GiB" or "10MB"'
        )
    size = Fraction(match[1]) * _BYTES[match[2] or "B"]
    if size.denominator != 1:
        raise ConfigError(f"{value!r} is not a whole number of bytes")
    return int(size)


def _duration(value: str | float, microseconds: Fraction) -> timedelta:
    try:
        return timedelta(microseconds=round(microseconds))
    except OverflowError:
        raise ConfigError(
            f"{value!r} is longer than the longest duration, {timedelta.max.days} days"
        ) from None
