"""What rows have learned from: stamped when a batch is read, and told when its update is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from monolith.feature import FeatureIds
from monolith.sync.messages import LearnedUpTo


class Learning:
    """How far the rows of this process have learned. One thread notes, any reads: a note replaces another.

    Args:
        on_note: Called after each note, on the thread that notes.
    """

    def __init__(self, on_note: Callable[[], None] = lambda: None) -> None:
        self._newest = LearnedUpTo()
        self._on_note = on_note

    def note(self, learned: LearnedUpTo) -> None:
        """Take in what was learned. The newest event stays the newest, whatever comes late."""
        before = self._newest
        if learned.event_at < before.event_at:
            learned = replace(learned, event_at=before.event_at, read_at=before.read_at)
        self._newest = learned
        self._on_note()

    def forget(self) -> None:
        """Begin anew, where rows went back to what they had been before."""
        self._newest = LearnedUpTo()

    def now(self) -> LearnedUpTo:
        return self._newest


def newest_event(ids: FeatureIds) -> float:
    """Return the event time of the newest event of a batch; 0 where it has none."""
    times = ids.event_times
    if times is None or not len(times):
        return float(ids.event_time)
    return float(times.max())


Learned = Callable[[LearnedUpTo], None]
"""Told, when the rows of a batch are up to date, what they have learned from."""
