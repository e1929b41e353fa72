"""The runtime: what runs a task, in one process, on parameter servers or across ranks."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
