"""Bad event times: milliseconds where seconds are expected, dates before 1970 or beyond what a row can keep.

A record with such a time is as bad as one that cannot be read: it is left out, counted, and kept by the
source for whoever looks into it. One of them does not end a run; where they are many, the column is wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monolith.data.format import BadRecord
from monolith.data.records import BatchSpec, Records, timely
from monolith.errors import TooManyBadRecordsError
from monolith.observe import Doublings
from monolith.table.arguments import is_second, wrong_second

_log = logging.getLogger(__name__)

_AFTER = 1000
"""Records to read before a share is judged; a share of 0 is judged at once."""


class BadTimes:
    """Leaves out records with a bad event time, as long as they are few.

    Args:
        set_aside: Given them, with their values as JSON.
    """

    def __init__(self, spec: BatchSpec, set_aside: Callable[[Sequence[BadRecord]], None]) -> None:
        self._spec = spec
        self._set_aside = set_aside
        self._doublings = Doublings()
        self._records = 0
        self._last = ""
        self.count = 0
        """How many were left out."""

    def left_out(self, records: Records) -> Records:
        """Return the records whose event times are good.

        Raises:
            TooManyBadRecordsError: More are bad than `BatchSpec.max_bad_times` allows.
        """
        fine = timely(records, self._spec.event_time)
        self._records += len(records)
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
        most = self._spec.max_bad_times
        if self.count > most * self._records and (at_end or self._records >= _AFTER or most == 0):
            raise TooManyBadRecordsError(
                f"{self.count} of {self._records} records have a bad event time, more than the share of "
                f"{most} that is allowed. {self._last}. Make the column Unix seconds, "
                "name another one in BatchSpec(event_time=...), or allow more with max_bad_times."
            )

    def _bad(self, records: Records, row: int) -> BadRecord:
        column = self._spec.event_time or ""
        one = records.take(torch.tensor([row]))
        wrong = next(time for time in one[column].flat_values.tolist() if not is_second(time))
        return BadRecord(row, f"event time {column!r} {wrong_second(int(wrong))}", _as_json(one))


def _as_json(record: Records) -> bytes:
    values: dict[str, Any] = {}
    for name in record.columns:
        if record.columns[name].dtype is torch.uint8:
            values[name] = [text.decode("utf-8", "replace") for text in record.strings(name)[0]]
        else:
            values[name] = record[name].flat_values.tolist()
    return json.dumps(values).encode()
