"""Plain data as TOML text. Python reads TOML but does not write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

NONE = "none"
"""TOML has no null; for a field that may be None, this word stands for it."""


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
