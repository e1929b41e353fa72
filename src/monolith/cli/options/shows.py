"""What `monolith demo` and `monolith tour` take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Train on a live stream and serve it: a new item, a kill -9, wrong labels, and the page to watch it."""

    seconds: float = 90.0
    """How many seconds it takes, on a machine that is not busy with something else."""
    dim: int = 8
    """Floats per embedding."""
    batch: int = 200
    """Examples in a batch."""
    seed: int = 0
    """The same seed gives the same stream and the same first weights."""
    to: Path | None = None
    """A new folder for the model, its checkpoints and the picture; by default a temporary one. It is kept."""
    quick: bool = False
    """Tell the story on a small stream in a few seconds, to see that it works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TourOptions:
    """Take a short tour of the table: insert, look up, train, expire, save, restore."""

    rows: int = 1_000_000
    """How many ids the tour inserts into its table."""
    dim: int = 16
    """Floats per embedding."""
    seed: int = 0
    """The same seed gives the same ids and gradients."""
