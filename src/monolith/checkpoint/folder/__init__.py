"""The folder of checkpoints: its state files, its lock, its manifests, and which checkpoints are deleted."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
