"""Messages in JSON: an object each, of which some keys are columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monolith.data.format import BadRecord
from monolith.data.formats.objects import (
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


class JsonMessages:
    """Decodes messages that are JSON objects: {"user": 17, "tags": [3, 9], "price": 0.5, "title": "hi"}.

    A key that is missing, null and [] are no values, and other keys than the columns are passed over. What is
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
