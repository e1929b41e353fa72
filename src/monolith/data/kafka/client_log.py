"""What the Kafka client says, in our log: the first line of a trouble, and not the hundreds after it.

Without a broker librdkafka says so some twenty times a second, for each address. It tries on by itself;
whoever waits for it decides when that was long enough, and says so in an error of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

QUIET_S = 60.0
"""Seconds in which nothing more of the same kind is shown."""

_CONNECTION = ("FAIL", "ERROR")
"""Kinds that say the same in other words: a broker cannot be reached, and all of them cannot."""


class ClientLog:
    """Takes the place of a logger for the client: one line of each kind a minute, the others for debugging.

    Thread-safe: the client calls from threads of its own.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()  # guards the moments
        self._shown_at: dict[str, float] = {}

    def log(self, level: int, message: str, *args: str) -> None:
        """Hear a line: its kind, the client's name and a text are the arguments."""
        if level < logging.WARNING:
            self._logger.log(level, message, *args)
            return
        kind = "connection" if args and args[0] in _CONNECTION else str(args[:1])
        with self._lock:
            now = self._clock()
            again = now - self._shown_at.get(kind, -QUIET_S) < QUIET_S
            if not again:
                self._shown_at[kind] = now
        if again:
            self._logger.debug(message, *args)
        else:
            self._logger.warning(
                f"kafka: the client tries on; it says: {message} (more of this is not shown for %.0f s)",
                *args,
                QUIET_S,
            )
