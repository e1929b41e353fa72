"""Serving: what a checkpoint becomes to be asked, and what answers."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
