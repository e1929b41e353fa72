"""Empty cells: numbers that were not there and read as the `missing` of their feature, said aloud.

A column that lost half of its numbers trains as well as a whole one, without an error; a user should
not have to find out from the model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

_log = logging.getLogger(__name__)

_AFTER = 1000
"""Records after which the shares of empty cells mean something."""


class EmptyCells:
    """Counts them, and says so once for each feature: when there were `_AFTER` records, or at their end.

    Safe from any thread.

    Args:
        missing: What the empty cells of each feature read as.
    """

    def __init__(self, missing: Mapping[str, float]) -> None:
        self._missing = missing
        self._lock = threading.Lock()  # guards what follows
        self._records = 0
        self._counts = dict.fromkeys(missing, 0)
        self._told: set[str] = set()

    @property
    def counts(self) -> dict[str, int]:
        """How many there were, of each feature that had some."""
        with self._lock:
            return {name: count for name, count in self._counts.items() if count}

    def note(self, empty: Mapping[str, int], records: int) -> None:
        """Take note of some records, and of how many of them were empty."""
        with self._lock:
            self._records += records
            for name, count in empty.items():
                self._counts[name] += count
            is_due = self._records >= _AFTER and any(name not in self._told for name in empty)
        if is_due:
            self.tell()

    def tell(self) -> None:
        """Log the features that have empty cells, all in one line, but for those that it named before."""
        with self._lock:
            new = {name: count for name, count in self._counts.items() if count and name not in self._told}
            self._told |= new.keys()
            records = self._records
        if new:
            said = ", ".join(
                f"{name}: {count:,} (read as {self._missing[name]:g})" for name, count in new.items()
            )
            _log.warning(
                "of %s records so far, some have no number in these features: %s. Where that is wrong, set "
                "`missing` of a feature to another number, or to none to leave such records out.",
                f"{records:,}",
                said,
                extra={"cause": f"empty cells of {', '.join(new)}"},
            )
