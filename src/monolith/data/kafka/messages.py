"""Decoders of messages: JSON objects, lines of CSV, and plain strings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from monolith.data.format import BadRecord
from monolith.data.formats.csv import csv_parser, csv_records
from monolith.data.formats.memory import (
    Cell,
    ColumnType,
    cells_of,
    column_types,
    json_object,
    rows_as_records,
)
from monolith.data.records import Records
from monolith.errors import ConfigError
from monolith.feature.spec.reading import BadReason
from monolith.tensors import RaggedTensor

if TYPE_CHECKING:
    pass


class JsonMessages:
    """Decodes messages that are JSON objects: {"user": 17, "tags": [3, 9], "price": 0.5, "title": "hi"}.

    A key that is missing, null and [] are no values, and other keys than the columns are ignored. What is
    not an object in JSON, or has a value of another type than its column, is a bad message.

    Args:
        columns: Name to what it holds: int, float or str. Lists of these are columns as well.

    Raises:
        ConfigError: There is no column, or no such type.
    """

    def __init__(self, columns: Mapping[str, ColumnType]) -> None:
        if not columns:
            raise ConfigError("json messages: need at least one column")
        self._types = column_types(columns, "json messages")

    def __call__(self, payloads: list[bytes], /) -> tuple[Records, Sequence[BadRecord]]:
        """Return the records in order, and what could not be read: `place` is the position in `payloads`."""
        rows: list[dict[str, Cell]] = []
        bad: list[BadRecord] = []
        for place, payload in enumerate(payloads):
            try:
                rows.append(cells_of(json_object(payload), self._types))
            except (ValueError, RecursionError) as cause:  # malformed JSON and UTF-8, too
                bad.append(BadRecord(place, BadReason("not JSON as declared: …", str(cause)), payload))
        return rows_as_records(rows, self._types), bad


class CsvMessages:
    """Decodes messages that are one line of CSV each, without a header: b"u17,3,0.5".

    An empty field is no value. A message of several lines, with another number of fields, or with a value of
    another type than its column, is a bad one.

    Args:
        fields: The names of all fields, in their order.
        columns: The fields to read, and what each holds, as of `JsonMessages`.

    Raises:
        ConfigError: A column is none of the fields, or there is no such type.
    """

    def __init__(
        self, fields: Sequence[str], columns: Mapping[str, ColumnType], *, delimiter: str = ","
    ) -> None:
        if strange := [name for name in columns if name not in fields]:
            raise ConfigError(
                f"csv messages: there is no field {strange[0]!r}; the fields of a message are "
                f"{', '.join(fields) or 'not named: set columns'}"
            )
        types = column_types(columns, "csv messages")
        self._names = [name for name in fields if name in types]
        self._parser = csv_parser(fields, {name: types[name] for name in self._names}, delimiter)

    def __call__(self, payloads: list[bytes], /) -> tuple[Records, Sequence[BadRecord]]:
        """Return the records in order, and what could not be read: `place` is the position in `payloads`."""
        bad: list[BadRecord] = []
        places: list[int] = []
        lines: list[bytes] = []
        for place, payload in enumerate(payloads):
            line = payload.rstrip(b"\r\n")
            if not line or b"\n" in line or line.count(b'"') % 2:
                found = "several lines" if b"\n" in line else "an open quote" if line else "nothing"
                bad.append(BadRecord(place, BadReason("not one line of CSV: …", found), payload))
            else:
                places.append(place)
                lines.append(line + b"\n")
        ends = list(accumulate(map(len, lines)))
        text = b"".join(lines)
        parsed = self._parser.parse(memoryview(text), True, len(text) + 1)
        for begin, _, reason, column, value in parsed.bad:
            place = places[bisect_right(ends, begin)]
            where = "" if column is None else f"{self._names[column]!r}: {value!r} "
            bad.append(BadRecord(place, BadReason("not CSV as declared: …", where + reason), payloads[place]))
        bad.sort(key=lambda one: one.place)
        return csv_records(parsed, self._names), bad


VALUE = "value"
"""The column of strings that `plain_strings` fills and `KafkaSink.write` sends."""
KEY = "key"
"""The column of strings by which `KafkaSink.write` chooses the partition, where a record has one."""


def plain_strings(payloads: list[bytes]) -> tuple[Records, Sequence[BadRecord]]:
    """Decode nothing: one record per message, its bytes in the column `value`."""
    return Records(len(payloads), {VALUE: string_column(payloads)}), ()


def string_column(strings: Sequence[bytes]) -> RaggedTensor:
    """Return a column with one string per record."""
    joined = bytearray().join(strings)
    values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    lengths = torch.tensor([len(string) for string in strings], dtype=torch.int64)
    inner = RaggedTensor.from_row_lengths(values, lengths, validate=False)
    return RaggedTensor(inner, torch.arange(len(strings) + 1), validate=False)
