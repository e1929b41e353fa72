"""Hooks that start, hold and stop a run: operators, alerts, memory, hours of the day, barriers."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
