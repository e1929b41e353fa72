"""Refusals: ids that a full table turns away, said aloud.

A table that has reached its budget goes on without new ids: they read as zeros and learn nothing. That is
what the budget asked for, but nobody should have to find out from a counter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from monolith.observe import Doublings
from monolith.observe.progress import describe_bytes
from monolith.table.config import TableConfig

_log = logging.getLogger(__name__)


class Refusals:
    """Warns of the first id that one table refuses, then whenever their number has doubled."""

    def __init__(self, config: TableConfig) -> None:
        self._config = config
        self._doublings = Doublings()

    def note(self, refused: int, rows: Callable[[], int]) -> None:
        """Take note of how many ids were refused so far.

        Args:
            rows: Says how many there are; asked only where there is something to say.
        """
        if not self._doublings.due(refused):
            return
        config = self._config
        budget = config.capacity_bytes
        room = "raise capacity_bytes, admit fewer ids (occurrence_threshold), let rows expire (expire_after)"
        if config.when_full != "expire_oldest":
            room += ", or set when_full='expire_oldest'"
        _log.warning(
            "table %r is full: it refused %s new ids and holds %s rows; %s. Refused ids read as zeros and "
            "learn nothing. To make room, %s.",
            config.name,
            f"{refused:,}",
            f"{rows():,}",
            "memory is short" if budget is None else f"its capacity_bytes is {describe_bytes(budget)}",
            room,
        )
