"""Bad values: records that can be read, and that a model must not be trained on.

An event time in milliseconds where seconds are expected, before 1970 or beyond what a row can keep; a label
that is NaN or infinite. Such a record is as bad as one that cannot be read: it is left out, counted, and kept
by the source for whoever looks into it. One of them does not end a run; where they are many, the column is
wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
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


class BadRecords:
    """Leaves bad records out, as long as they are few: keeps them, counts them, and says so now and then.

    Args:
        max_bad: The share of records that may be bad.
        set_aside: Given them, with their values as JSON.
        what: Is wrong with them, and `advice` what to do, for the error that ends a run.
    """

    def __init__(
        self, max_bad: float, set_aside: Callable[[Sequence[BadRecord]], None], *, what: str, advice: str
    ) -> None:
        self._max_bad = max_bad
        self._set_aside = set_aside
        self._what = what
        self._advice = advice
        self._doublings = Doublings()
        self._records = 0
        self._last = ""
        self.count = 0
        """How many were left out."""

    def see(self, records: int) -> None:
        """Count records that were read, good or bad."""
        self._records += records

    def leave_out(self, records: Records, bad: Mapping[int, str]) -> Records:
        """Return the records that are good.

        Args:
            bad: Position of each that is bad, in order, to the reason.

        Raises:
            TooManyBadRecordsError: More are bad than are allowed.
        """
        if not bad:
            return records
        self.count += len(bad)
        self._last = list(bad.values())[-1]
        self._set_aside(
            [BadRecord(row, why, _as_json(records.take(torch.tensor([row])))) for row, why in bad.items()]
        )
        if self._doublings.due(self.count):
            _log.warning("left out %d of %d records so far: %s", self.count, self._records, self._last)
        self.judge(at_end=False)
        fine = torch.ones(len(records), dtype=torch.bool)
        fine[torch.tensor(list(bad))] = False
        return records.keep(fine)

    def judge(self, *, at_end: bool) -> None:
        """Refuse to go on if too many are bad."""
        most = self._max_bad
        if self.count > most * self._records and (at_end or self._records >= _AFTER or most == 0):
            raise TooManyBadRecordsError(
                f"{self.count} of {self._records} records {self._what}, more than the "
                f"share of {most} that is allowed. {self._last}. {self._advice}"
            )


class BadValues:
    """Leaves out records with a bad event time or label, as long as they are few.

    Args:
        set_aside: Given them, with their values as JSON.
    """

    def __init__(self, spec: BatchSpec, set_aside: Callable[[Sequence[BadRecord]], None]) -> None:
        self._spec = spec
        self._labels = sorted({column for column, _ in spec.labels.values()})
        self._bad = BadRecords(
            spec.max_bad,
            set_aside,
            what="have a bad event time or label",
            advice="Make event times Unix seconds and labels numbers, name other columns in BatchSpec, or "
            "allow more with its max_bad.",
        )

    @property
    def count(self) -> int:
        """How many were left out."""
        return self._bad.count

    def left_out(self, records: Records) -> Records:
        """Return the records whose event times and labels are good.

        Raises:
            TooManyBadRecordsError: More are bad than `BatchSpec.max_bad` allows.
        """
        self._bad.see(len(records))
        fine = timely(records, self._spec.event_time)
        for name in self._labels:
            if name in records.columns and name not in records.shared:
                fine &= ~not_finite(records[name])
        if bool(fine.all()):
            return records
        rows = (~fine).nonzero().squeeze(1).tolist()
        return self._bad.leave_out(
            records, {row: self._reason(records.take(torch.tensor([row]))) for row in rows}
        )

    def judge(self, *, at_end: bool) -> None:
        """Refuse to go on if too many are bad."""
        self._bad.judge(at_end=at_end)

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
