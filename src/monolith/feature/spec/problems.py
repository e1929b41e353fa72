"""Problems of records: why a record is bad, and how many cells of a feature are empty.

A column that lost half of its numbers trains without an error: each empty cell reads as the `missing` of its
feature. So empty cells are counted and logged, for the user not to find out from the model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from monolith.table.arguments import wrong_second

_log = logging.getLogger(__name__)

_AFTER = 1000
"""Records after which the fraction of empty cells means something."""


class BadReason(str):
    """Why a record is bad, with the values that were found in it; `cause` is the same for all such records.

        BadReason("label 'y' is …", "[nan]")    # "label 'y' is [nan]", of cause "label 'y' is …"

    Reports count records by cause: with their values, reasons are as many as there are records.
    """

    cause: str
    values: str

    def __new__(cls, cause: str, *values: str) -> BadReason:
        """
        Args:
            cause: A text with … in place of each value.
        """
        first, *rest = cause.split("…")
        reason = super().__new__(cls, first + "".join(map("".join, zip(values, rest, strict=False))))
        reason.cause, reason.values = cause, ", ".join(values)
        return reason

    @classmethod
    def of_time(cls, column: str, time: int) -> BadReason:
        """Return the reason of an event time that is out of range."""
        what, got, value = wrong_second(time).partition(", got ")
        return cls(f"event time {column!r} {what}{got}…", value)


class EmptyCells:
    """Counts empty cells, and warns once for each feature: after `_AFTER` records, or at the end.

    Safe from any thread.

    Args:
        missing: By feature, the number that its empty cells read as.
    """

    def __init__(self, missing: Mapping[str, float]) -> None:
        self._missing = missing
        self._lock = threading.Lock()  # guards all below
        self._records = 0
        self._counts = dict.fromkeys(missing, 0)
        self._told: set[str] = set()

    @property
    def counts(self) -> dict[str, int]:
        """The number of empty cells of each feature that has some."""
        with self._lock:
            return {name: count for name, count in self._counts.items() if count}

    def note(self, empty: Mapping[str, int], records: int) -> None:
        """Count some records, and the empty cells of each feature among them."""
        with self._lock:
            self._records += records
            for name, count in empty.items():
                self._counts[name] += count
            is_due = self._records >= _AFTER and any(name not in self._told for name in empty)
        if is_due:
            self.tell()

    def tell(self) -> None:
        """Log the features with empty cells in one line, except those that were logged before."""
        with self._lock:
            new = {name: count for name, count in self._counts.items() if count and name not in self._told}
            self._told |= new.keys()
            records = self._records
        if new:
            said = ", ".join(
                f"{name}: {count:,} (read as {self._missing[name]:g})" for name, count in new.items()
            )
            _log.warning(
                "of %s records so far, some have no number in these features: %s. If that is wrong, set "
                "`missing` of a feature to another number, or to none to drop such records.",
                f"{records:,}",
                said,
                extra={"cause": f"empty cells of {', '.join(new)}"},
            )
