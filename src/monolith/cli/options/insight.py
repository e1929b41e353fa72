"""The options of `monolith insight`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class InsightOptions:
    """Show which features matter to a model: how much worse it is on evaluation data without each of them."""

    run_dir: str
    """The folder of a run; with --summaries, any folder with its event files below it."""
    config: Path | None = None
    """The config file of the run; by default the one it was trained with."""
    task: str | None = None
    """The task, path/to/file.py:Name; by default the one that was trained."""
    checkpoint: str | None = None
    """The checkpoint to read: model.ckpt-30, 30, best or latest. By default the best one, if the run was
    evaluated, and otherwise the latest."""
    examples: int = 20_000
    """Evaluation examples to measure on."""
    repeats: int = 5
    """How often each feature is shuffled; more give smaller errors."""
    summaries: bool = False
    """Read what a layer of the model listened to from the summaries of training instead (insight_every_steps,
    NAS weights); it does not say whether that helped."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    png: str | None = None
    """Also draw a picture to this file."""
    json: bool = False
    """Print one JSON object instead of tables."""
    top: int = 20
    """Features to show, the most important first; 0 shows all."""
    last: int = 10
    """With --summaries: how many of the newest of each kind to read; older ones describe an older model."""
