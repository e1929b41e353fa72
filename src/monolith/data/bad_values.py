"""Bad values: records that can be read, and that a model must not be trained on.

An event time in milliseconds where seconds are expected, before 1970 or beyond what a row can keep; a label
that is NaN or infinite. Such a record is as bad as one that cannot be read: it is left out, counted, and kept
by the source for whoever looks into it. One of them does not end a run; where they are many, the column is
wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monolith.data.format import BadRecord
from monolith.data.records import BatchSpec, Records, not_finite, timely
from monolith.errors import TooManyBadRecordsError
from monolith.observe import Doublings
from monolith.table.arguments import is_second, wrong_second

_log = logging.getLogger(__name__)

_AFTER = 1000
"""Records to read before a share is judged; a share of 0 is judged at once."""


class BadValues:
    """Leaves out records with a bad event time or label, as long as they are few.

    Args:
        set_aside: Given them, with their values as JSON.
    """

    def __init__(self, spec: BatchSpec, set_aside: Callable[[Sequence[BadRecord]], None]) -> None:
        self._spec = spec
        self._labels = sorted({column for column, _ in spec.labels.values()})
        self._set_aside = set_aside
        self._doublings = Doublings()
        self._records = 0
        self._last = ""
        self.count = 0
        """How many were left out."""

    def left_out(self, records: Records) -> Records:
        """Return the records whose event times and labels are good.

        Raises:
            TooManyBadRecordsError: More are bad than `BatchSpec.max_bad` allows.
        """
        self._records += len(records)
        fine = timely(records, self._spec.event_time)
        for name in self._labels:
            if name in records.columns and name not in records.shared:
                fine &= ~not_finite(records[name])
        if bool(fine.all()):
            return records
        bad = [self._bad(records, int(row)) for row in (~fine).nonzero()]
        self.count += len(bad)
        self._last = bad[-1].reason
        self._set_aside(bad)
        if self._doublings.due(self.count):
            _log.warning("left out %d of %d records so far: %s", self.count, self._records, self._last)
        self.judge(at_end=False)
        return records.keep(fine)

    def judge(self, *, at_end: bool) -> None:
        """Refuse to go on if too many are bad."""
        most = self._spec.max_bad
        if self.count > most * self._records and (at_end or self._records >= _AFTER or most == 0):
            raise TooManyBadRecordsError(
                f"{self.count} of {self._records} records have a bad event time or label, more than the "
                f"share of {most} that is allowed. {self._last}. Make event times Unix seconds and labels "
                "numbers, name other columns in BatchSpec, or allow more with its max_bad."
            )

    def _bad(self, records: Records, row: int) -> BadRecord:
        one = records.take(torch.tensor([row]))
        return BadRecord(row, self._reason(one), _as_json(one))

    def _reason(self, record: Records) -> str:
        column = self._spec.event_time or ""
        if not bool(timely(record, column).all()):
            wrong = next(time for time in record[column].flat_values.tolist() if not is_second(time))
            return f"event time {column!r} {wrong_second(int(wrong))}"
        name = next(name for name in self._labels if bool(not_finite(record[name]).any()))
        return f"label {name!r} is {', '.join(map(str, record[name].flat_values.tolist()))}"


def _as_json(record: Records) -> bytes:
    values: dict[str, Any] = {}
    for name in record.columns:
        if record.columns[name].dtype is torch.uint8:
            values[name] = [text.decode("utf-8", "replace") for text in record.strings(name)[0]]
        else:
            values[name] = record[name].flat_values.tolist()
    return json.dumps(values).encode()
