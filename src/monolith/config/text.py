"""Values as people write them: durations and sizes ("10m", "64GiB"), TOML, and names in snake case."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
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


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

NONE = "none"
"""TOML has no null; for a field that may be None, this word means None."""


def write_toml(data: Mapping[str, object]) -> str:
    """TOML that reads back as `data`, but for None, which becomes "none".

    Args:
        data: Nested mappings with string keys, lists, strings, numbers, booleans and None.
    """
    lines: list[str] = []
    _table(data, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(data: Mapping[str, object], path: tuple[str, ...], lines: list[str]) -> None:
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in data.items() if key not in tables}
    if path and (plain or not tables):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {toml_value(value)}" for key, value in plain.items()]
    for key, table in tables.items():
        _table(table, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def toml_value(value: object) -> str:
    """One value of plain data as TOML, on one line."""
    if value is None:
        return _text(NONE)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else f"{value:+}")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if value else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    raise TypeError(f"{type(value).__name__} is not plain data")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_WORD_BEGINS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z0-9])")


def to_snake_case(name: str) -> str:
    """`TestFFMModel` as `test_ffm_model`; a leading underscore becomes `private_`."""
    snake = _WORD_BEGINS.sub("_", name).lower()
    return f"private{snake}" if snake.startswith("_") else snake


class UniqueNames:
    """Gives each name out once: `dense`, `dense_1`, `dense_2`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._given: set[str] = set()
        self._next: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """Return `name` if it is free, else `name` with the lowest number that is free."""
        with self._lock:
            candidate = name
            number = self._next.get(name, 1)
            while candidate in self._given:
                candidate = f"{name}_{number}"
                number += 1
            self._next[name] = number
            self._given.add(candidate)
            return candidate
