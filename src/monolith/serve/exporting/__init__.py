"""Exporting: a checkpoint and its model become a servable folder."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
