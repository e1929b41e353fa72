"""What the save hooks of one model directory know of each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SaveMemory:
    """What is on disk or on its way there, and how long training waited for it. Thread-safe."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        self._timer = timer
        self._lock = threading.Lock()  # guards all below
        self._waited = 0.0
        self._since: float | None = None
        self._full_step: int | None = None
        self._being_written: int | None = None
        self._dense_only = False

    def note_full(self, step: int | None) -> None:
        """A full checkpoint of this step is on disk; None: of no step that still counts."""
        with self._lock:
            self._full_step = step

    def note_writing(self, step: int | None) -> None:
        """A full checkpoint of this step is being written, perhaps beside the training; None: no more."""
        with self._lock:
            self._being_written = step

    def note_dense_only(self) -> None:
        """There is a hook that saves dense weights only."""
        with self._lock:
            self._dense_only = True

    def has_full(self, step: int) -> bool:
        """Whether there is a full checkpoint of this step, or will be unless writing it fails."""
        with self._lock:
            return step in (self._full_step, self._being_written)

    @property
    def has_dense_only(self) -> bool:
        with self._lock:
            return self._dense_only

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as one in which training waits for a save. Blocks may be nested."""
        with self._lock:
            is_outer = self._since is None
            if is_outer:
                self._since = self._timer()
        try:
            yield
        finally:
            if is_outer:
                with self._lock:
                    assert self._since is not None
                    self._waited, self._since = self._waited + self._timer() - self._since, None

    @property
    def waited_seconds(self) -> float:
        """How long training has waited for saves so far."""
        with self._lock:
            return self._waited
