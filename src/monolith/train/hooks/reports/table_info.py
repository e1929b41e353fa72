"""How large the tables are, in the log now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from monolith.table import TableStats
from monolith.train.hook import Hook, Run, StepResult

_log = logging.getLogger(__name__)


class TableInfoHook(Hook):
    """Logs rows and bytes of each table, at most every so many seconds.

    Args:
        stats: Asked only when there is something to log.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, TableStats]],
        *,
        every_secs: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._every_secs = every_secs
        self._clock = clock
        self._last: float | None = None

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        now = self._clock()
        if self._last is not None and now < self._last + self._every_secs:
            return
        self._last = now
        for name, table in self._stats().items():
            _log.info("step %d: table %s: %d rows, %d bytes", run.step, name, table.rows, table.bytes_total)
