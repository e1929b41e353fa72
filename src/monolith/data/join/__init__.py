"""Joining streams: a record waits for what belongs to it."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
