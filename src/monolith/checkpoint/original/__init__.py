"""Checkpoints of the original system: table dumps and TensorFlow's tensor bundles, read and written here."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
