"""Timing on a machine that others use too.

Contenders take turns in short windows, so that a disturbance hits all of them
alike, and the best window of each counts: noise only ever makes work slower. A
contender continues with the next batch after its last window, so a slow one
does not see the same few rows again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch


class Timing(TypedDict):
    """How long to look."""

    repeats: int
    """Rounds after the one to warm up."""
    window: float
    """Seconds a contender works for at a time."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Does the same work on one batch after another."""

    rows: int
    """Rows in a batch."""
    run: Callable[[int], object]
    """Works on the batch of this number."""
    batches: Iterator[int]
    """Numbers of batches, without end."""

    def rows_per_s(self, window: float) -> float:
        """Work for `window` seconds, for one batch at least, and return the rate."""
        done = 0
        began = time.perf_counter()
        while True:
            self.run(next(self.batches))
            done += self.rows
            elapsed = time.perf_counter() - began
            if elapsed >= window:
                return done / elapsed


def race(contenders: Mapping[str, Contender], *, repeats: int, window: float) -> dict[str, float]:
    """Return each contender's best rate in rows/s, after a round to warm up."""
    best = dict.fromkeys(contenders, 0.0)
    for turn in range(repeats + 1):
        for name, contender in contenders.items():
            rate = contender.rows_per_s(window)
            if turn > 0:
                best[name] = max(best[name], rate)
    return best


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute with one thread for a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
