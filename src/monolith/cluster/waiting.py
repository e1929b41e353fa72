"""Waiting: asking again until there is an answer, but not for ever.

Processes of a job start in any order, so each waits for others. The clock and the
sleep are handed in: a test waits for an hour in no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

Clock = Callable[[], float]
"""Seconds. Monotonic where durations are measured, Unix time where processes compare them."""

Sleep = Callable[[float], object]
"""Lets so many seconds pass."""

T = TypeVar("T")


def poll(
    ask: Callable[[], T | None],
    *,
    timeout: timedelta | None,
    every: timedelta,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> T | None:
    """Ask until the answer is not None and return it; return None when `timeout` is over.

    Asks at least once, and once more at the very end. A timeout of zero asks once and never sleeps.

    Args:
        timeout: None waits for as long as it takes.
    """
    start = clock()
    while (answer := ask()) is None:
        left = None if timeout is None else timeout.total_seconds() - (clock() - start)
        if left is not None and left <= 0:
            return None
        sleep(every.total_seconds() if left is None else min(every.total_seconds(), left))
    return answer
