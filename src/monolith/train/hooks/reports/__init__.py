"""Hooks that report what a run does: lines, summaries, metrics, profiles and dumps."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
