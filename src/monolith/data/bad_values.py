"""Bad values: records that can be read, and that a model must not be trained on.

A bad event time is missing, before 1970 or beyond what a row can store; a bad label is infinite or missing.
Such a record is as bad as one that cannot be read: it is dropped, counted, and quarantined by the source for
an operator. One of them does not end a run; many mean that the column is wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monolith.data.format import BadRecord
from monolith.data.records import BatchSpec, Records, infinite_rows, timely
from monolith.errors import TooManyBadRecordsError
from monolith.feature.spec.problems import BadReason
from monolith.table.arguments import is_second

_log = logging.getLogger(__name__)

_AFTER = 1000
"""Records to read before `max_bad` is checked; a `max_bad` of 0 is checked at once."""


class BadTally:
    """Why records were dropped: how many for each cause, and where the first of each is, if known.

    One thread writes it, and any may read it.
    """

    REASONS = 32
    """The most causes that are counted separately. Features have few each; the reason of a user's own check
    may contain values, and then differs for every record."""
    OTHER = "for other reasons"

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """By cause: reasons that differ in the values alone are one."""
        self._places: dict[str, str | None] = {}

    def knows(self, reason: str) -> bool:
        """Whether a reason has a place, or was found to have none."""
        return reason in self._places

    def place(self, reason: str, where: str | None) -> None:
        """Note where the first record is that is bad for a reason."""
        self._places[reason] = where

    def add(self, reason: str) -> str:
        """Count a record, and return the cause."""
        cause = reason
        if isinstance(reason, BadReason):
            cause = reason.cause
            self._places.setdefault(cause, reason.values)
        if cause not in self.counts and len(self.counts) >= self.REASONS:
            cause = self.OTHER
        self.counts[cause] = self.counts.get(cause, 0) + 1
        return cause

    def describe(self, reason: str) -> str:
        """Return a cause with the place, or the values, of the first record, if they are known."""
        where = self._places.get(reason)
        return reason if where is None else f"{reason} (the first: {where})"

    def described(self) -> dict[str, int]:
        """Return all reasons, with places, and how many records each is of."""
        return {self.describe(reason): count for reason, count in list(self.counts.items())}


class BadRecords:
    """Drops bad records as long as they are few; counts them and rejects them to the source.

    The log has one line for each cause, when it is first seen, and one at the end with all counts.

    Args:
        max_bad: The fraction of records that may be bad.
        reject: Called with the bad records, whose payload is their values as JSON.
        what: Says what is wrong with them, and `advice` what to do, for the error that ends a run.
        first_empty: Returns where the first empty cell of a column is, if known.
        told: Causes that were logged before, while the same kind of data was read; this adds to them.
    """

    def __init__(
        self,
        max_bad: float,
        reject: Callable[[Sequence[BadRecord]], None],
        *,
        what: str,
        advice: str,
        first_empty: Callable[[str], str | None] = lambda _: None,
        told: set[str] | None = None,
    ) -> None:
        self._max_bad = max_bad
        self._reject = reject
        self._what = what
        self._advice = advice
        self._first_empty = first_empty
        self.tally = BadTally()
        """Why they were dropped."""
        self._told = set() if told is None else told
        self._is_news = False
        self._records = 0
        self._last = ""
        self.count = 0
        """How many were dropped."""

    def see(self, records: int) -> None:
        """Count records that were read, good or bad."""
        self._records += records

    def leave_out(
        self, records: Records, bad: Mapping[int, str], empty: Mapping[str, str] | None = None
    ) -> Records:
        """Return the records that are good.

        Args:
            bad: The row of each bad record, in order, to the reason.
            empty: Column to the reason, of the reasons that are an empty cell of it.

        Raises:
            TooManyBadRecordsError: More are bad than are allowed.
        """
        if not bad:
            return records
        self.count += len(bad)
        for column, reason in (empty or {}).items():
            if not self.tally.knows(reason):
                self.tally.place(reason, self._first_empty(column))
        # Count by cause, not by reason: reasons contain values, and would be as many as records.
        causes = dict.fromkeys([self.tally.add(reason) for reason in bad.values()])
        self._last = self.tally.describe(list(bad.values())[-1])
        self._reject(
            [BadRecord(row, why, _as_json(records.take(torch.tensor([row])))) for row, why in bad.items()]
        )
        for cause in causes:
            if cause not in self._told:
                self._told.add(cause)
                self._is_news = True
                _log.warning(
                    "a record of the first %s is left out: %s. More like it are counted.",
                    f"{self._records:,}",
                    self.tally.describe(cause),
                    extra={"cause": str(cause)},  # an evaluation counts for itself, and finds the same
                )
        self.judge(at_end=False)
        fine = torch.ones(len(records), dtype=torch.bool)
        fine[torch.tensor(list(bad))] = False
        return records.keep(fine)

    def judge(self, *, at_end: bool) -> None:
        """Raise an error if too many are bad; at the end, log how many were."""
        if at_end and self._is_news:
            self._is_news = False
            said = "; ".join(f"{count:,}: {why}" for why, count in self.tally.described().items())
            _log.warning(
                "left out %s of %s records: %s",
                f"{self.count:,}",
                f"{self._records:,}",
                said,
                extra={"cause": f"left out: {', '.join(map(str, self.tally.counts))}"},
            )
        most = self._max_bad
        if self.count > most * self._records and (at_end or self._records >= _AFTER or most == 0):
            raise TooManyBadRecordsError(
                f"{self.count} of {self._records} records {self._what}, more than the "
                f"fraction of {most} that is allowed. {self._last}. {self._advice}"
            )


class BadValues(BadRecords):
    """Drops records with a bad event time or label, as long as they are few.

    Args:
        reject: Called with the bad records, whose payload is their values as JSON.
        first_empty: See `BadRecords`.
    """

    def __init__(
        self,
        spec: BatchSpec,
        reject: Callable[[Sequence[BadRecord]], None],
        *,
        first_empty: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._labels = sorted({column for column, _ in spec.labels.values()})
        super().__init__(
            spec.max_bad,
            reject,
            what="have a bad event time or label",
            advice="Make event times Unix seconds and labels numbers, name other columns in BatchSpec, or "
            "allow more with its max_bad.",
            first_empty=first_empty,
        )

    def good(self, records: Records) -> Records:
        """Return the records whose event times and labels are good.

        Raises:
            TooManyBadRecordsError: More are bad than `BatchSpec.max_bad` allows.
        """
        self.see(len(records))
        fine = timely(records, self._spec.event_time)
        for name in self._labels:
            if name in records.columns and name not in records.shared:
                fine &= ~infinite_rows(records[name])
        without = self._without_labels(records)
        if bool((fine & ~without).all()):
            return records
        bad = dict.fromkeys(without.nonzero().squeeze(1).tolist(), self._no_label)
        for row in (~fine).nonzero().squeeze(1).tolist():
            bad[row] = self._reason(records.take(torch.tensor([row])))
        empty = {name: self._no_label for name in self._labels[:1] if bool(without.any())}
        return self.leave_out(records, dict(sorted(bad.items())), empty)

    def _without_labels(self, records: Records) -> Tensor:
        """Return a bool per record: whether it has none of its labels, so that no head can train on it."""
        spec = self._spec
        columns = {column for column, _ in spec.labels.values()}
        if not columns or columns & set(spec.optional):
            return torch.zeros(len(records), dtype=torch.bool)
        without = torch.ones(len(records), dtype=torch.bool)
        for column, position in spec.labels.values():
            if column not in records.columns:
                return torch.zeros(len(records), dtype=torch.bool)  # the check of columns reports it
            numbers = records[column]
            if numbers.dtype is torch.uint8:
                return torch.zeros(len(records), dtype=torch.bool)  # texts: the maker of the batch reports it
            labels = numbers.with_flat_values(numbers.flat_values.to(torch.float32))
            without &= labels.to_padded(position + 1, torch.nan)[:, position].isnan()
        return without

    @property
    def _no_label(self) -> str:
        names = " and ".join(map(repr, self._labels))
        return f"label {names} is empty" if len(self._labels) == 1 else f"labels {names} are empty"

    def _reason(self, record: Records) -> str:
        column = self._spec.event_time or ""
        if not bool(timely(record, column).all()):
            wrong = next(time for time in record[column].flat_values.tolist() if not is_second(time))
            return BadReason.of_time(column, int(wrong))
        name = next(name for name in self._labels if bool(infinite_rows(record[name]).any()))
        return BadReason(f"label {name!r} is …", ", ".join(map(str, record[name].flat_values.tolist())))


def _as_json(record: Records) -> bytes:
    values: dict[str, Any] = {}
    for name in record.columns:
        if record.columns[name].dtype is torch.uint8:
            values[name] = [text.decode("utf-8", "replace") for text in record.strings(name)[0]]
        else:
            values[name] = record[name].flat_values.tolist()
    return json.dumps(values).encode()
