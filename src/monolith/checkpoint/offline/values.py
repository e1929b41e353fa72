"""Finds the row of a value as the data has it: the features in a checkpoint tell which id it becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from monolith.checkpoint.folder.manifest import read_chain
from monolith.checkpoint.offline.reading import FoundRow, SavedTables, find_id
from monolith.checkpoint.part import FEATURES
from monolith.checkpoint.parts import saved_spec
from monolith.data.formats.memory import to_records
from monolith.errors import ConfigError, DataError
from monolith.feature import (
    BucketFeature,
    CrossFeature,
    FeatureSpec,
    FloatFeature,
    HistoryFeature,
    SequenceFeature,
)


def find_value(
    prefix: str, value: str, *, feature: str | None = None, table: str | None = None
) -> list[FoundRow]:
    """Return the rows of a value as it is in the data, such as "u_60ef".

    The features of the checkpoint make an id of it: they hash a text, or find the bucket of a number. An
    integer that no feature has a row for is taken as the id of a row itself.

    Args:
        feature: The feature whose value it is; by default every feature of ids but buckets and crosses.
        table: The table to look in; by default every one.

    Returns:
        A row for each feature that can read the value, features that share rows once; first those that have
        a row.

    Raises:
        ConfigError: No such feature can read the value, or it names no single table.
        UnknownTableError: The checkpoint has no such table.
    """
    chain = read_chain(prefix)
    names = SavedTables(chain).names
    part = chain[-1].manifest.parts.get(FEATURES)
    spec = None if part is None else saved_spec(prefix, part.get("value"))
    if feature is not None and spec is None:
        raise ConfigError(
            f"{prefix} has no features, so the rows of {feature!r} can be looked up only by --table and "
            "the 64-bit id"
        )
    if feature is not None and spec is not None:
        asked = spec.id_feature(feature, "feature")
        if isinstance(asked, HistoryFeature):  # its values are those of the feature that it lists
            feature = asked.of
    whole = int(value) if value.removeprefix("-").isdecimal() else None
    found: dict[tuple[str, int], FoundRow] = {}
    readable: list[str] = []
    for name, one in {} if spec is None else spec.features.items():
        if isinstance(one, FloatFeature | CrossFeature | HistoryFeature) or feature not in (None, name):
            continue
        if isinstance(one, BucketFeature) and feature is None and table is None:
            continue  # every number has a bucket: it must be named
        assert spec is not None
        rows = spec.rows(name)
        if table not in (None, rows) or rows not in names:
            continue
        readable.append(name)
        key = _id_of(spec, name, value)
        if key is not None and (rows, key) not in found:
            found[rows, key] = replace(find_id(prefix, rows, key), feature=name)
    if whole is not None and all(row.prefix is None for row in found.values()):
        tables = [table] if table is not None else [row.table for row in found.values()]
        if feature is None and not tables and len(names) == 1:
            tables = names
        for rows in dict.fromkeys(tables):
            row = find_id(prefix, rows, whole)
            if row.prefix is not None or not found:
                found[rows, row.id] = row
    if not found:
        if readable:
            raise ConfigError(f"{value!r} is no value of {', '.join(readable)}: their values are numbers")
        if whole is None:
            raise ConfigError(
                f"{prefix} has no features that turn {value!r} into an id"
                f"{'' if table is None else f' of table {table!r}'}; give the 64-bit id of the row"
            )
        raise ConfigError(f"--id needs --table, one of: {', '.join(names) or 'none'}")
    return sorted(found.values(), key=lambda row: row.prefix is None)


def _id_of(spec: FeatureSpec, feature: str, value: str) -> int | None:
    """Return the id that a feature makes of a value in the data; None if it cannot read it."""
    narrow = replace(spec.only([feature]), event_time=None)
    one = spec.features[feature]
    if isinstance(one, SequenceFeature):  # one item of it, which needs no time
        narrow = replace(narrow, features={feature: replace(one, times=None, shares=None)})
    column = one.column or feature  # type: ignore[union-attr]  # crosses are not asked for
    try:
        cell = {torch.int64: int, torch.float32: float}.get(narrow.columns[column], str)(value)
        columns: dict[str, Any] = {name: [None] for name in narrow.columns} | {column: [cell]}
        ids = narrow.make(to_records(columns)).ids[feature].flat_values.tolist()
    except (ValueError, OverflowError, DataError):
        return None
    return int(ids[0]) if ids else None
