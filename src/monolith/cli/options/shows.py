"""What `monolith demo` and `monolith tour` take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Train a DeepFM on a stream that drifts, kill it, resume it, and show what continuous training gains."""

    seconds: float = 60.0
    """How many seconds to train, without the time that processes take to start."""
    dim: int = 8
    """Floats per embedding."""
    batch: int = 1024
    """Examples in a batch."""
    seed: int = 0
    """The same seed gives the same stream and the same first weights."""
    to: Path | None = None
    """A new folder for the model, its checkpoints and the picture; by default a temporary one. It is kept."""
    quick: bool = False
    """Train only a few steps on a small stream, to see that it works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TourOptions:
    """Take a short tour of the table: insert, look up, train, expire, save, restore."""

    rows: int = 1_000_000
    """How many ids the tour inserts into its table."""
    dim: int = 16
    """Floats per embedding."""
    seed: int = 0
    """The same seed gives the same ids and gradients."""
