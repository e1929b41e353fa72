"""Failover: what one worker does when others of its run are lost.

It waits, joins again and goes on from the last checkpoint. A retry counts only where a server was
replaced meanwhile. Where all servers are the ones they were, the trouble was of the moment (a slow
server, a worker that restarted), and retrying costs nothing; but not without end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from monolith.errors import RetryableError
from monolith.observe import Metrics
from monolith.run import FailoverConfig

UNCOUNTED = 100
"""Retries in a row that need not count, none of which trained for as long as `STEADY`."""
STEADY = timedelta(minutes=10)

Servers = tuple[str, ...]
"""The processes of a run's parameter servers."""


class Failover:
    """Counts the retries of one worker.

    Args:
        say: Told why and when it retries.
        pause: Waits for so many seconds; returns True if somebody wants the run to stop meanwhile.
    """

    def __init__(
        self,
        config: FailoverConfig,
        metrics: Metrics,
        *,
        say: Callable[[str], None],
        pause: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_retries = config.max_retries
        self._wait = config.wait.total_seconds()
        self._metrics = metrics
        self._say = say
        self._pause = pause
        self._clock = clock
        self._servers: Servers = ()
        self._counted = 0
        self._uncounted = 0
        self._began = clock()
        self._error: RetryableError | None = None

    def joined(self, servers: Servers) -> None:
        """Note whom an attempt trains with; an attempt more than is allowed ends here.

        Raises:
            RetryableError: What ended the attempt before.
        """
        if self._error is not None:
            changed = servers != self._servers
            self._counted += changed
            self._uncounted += not changed
            if self._counted > self._max_retries or self._uncounted > UNCOUNTED:
                raise self._error
        self._servers, self._began = servers, self._clock()

    def lost(self, error: RetryableError) -> None:
        """Wait after an attempt has failed.

        Raises:
            RetryableError: The same, where no more attempts are allowed.
        """
        if self._clock() - self._began >= STEADY.total_seconds():
            self._uncounted = 0
        if not self._max_retries:
            raise error
        self._error = error
        self._metrics.counter("worker_failovers", "Retries after other processes were lost.").inc()
        self._say(
            f"{error}\nretrying in {self._wait:g} s (servers replaced so far: {self._counted}, at most "
            f"{self._max_retries})"
        )
        if self._pause(self._wait):
            raise error
