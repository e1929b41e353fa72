"""Empty cells: numbers that were not there and read as the `missing` of their feature, said aloud.

A column that lost half of its numbers trains as well as a whole one, without an error; nobody should have to
find out from the model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from monolith.observe import Doublings

_log = logging.getLogger(__name__)


class EmptyCells:
    """Counts them, and says so at the first of a feature, then whenever their number has doubled.

    Safe from any thread.

    Args:
        missing: What the empty cells of each feature read as.
    """

    def __init__(self, missing: Mapping[str, float]) -> None:
        self._missing = missing
        self._lock = threading.Lock()  # guards what follows
        self._records = 0
        self._counts = dict.fromkeys(missing, 0)
        self._doublings = {name: Doublings() for name in missing}

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
                if count and self._doublings[name].due(self._counts[name]):
                    _log.warning(
                        "features.%s: %s of %s records so far have an empty cell, which reads as its "
                        "`missing`, %g. If that is wrong, set `missing` to another number, or to none to "
                        "leave such records out.",
                        name,
                        f"{self._counts[name]:,}",
                        f"{self._records:,}",
                        self._missing[name],
                    )
