"""Checkpoints without a run: list, read, compare, reshard and export them."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
