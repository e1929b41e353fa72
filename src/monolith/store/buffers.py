"""What workers lay down on a server for each other: buffers of a module, such as the means of a batch norm.

A worker computes them from its own share of the data. Servers do not look into them: whoever saves takes
those of all, and who joins takes those that the chief restored.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from monolith.errors import FeatureError
from monolith.wire.bulk import Bytes

MOST_BYTES = 4 << 30
"""Of all workers together."""


@dataclass(frozen=True, slots=True, eq=False)
class LaidDown:
    """The buffers of one worker."""

    worker: int
    examples: int
    """How many it has trained on to come to them."""
    data: Bytes


class BufferShelf:
    """The buffers that each worker gave last. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()  # guards _held
        self._held: dict[int, LaidDown] = {}

    def lay_down(self, given: LaidDown) -> None:
        """Keep what a worker gave, in place of what it gave before.

        Raises:
            FeatureError: Another worker gave more bytes, or fewer: their models differ. Or all together are
                too much.
        """
        copy = LaidDown(given.worker, given.examples, np.array(given.data, np.uint8))
        with self._lock:
            for other in self._held.values():
                if other.worker != given.worker and len(other.data) != len(copy.data):
                    raise FeatureError(
                        f"worker {given.worker} has buffers of {len(copy.data):,} bytes, and worker "
                        f"{other.worker} of {len(other.data):,}. Do all processes run the same task?"
                    )
            workers = len(self._held.keys() | {given.worker})
            if workers * len(copy.data) > self._most_bytes:
                raise FeatureError(
                    f"{workers} workers have buffers of {len(copy.data):,} bytes each, and a server keeps "
                    f"{self._most_bytes:,} at most. Register buffers that need not be saved as "
                    "persistent=False."
                )
            self._held[given.worker] = copy

    def take(self, worker: int | None = None) -> list[LaidDown]:
        """Return what all workers gave, in order, or one of them."""
        with self._lock:
            return [self._held[one] for one in sorted(self._held) if worker in (None, one)]
