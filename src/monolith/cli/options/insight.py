"""The options of `monolith insight`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class InsightOptions:
    """Show which features matter to a model, from the summaries its training wrote."""

    run_dir: str
    """The folder of a run, or any folder with its event files below it."""
    png: str | None = None
    """Also draw a picture to this file."""
    json: bool = False
    """Print one JSON object instead of tables."""
    top: int = 20
    """Features to show, the most important first; 0 shows all."""
    last: int = 10
    """How many of the newest summaries of each kind to read: older ones describe an older model."""
